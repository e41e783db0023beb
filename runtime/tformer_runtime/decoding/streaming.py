"""Generate text in pieces."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable

from tformer_runtime.decoding.generator import Generator
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.request import Request, Result
from tformer_runtime.decoding.sequence import SequenceTask, Token
from tformer_runtime.preprocess.tokenizer import Detokenizer


class TextStream:
    """The text of a request in pieces, as soon as each is final. Beam search has its text in one piece.

    The task refers to this object, and not the other way round, so that the memory of the task is freed with the task.
    """

    def __init__(
        self, generator: Generator, request: Request, settings: Settings, on_piece: Callable[[str], None]
    ) -> None:
        """on_piece: called by the decoding thread with each piece that is not empty, with the prefix at once."""
        assert generator.codec is not None
        self._generator, self._on_piece = generator, on_piece
        self._text = None if settings.beams else Detokenizer(generator.codec, settings.stop_strings)
        self._request, self._settings = request, settings
        if self._text is not None:
            self._emit("".join(map(self._text.push, request.prefix)))

    def make_task(self) -> SequenceTask:
        return self._generator.make_task(self._request, self._settings, self._on_token if self._text else None)

    def finish(self, task: SequenceTask) -> None:
        """Emit the rest of the text of a finished task. Raise the error of the task."""
        if self._text is None or task.error is not None:
            self._emit(self._generator.make_result(task).text)
        else:
            self._emit(self._text.finish())

    def _on_token(self, token: Token) -> None:
        assert self._text is not None
        if token.finish != "end":
            self._emit(self._text.push(token.id))

    def _emit(self, piece: str) -> None:
        if piece:
            self._on_piece(piece)


def generate_stream(
    generator: Generator, request: Request, settings: Settings
) -> collections.abc.Generator[str, None, Result]:
    """Yield pieces of the text of one request as soon as they are final. Return the whole result."""
    pieces: list[str] = []
    stream = TextStream(generator, request, settings, pieces.append)
    task = stream.make_task()
    scheduler = generator.new_scheduler(settings, task.width, joins=False)
    try:
        scheduler.submit(task)
        while not task.finished:
            scheduler.step()
            if task.finished:
                stream.finish(task)
            if piece := "".join(pieces):
                yield piece
            pieces.clear()
        return generator.make_result(task)
    finally:
        scheduler.release()
