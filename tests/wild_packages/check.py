"""The check of an exported file against its original module. It shares nothing with the gate of the export.

A model that is stepped over decodes four rows of different lengths in one batch. The original module is called again on
each growing row, alone. A single-pass model runs batches of three sizes and three lengths, and the original module each
of their rows alone. The data are not those of the example.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from tformer_runtime import Model
from wild_packages.entry import END, PAD, START, Entry

EQUAL, DIFFERS = "equal", "differs"
PROMPTS, SOURCES, NEW_TOKENS = (5, 17, 1, 10), (7, 2, 19, 12), 12
BATCHES, LENGTHS = (1, 2, 5), (3, 9, 20)
MIN_DISTINCT = 4  # tokens that always repeat would prove nothing
# A value goes through some 100 sums of some 100 products, each rounded by 2⁻²⁴: 6e-4 at the worst, 6e-6 on average.
# A wrong position or mask changes a value by at least 1e-2 of the range.
TOLERANCE = 1e-4


class DullError(Exception):
    """The original module repeats itself, so equal results would prove nothing."""


@dataclass(frozen=True)
class Verdict:
    outcome: str
    figures: str


def check(entry: Entry, module: nn.Module, path: Path) -> Verdict:
    """Compare the file at `path` with the original module."""
    model = Model.load(path, "cpu", threads=1)
    return _check_tokens(entry, module, model) if entry.step else _check_values(entry, module, model)


def _check_tokens(entry: Entry, module: nn.Module, model: Model) -> Verdict:
    random = np.random.default_rng(7)
    others = {name: spec for name, spec in entry.inputs.items() if name != entry.step}
    requests = [{n: spec.draw(random, length) for n, spec in others.items()} for length in SOURCES]
    starts = [[START]] * len(PROMPTS)
    if not others:
        starts = [entry.inputs[str(entry.step)].draw(random, length).tolist() for length in PROMPTS]
    expected = [greedy(entry, module, request, start) for request, start in zip(requests, starts, strict=True)]
    if len({token for row in expected for token in row}) < MIN_DISTINCT:
        raise DullError(f"the tokens do not vary, choose another seed or gain: {expected}")
    if PAD in {token for row in expected for token in row}:
        raise DullError("the original generates the pad id, which nothing says how to read: choose another seed")
    given = [{n: others[n].time_first(row) for n, row in request.items()} for request in requests] if others else starts
    results = model.generate_batch(given, max_new_tokens=NEW_TOKENS)
    actual = [list(result.token_ids) for result in results]
    pairs = [(a, b) for one, other in zip(actual, expected, strict=True) for a, b in zip(one, other, strict=False)]
    equal, total = sum(a == b for a, b in pairs), sum(map(len, expected))
    return Verdict(EQUAL if actual == expected else DIFFERS, f"{equal} of {total} tokens")


def greedy(entry: Entry, module: nn.Module, request: dict[str, np.ndarray], start: list[int]) -> list[int]:
    """Return the greedy tokens after `start`, by the original module on the whole row at every step."""
    tokens: list[int] = []
    while len(tokens) < NEW_TOKENS and END not in tokens:
        logits = entry.original(module, {**request, str(entry.step): np.array([*start, *tokens])})
        tokens.append(int(logits.reshape(-1, logits.shape[-1])[-1].argmax()))
    return tokens


def _check_values(entry: Entry, module: nn.Module, model: Model) -> Verdict:
    random = np.random.default_rng(7)
    worst = 0.0
    for length in LENGTHS:
        difference, all_expected = 0.0, []
        for rows in BATCHES:
            batch = [{n: i.draw(random, length * entry.unit) for n, i in entry.inputs.items()} for _ in range(rows)]
            expected = np.stack([entry.original(module, row) for row in batch])
            given = [{n: entry.inputs[n].time_first(row) for n, row in one.items()} for one in batch]
            actual = np.stack([np.asarray(result) for result in model.predict(given, batch_size=rows)])
            if actual.shape != expected.shape:
                return Verdict(DIFFERS, f"shape {actual.shape}, not {expected.shape}")
            if not np.isfinite(actual).all():
                return Verdict(DIFFERS, "not finite")
            difference = max(difference, float(np.abs(actual - expected).max()))
            all_expected.append(expected)
        # A bias that no input changes proves nothing.
        spread = float(np.ptp(np.concatenate(all_expected), axis=0).max())
        if not spread > 0:
            raise DullError("the output does not depend on the input")
        worst = max(worst, difference / spread)
    return Verdict(EQUAL if worst <= TOLERANCE else DIFFERS, f"{worst:.0e} of the range")
