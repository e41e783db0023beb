"""A file's rows side by side: prompts of any lengths at once, then a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.state import State


def run_case(
    engine: Engine,
    requests: list[dict[str, np.ndarray]],
    sequences: list[np.ndarray],
    prompts: tuple[int, ...],
    candidates: Sequence[np.ndarray] | None = None,
) -> tuple[list[np.ndarray], State, list[dict[str, np.ndarray]]]:
    """Each row's logits (time, vocabulary): its prompt at once, beside the other rows', then a token at a time; and
    what the file gives besides, in the same way. candidates: of each row, as `Engine.start` takes them."""
    extra_names = [extra.name for extra in engine.manifest.extras]
    state = engine.start(by_name(requests), len(sequences), extras=extra_names, candidates=candidates)
    counts = np.array(prompts)
    tokens = padded([sequence[:count] for sequence, count in zip(sequences, prompts, strict=True)])
    logits = engine.step(state, tokens, counts, want="all")
    steps = len(sequences[0]) - prompts[0]
    rows: list[dict[str, np.ndarray]] = [{} for _ in sequences]
    for name, values in {"": logits, **state.extras}.items():
        for row, count in enumerate(counts):
            rows[row][name] = np.empty((count + steps, *values.shape[2:]), values.dtype)
            rows[row][name][:count] = values[row, :count]
    for i in range(steps):
        new = np.array([[sequence[count + i]] for sequence, count in zip(sequences, counts, strict=True)])
        for name, values in {"": engine.step(state, new), **state.extras}.items():
            for row, count in enumerate(counts):
                rows[row][name][count + i] = values[row]
    once = [{name: values[row] for name, values in state.encoded.items()} for row in range(len(rows))]
    return [row.pop("") for row in rows], state, [row | more for row, more in zip(rows, once, strict=True)]


def padded(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of the step input, (rows, longest, …), with zeros at their ends."""
    first = sequences[0]
    kind = first.dtype if first.dtype.kind == "f" else np.dtype(np.int64)
    rows = np.zeros((len(sequences), max(map(len, sequences)), *first.shape[1:]), kind)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


def decode_greedily(
    engine: Engine,
    requests: list[dict[str, np.ndarray]],
    starts: list[np.ndarray],
    steps: int,
    hidden: Sequence[int] = (),
) -> list[np.ndarray]:
    """`steps` tokens for each row, none of them `hidden`; an end token does not end."""
    state = engine.start(by_name(requests), len(starts))
    tokens = np.stack(starts)
    chosen = []
    for _ in range(steps):
        logits = engine.step(state, tokens).copy()
        logits[:, list(hidden)] = -np.inf
        tokens = logits.argmax(-1)[:, None]
        chosen.append(tokens)
    return list(np.concatenate(chosen, 1))


def by_name(requests: list[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]] | None:
    names = list(requests[0]) if requests else []
    return {name: [request[name] for request in requests] for name in names} or None
