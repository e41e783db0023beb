"""Make tasks of the search from options and requests, and results from finished tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.batch_rows import EngineStarter
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.request import Request, Result, Speculation, Timing
from tformer_runtime.decoding.rules.constraints import Grammar, Guide
from tformer_runtime.decoding.rules.logit_rules import make_rules
from tformer_runtime.decoding.scheduler import MAX_PREFILL_POSITIONS, Scheduler
from tformer_runtime.decoding.sequence import Hypothesis, SequenceTask, Token
from tformer_runtime.decoding.speculation import SpeculativeStarter, speculates
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import MemoryBudget
from tformer_runtime.engine.step_outputs import crop
from tformer_runtime.format.manifest import CROSS_ATTENTIONS, HIDDEN_STATES, ExtraOutput
from tformer_runtime.format.sizes import input_and_output_sizes
from tformer_runtime.preprocess.tokenizer import Codec, Detokenizer, text_before_stop


class Generator:
    """Makes tasks from requests, and results from tasks."""

    def __init__(self, engine: Engine, codec: Codec | None, tokenizer: str | None, budget: MemoryBudget) -> None:
        """codec, tokenizer: of the generated text, and the JSON definition of its tokenizer."""
        self.engine, self.codec, self._tokenizer, self.budget = engine, codec, tokenizer, budget
        self._extras = {extra.name: extra for extra in engine.manifest.extras}

    def new_scheduler(self, settings: Settings | None, rows: int, joins: bool = True, waits: bool = True) -> Scheduler:
        """Return a scheduler for at most `rows` rows.

        settings: which extra outputs are needed; None for none.
        waits: whether a step may wait for memory that other requests hold.
        """
        needed = (
            {CROSS_ATTENTIONS: settings.cross_attentions, HIDDEN_STATES: settings.hidden_states} if settings else {}
        )
        extra_names = tuple(name for name, extra in self._extras.items() if needed.get(extra.kind))
        share = self.budget.new_share(blocking=waits)
        if settings is not None and speculates(settings, rows):
            starter: SpeculativeStarter | EngineStarter = SpeculativeStarter(self.engine, extra_names, share)
        else:
            starter = EngineStarter(self.engine, extra_names, share, joins)
        return Scheduler(starter, rows, MAX_PREFILL_POSITIONS[self.engine.session.device], share)

    def make_task(
        self, request: Request, settings: Settings, listen: Callable[[Token], None] | None = None
    ) -> SequenceTask:
        """Return the task of a request. Raise OptionError if the settings do not fit the model.

        listen: called with each token of greedy decoding and sampling.
        """
        manifest = self.engine.manifest
        vocabulary = int(self.engine.decode.logits.shape[-1])
        prefix = request.prefix
        guide = self.guide(settings)
        if guide is not None:
            self._accept_prefix(guide, prefix)
        codec, stop = self.codec, settings.stop_strings
        task = SequenceTask(
            index=request.index,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            settings=settings,
            end_ids=manifest.special_tokens.eos_token_ids,
            rules=make_rules(settings, manifest.special_tokens, vocabulary),
            guide=guide,
            on_token=listen,
            sources=request.sources,
            prefix_tokens=request.prefix_tokens,
            prefix_state=request.cached_prefix.state if request.cached_prefix else None,
        )
        if codec is not None and stop:

            def new_stop_checker() -> Callable[[int], bool]:
                text = Detokenizer(codec, stop)
                for token in prefix:
                    text.push(token)

                def has_stop_string(token: int) -> bool:
                    text.push(token)
                    return text.stopped

                return has_stop_string

            task.stop_checker = new_stop_checker
            task.truncates_text = lambda ids: text_before_stop(codec.decode([*prefix, *ids]), stop) is not None
        return task

    def make_result(self, task: SequenceTask) -> Result:
        """Return the result of a finished task. Raise the error of the task."""
        if task.error is not None:
            raise task.error
        assert task.hypotheses is not None
        first, *others = [self._make_one_result(task, hypothesis) for hypothesis in task.hypotheses]
        return replace(first, alternatives=tuple(others))

    def _make_one_result(self, task: SequenceTask, hypothesis: Hypothesis) -> Result:
        ids, finish = (*task.prefix.tolist(), *hypothesis.ids), hypothesis.finish
        text = self.codec.decode(ids[:-1] if finish == "end" else ids) if self.codec else ""
        truncated = text_before_stop(text, task.settings.stop_strings)
        if truncated is not None:
            text, finish = truncated, "stop"
        count = len(task.hypotheses[0].ids) if task.hypotheses else 1
        timing = Timing(
            task.first_token_at - task.started_at, (task.ended_at - task.first_token_at) / max(1, count - 1)
        )
        return Result(
            text,
            ids,
            float(np.float64(hypothesis.score)),
            finish,
            (*task.prefix_logprobs, *hypothesis.logprobs),
            top_logprobs=(*task.prefix_alternatives, *hypothesis.alternatives),
            timing=timing,
            speculation=Speculation(task.guessed, task.accepted) if task.settings.speculates else None,
            **self._extra_outputs(task, hypothesis),
        )

    def _extra_outputs(self, task: SequenceTask, hypothesis: Hypothesis) -> dict[str, Any]:
        """Return the extra outputs of a hypothesis, as arguments of `Result`."""
        if hypothesis.history is None and not task.encoder_outputs:
            return {}
        encode = self.engine.manifest.encode
        sizes = input_and_output_sizes(encode, task.sources) if encode is not None else {}
        extras: Mapping[str, ExtraOutput] = self._extras
        values: dict[str, Array] = {}
        if hypothesis.history is not None:
            shapes = {name: extras[name].shape[2:] for name in hypothesis.history.values}
            values = hypothesis.history.stack_steps(task.prefix_tokens + len(hypothesis.ids), sizes, shapes)
        for name, value in task.encoder_outputs.items():
            values[name] = crop(sizes, extras[name].shape[1:], value)
        hidden_states = {
            extras[name].module: value for name, value in values.items() if extras[name].kind == HIDDEN_STATES
        }
        return {"cross_attentions": values.get(CROSS_ATTENTIONS), "hidden_states": hidden_states}

    def guide(self, settings: Settings) -> Guide | None:
        """Return the state of the constraint at the beginning of a text; None without a constraint.

        The grammar of a constraint is compiled once, which may take a while.
        """
        if settings.constraint is None:
            return None
        kind, definition = settings.constraint
        if self._tokenizer is None:
            raise OptionError(f"{kind} needs text and the file has no tokenizer")
        vocabulary, ends = int(self.engine.decode.logits.shape[-1]), self.engine.manifest.special_tokens.eos_token_ids
        bos = settings.forced_bos_token_id if not settings.forced_prefix else None
        first_id = bos if bos is not None and self._has_no_text(bos) else None
        return Grammar.compile(kind, definition, self._tokenizer, vocabulary, ends).start(first_id)

    def _accept_prefix(self, guide: Guide, prefix: Sequence[int]) -> None:
        """Advance a guide over the forced prefix. Raise OptionError if the constraint allows no text with the
        prefix.
        """
        for token in prefix:
            if not self._has_no_text(token):
                guide.accept(token)
        if guide.lost:
            assert self.codec is not None
            raise OptionError(
                f"no text that the constraint allows begins with the prefix {self.codec.decode(prefix)!r}"
            )

    def _has_no_text(self, token: int) -> bool:
        """Return whether an id adds nothing to any text, such as the code of a language."""
        return self.codec is not None and self.codec.piece(token) is None


def generate_all(generator: Generator, requests: Sequence[Request], settings: Settings) -> list[Result]:
    """Return the results of a few requests, in their order. All requests run in one batch."""
    tasks = [generator.make_task(request, settings) for request in requests]
    rows = sum(task.width for task in tasks)
    scheduler = generator.new_scheduler(settings, rows, joins=len(tasks) > 1)
    try:
        for task in tasks:
            scheduler.submit(task)
        while not scheduler.idle:
            scheduler.step()
    finally:
        scheduler.release()
    return [generator.make_result(task) for task in tasks]
