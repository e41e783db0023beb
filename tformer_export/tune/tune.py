"""The forms of a file that are fastest on this machine, found by running it (`--tune`).

One choice after the other, its forms are built as whole files and race: each decodes the same short requests, in turns,
so that whatever else the machine does meets all of them alike. Of a round only the ratio to the form held so far
counts, so a slow minute counts for nothing. A form takes the place of the default if it is faster by more than 3 %
beyond the spread of its ratios. At the end, what was kept races once against the defaults, and they stay if it does not
win as a whole.

What races is not quite the file that will be written: its caches are in float, its logits are of all ids, and its
weights are rounded to nearest, in 8 bits where they are to be mixed.

Cost: some ten files are built, each as large as the result, on disk one at a time and up to five at a time in memory;
and for each, at most seven rounds, and one that does not count, of a request of 32 tokens and eight steps at one batch
size, or at three or four. It grows with the weights; a model with rotary positions is translated once more (seconds).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tformer_export.common.kernel_choices import CHOICES, DEFAULTS, ROTARY, Choice, Forms, few_rows
from tformer_export.common.onnx_writer import removed, save
from tformer_export.common.paired_timing import Request, Trial, race
from tformer_export.common.quantization import BALANCED, FIXED, LATENCY, THROUGHPUT
from tformer_export.compile import Compiled, Understood
from tformer_export.options import Asked
from tformer_export.quantize import Fixed, quantize
from tformer_export.quantize.matrices import find_matrices
from tformer_export.verify.parity import Gate
from tformer_runtime.engine.engine import Engine

ROWS = {LATENCY: (1,), BALANCED: (1, 8, 32), THROUGHPUT: (32,)}
READ = 32  # tokens of a request
STEPS, STANDS_FOR = 8, 32  # that are run, and that a request is taken to have
QUIET = 0.2  # seconds before each turn, in which the last one's threads stop spinning


@dataclass(frozen=True)
class Decision:
    """choice: its name. kept: the form. trials: of all its forms, the default first."""

    choice: str
    kept: str
    trials: tuple[Trial, ...]


@dataclass
class Tuning:
    """rows: the batch sizes that were measured. decisions: about all choices that the model has. ratio: of the time of
    a request to that in the default forms, 1 if these were kept. forms: what was kept, by choice."""

    rows: tuple[int, ...]
    decisions: list[Decision] = field(default_factory=list)
    ratio: float = 1.0
    spread: float = 0.0

    @property
    def forms(self) -> dict[str, str]:
        return {decision.choice: decision.kept for decision in self.decisions}

    def table(self) -> list[tuple[str, str]]:
        batches = ", ".join(map(str, self.rows))
        changed = f"a request takes {self.ratio:.2f} ± {self.spread:.2f} × the time in the default forms"
        defaults = all(decision.kept == decision.trials[0].form for decision in self.decisions)
        table = [("tuned", f"for batches of {batches}: {'the default forms stay' if defaults else changed}")]
        for decision in self.decisions:
            told = [f"{'*' * (t.form == decision.kept)}{t.form} {_told(t)}" for t in decision.trials]
            table.append((f"  {decision.choice}", "; ".join(told)))
        return table


def _told(trial: Trial) -> str:
    times = ", ".join(f"{s * 1e3:.0f}" if s > 0.1 else f"{s * 1e3:.2g}" for s in trial.seconds.values())
    return f"{times} ms" if trial.ratio == 1 else f"{times} ms ({trial.ratio:.2f} ± {trial.spread:.2f} ×)"


def tune_model(understood: Understood, compiled: Compiled, asked: Asked, folder: Path) -> Tuning:
    """What is the fastest here, of what the model has: with weights rounded to nearest if quantised, and always with
    caches in float and logits of all ids.

    compiled: in the default forms. folder: where candidates are written.
    """
    source, gate = understood.source, Gate(understood.source, compiled.inputs, series=understood.series)

    def build(forms: Forms) -> Request:
        made = understood.compile(forms)
        manifest = replace(asked.in_forms(made.manifest, forms), quantization=asked.quantize)
        if asked.quantize != "none":
            bits = 4 if asked.quantize == "int4" else 8
            bits_of = {name: m.at_least(bits) for m in find_matrices(made.model) for name in m.products}
            any_scale = Fixed.between(-1, 1)  # as fast as any other
            scales = dict.fromkeys(bits_of, any_scale) if asked.activations == FIXED else {}
            quantize(
                made.model,
                bits_of,
                asked.optimize_for,
                source.step,
                few_rows=few_rows(forms),
                on_cpu=True,
                fixed=scales,
            )
        with removed(folder / "candidate.onnx") as path:  # a session has it mapped
            return requests(gate, Engine(save(made.model, manifest, path), device="cpu"))

    manifest = replace(asked.in_forms(compiled.manifest, DEFAULTS), quantization=asked.quantize)
    compiled = replace(compiled, manifest=manifest)
    # A cache in int8 has scales that hold at all positions where the attention operator itself turns the keys.
    fixed = {ROTARY} if asked.cache != "float" else set()
    choices = [choice for choice in CHOICES if choice not in fixed and choice.applies(compiled)]
    return tune(build, choices, ROWS[asked.optimize_for])


def tune(
    build: Callable[[Forms], Request],
    choices: Iterable[Choice] = CHOICES,
    rows: Sequence[int] = ROWS[THROUGHPUT],
    pause: Callable[[], None] = lambda: time.sleep(QUIET),
) -> Tuning:
    """Measure the choices, one after the other, each with what was kept of those before.

    build: forms → how long requests take in a file that has them. choices: those that the file has.
    """
    tuning = Tuning(tuple(rows))
    default = held = build({})
    for choice in choices:
        others = [build({**tuning.forms, choice.name: form}) for form in choice.forms[1:]]
        trials = race(dict(zip(choice.forms, [held, *others], strict=True)), choice.rows or rows, pause)
        best = min((t for t in trials if t.wins), key=lambda t: t.ratio, default=trials[0])
        held = [held, *others][choice.forms.index(best.form)]
        tuning.decisions.append(Decision(choice.name, best.form, tuple(trials)))
    if held is not default:
        _, whole = race({"defaults": default, "kept": held}, rows, pause)
        tuning.ratio, tuning.spread = whole.ratio, whole.spread
        if not whole.wins:
            tuning.ratio, tuning.spread = 1.0, 0.0
            tuning.decisions = [replace(d, kept=d.trials[0].form) for d in tuning.decisions]
    return tuning


def requests(gate: Gate, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> Request:
    """Short requests of random ids, the same for every engine of one source.

    What is read counts once, and the steps as if there were more of them: a request of READ tokens that decodes
    STANDS_FOR. A model that is run once is run.
    """
    drawing = Gate(gate.source, gate.inputs, seed=1, series=gate.series)
    longest = engine.manifest.max_length
    given = drawing.draw_request(READ)
    if engine.manifest.decode is None:
        return lambda rows: _seconds(clock, lambda: engine.encode({n: [v] * rows for n, v in given.items()}, rows))
    start = drawing.start(longest)
    if not given:
        start = drawing.draw_sequence(max(1, min(READ, longest - STEPS)))
    steps = min(STEPS, longest - len(start))

    def request(rows: int) -> float:
        tokens = np.repeat(start[None], rows, axis=0)
        begun = clock()
        state = engine.start({n: [v] * rows for n, v in given.items()} or None, rows)
        engine.step(state, tokens)
        read = clock()
        for _ in range(steps):
            engine.step(state, tokens[:, -1:])
        return read - begun + (clock() - read) / max(1, steps) * STANDS_FOR

    return request


def _seconds(clock: Callable[[], float], run: Callable[[], object]) -> float:
    begun = clock()
    run()
    return clock() - begun
