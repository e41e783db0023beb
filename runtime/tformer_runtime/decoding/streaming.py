"""Generate text in pieces."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable

from msgspec import Struct

from tformer_runtime.decoding.generator import Generator
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.request import Request, Result
from tformer_runtime.decoding.sequence import Alternatives, FinishReason, SequenceTask, Token
from tformer_runtime.preprocess.tokenizer import Detokenizer


class Piece(Struct, frozen=True):
    """A part of one result of a request.

    number: of the result, from 0: the number of the sample, or the place in the order of beam search.
    text: that has become final; empty while a stop string or a character may go on, and without a tokenizer.
    token_ids, token_logprobs, top_logprobs: of the tokens that were chosen since the last piece; see `Result`. The
        forced prefix has no log-probabilities.
    finish_reason: set for the last piece of the result.
    """

    number: int
    text: str
    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    finish_reason: FinishReason | None = None


class TextStream:
    """The results of a request in pieces, as soon as each is final. Beam search has each result in one piece.

    The task refers to this object, and not the other way round, so that the memory of the task is freed with the task.
    """

    def __init__(
        self, generator: Generator, request: Request, settings: Settings, on_piece: Callable[[Piece], None]
    ) -> None:
        """on_piece: called by the decoding thread with each piece, and with the forced prefix at once."""
        self._generator, self._on_piece = generator, on_piece
        self._request, self._settings = request, settings
        codec, count = generator.codec, settings.num_return_sequences
        self._texts = [] if codec is None else [Detokenizer(codec, settings.stop_strings) for _ in range(count)]
        if request.prefix and not settings.beams:
            for number in range(count):
                text = "".join(self._push(number, token) for token in request.prefix)
                self._on_piece(Piece(number, text, tuple(request.prefix)))

    def make_task(self) -> SequenceTask:
        return self._generator.make_task(
            self._request, self._settings, None if self._settings.beams else self._on_token
        )

    def finish(self, task: SequenceTask) -> None:
        """Emit the results of a finished beam search. Raise the error of the task."""
        if task.error is not None:
            raise task.error
        if not self._settings.beams:
            return
        result = self._generator.make_result(task)
        for number, one in enumerate((result, *result.alternatives)):
            tokens = one.token_ids, one.token_logprobs, one.top_logprobs
            self._on_piece(Piece(number, one.text, *tokens, finish_reason=one.finish_reason))

    def _push(self, number: int, token: int) -> str:
        return self._texts[number].push(token) if self._texts else ""

    def _on_token(self, token: Token) -> None:
        text = "" if token.finish == "end" else self._push(token.copy, token.id)
        finish = token.finish
        if finish is not None and self._texts:
            text += self._texts[token.copy].finish()
            finish = "stop" if self._texts[token.copy].stopped else finish
        alternatives = (token.alternatives,) if self._settings.top_logprobs else ()
        self._on_piece(Piece(token.copy, text, (token.id,), (token.logprob,), alternatives, finish))


def generate_stream(
    generator: Generator, request: Request, settings: Settings
) -> collections.abc.Generator[str, None, Result]:
    """Yield pieces of the text of one request as soon as they are final. Return the whole result."""
    pieces: list[Piece] = []
    stream = TextStream(generator, request, settings, pieces.append)
    task = stream.make_task()
    scheduler = generator.new_scheduler(settings, task.width, joins=False)
    try:
        scheduler.submit(task)
        while not task.finished:
            scheduler.step()
            if task.finished:
                stream.finish(task)
            if text := "".join(piece.text for piece in pieces):
                yield text
            pieces.clear()
        return generator.make_result(task)
    finally:
        scheduler.release()
