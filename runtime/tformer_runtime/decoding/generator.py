"""Options and prepared requests in, results out: what a request is to the search, and what its end is to the caller."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.batch_rows import Starter
from tformer_runtime.decoding.constraints import Grammar, Guide
from tformer_runtime.decoding.logit_rules import rules_of
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.request import Request, Result, Speculation, Timing
from tformer_runtime.decoding.scheduler import POSITIONS, Scheduler
from tformer_runtime.decoding.sequence import Hypothesis, Task, Token
from tformer_runtime.decoding.speculation import Speculator, speculates
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import Budget
from tformer_runtime.engine.step_outputs import cut_to
from tformer_runtime.format.manifest import ALIGNMENTS, HIDDEN, Extra
from tformer_runtime.format.sizes import every_size
from tformer_runtime.preprocess.tokenizer import Codec, Detokenizer, cut


class Generator:
    """Makes tasks of requests, and results of tasks."""

    def __init__(self, engine: Engine, codec: Codec | None, tokenizer: str | None, budget: Budget) -> None:
        """codec, tokenizer: of what is generated, and its definition."""
        self.engine, self.codec, self._tokenizer, self.budget = engine, codec, tokenizer, budget
        self._extras = {extra.name: extra for extra in engine.manifest.extras}

    def scheduler(self, settings: Settings | None, rows: int, joins: bool = True, waits: bool = True) -> Scheduler:
        """A batch of at most `rows` rows. settings: of what the file gives besides, what is wanted. waits: a step may
        wait for memory that other requests hold."""
        asked = {ALIGNMENTS: settings.alignments, HIDDEN: settings.hidden} if settings else {}
        wanted = tuple(name for name, extra in self._extras.items() if asked.get(extra.kind))
        share = self.budget.share(waits=waits)
        if settings is not None and speculates(settings, rows):
            starter: Speculator | Starter = Speculator(self.engine, wanted, share)
        else:
            starter = Starter(self.engine, wanted, share, joins)
        return Scheduler(starter, rows, POSITIONS[self.engine.session.device], share)

    def task(self, request: Request, settings: Settings, listen: Callable[[Token], None] | None = None) -> Task:
        """OptionError if the settings do not fit the model."""
        manifest = self.engine.manifest
        vocabulary = int(self.engine.decode.logits.shape[-1])
        prefix = request.prefix
        guide = self.guide(settings)
        if guide is not None:
            self._begin(guide, prefix)
        codec, stop = self.codec, settings.stop_strings
        task = Task(
            index=request.index,
            prompt=request.prompt,
            most=request.most,
            settings=settings,
            ends=manifest.special.end,
            rules=rules_of(settings, manifest.special, vocabulary),
            guide=guide,
            listen=listen,
            sources=request.sources,
            given=request.given,
            base=request.base.state if request.base else None,
        )
        if codec is not None and stop:

            def stopped() -> Callable[[int], bool]:
                text = Detokenizer(codec, stop)
                for token in prefix:
                    text.push(token)

                def pushed(token: int) -> bool:
                    text.push(token)
                    return text.stopped

                return pushed

            task.stopped = stopped
            task.cuts = lambda ids: cut(codec.decode([*prefix, *ids]), stop) is not None
        return task

    def result(self, task: Task) -> Result:
        """The result of a task that is over. Raises what ended it instead, if anything did."""
        if task.error is not None:
            raise task.error
        assert task.found is not None
        first, *others = [self._result(task, hypothesis) for hypothesis in task.found]
        return replace(first, alternatives=tuple(others))

    def _result(self, task: Task, found: Hypothesis) -> Result:
        ids, finish = (*task.prefix.tolist(), *found.ids), found.finish
        text = self.codec.decode(ids[:-1] if finish == "end" else ids) if self.codec else ""
        before = cut(text, task.settings.stop_strings)
        if before is not None:
            text, finish = before, "stop"
        count = len(task.found[0].ids) if task.found else 1
        timing = Timing(task.first - task.began, (task.ended - task.first) / max(1, count - 1))
        return Result(
            text,
            ids,
            float(np.float64(found.score)),
            finish,
            (*task.given_logprobs, *found.logprobs),
            top_logprobs=(*task.given_alternatives, *found.alternatives),
            timing=timing,
            speculation=None if task.settings.draft is None else Speculation(task.guessed, task.accepted),
            **self._besides(task, found),
        )

    def _besides(self, task: Task, found: Hypothesis) -> dict[str, Any]:
        """What was asked for beside the tokens."""
        if found.trail is None and not task.encoded:
            return {}
        encode = self.engine.manifest.encode
        sizes = every_size(encode, task.sources) if encode is not None else {}
        extras: Mapping[str, Extra] = self._extras
        given: dict[str, Array] = {}
        if found.trail is not None:
            shapes = {name: extras[name].shape[2:] for name in found.trail.values}
            given = found.trail.stacked(task.given + len(found.ids), sizes, shapes)
        for name, value in task.encoded.items():
            given[name] = cut_to(sizes, extras[name].shape[1:], value)
        hidden = {extras[name].module: value for name, value in given.items() if extras[name].kind == HIDDEN}
        return {"alignments": given.get(ALIGNMENTS), "hidden": hidden}

    def guide(self, settings: Settings) -> Guide | None:
        """What a constraint allows, from its beginning. Its grammar is compiled once, which may take a while."""
        if settings.constraint is None:
            return None
        kind, definition = settings.constraint
        if self._tokenizer is None:
            raise OptionError(f"{kind} needs text and the file has no tokenizer")
        vocabulary, ends = int(self.engine.decode.logits.shape[-1]), self.engine.manifest.special.end
        first = settings.forced_bos_token_id if not settings.forced_prefix else None
        before = first if first is not None and self._silent(first) else None
        return Grammar.compile(kind, definition, self._tokenizer, vocabulary, ends).start(before)

    def _begin(self, guide: Guide, prefix: Sequence[int]) -> None:
        """Have a guide follow a prefix. OptionError if no text that is allowed begins so."""
        for token in prefix:
            if not self._silent(token):
                guide.accept(token)
        if guide.lost:
            assert self.codec is not None
            raise OptionError(
                f"no text that the constraint allows begins with the prefix {self.codec.decode(prefix)!r}"
            )

    def _silent(self, token: int) -> bool:
        """Whether an id adds nothing to any text, as the code of a language does."""
        return self.codec is not None and self.codec.piece(token) is None


def generate_all(generator: Generator, requests: Sequence[Request], settings: Settings) -> list[Result]:
    """Results of a few requests, in their order, all at once."""
    tasks = [generator.task(request, settings) for request in requests]
    rows = sum(task.width for task in tasks)
    scheduler = generator.scheduler(settings, rows, joins=len(tasks) > 1)
    try:
        for task in tasks:
            scheduler.submit(task)
        while not scheduler.idle:
            scheduler.step()
    finally:
        scheduler.release()
    return [generator.result(task) for task in tasks]


class Told:
    """The text of a request, told in pieces as they become certain. Beams are known at their end only.

    The task refers to this, and this not to the task, so that what the task holds is freed with it.
    """

    def __init__(self, generator: Generator, request: Request, settings: Settings, tell: Callable[[str], None]) -> None:
        """tell: is given pieces that are not empty, by the thread that decodes; the prefix at once."""
        assert generator.codec is not None
        self._generator, self._tell = generator, tell
        self._text = None if settings.beams else Detokenizer(generator.codec, settings.stop_strings)
        self._request, self._settings = request, settings
        if self._text is not None:
            self._give("".join(map(self._text.push, request.prefix)))

    def task(self) -> Task:
        return self._generator.task(self._request, self._settings, self._heard if self._text else None)

    def finish(self, task: Task) -> None:
        """Tell the rest, once the task is over; raises what ended it instead."""
        if self._text is None or task.error is not None:
            self._give(self._generator.result(task).text)
        else:
            self._give(self._text.finish())

    def _heard(self, token: Token) -> None:
        assert self._text is not None
        if token.finish != "end":
            self._give(self._text.push(token.id))

    def _give(self, piece: str) -> None:
        if piece:
            self._tell(piece)


def generate_stream(
    generator: Generator, request: Request, settings: Settings
) -> collections.abc.Generator[str, None, Result]:
    """Pieces of one request's text as they become certain; what is returned is the whole result."""
    pieces: list[str] = []
    told = Told(generator, request, settings, pieces.append)
    task = told.task()
    scheduler = generator.scheduler(settings, task.width, joins=False)
    try:
        scheduler.submit(task)
        while not task.over:
            scheduler.step()
            if task.over:
                told.finish(task)
            if piece := "".join(pieces):
                yield piece
            pieces.clear()
        return generator.result(task)
    finally:
        scheduler.release()
