"""Feed several rows to a file: prompts of any lengths together, then a token at a time."""

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
    """Feed rows teacher-forced: their prompts together, then a token at a time.

    prompts: the length of each row's prompt.
    candidates: of each row, as in `Engine.start`.

    Return each row's logits (time, vocabulary), the state, and each row's extra outputs.
    """
    extra_names = [extra.name for extra in engine.manifest.extras]
    state = engine.start(by_name(requests), len(sequences), extras=extra_names, candidates=candidates)
    counts = np.array(prompts)
    tokens = padded([sequence[:count] for sequence, count in zip(sequences, prompts, strict=True)])
    logits = engine.step(state, tokens, counts, logit_positions="all")
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
    request_extras = [{name: values[row] for name, values in state.encoded.items()} for row in range(len(rows))]
    return [row.pop("") for row in rows], state, [row | more for row, more in zip(rows, request_extras, strict=True)]


def padded(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows of the step input with zeros at their ends, (rows, maximum length, …)."""
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
    """Return `steps` tokens for each row, without the ids in `hidden`. Decoding goes on after end tokens."""
    state = engine.start(by_name(requests), len(starts))
    tokens = np.stack(starts)
    decoded = []
    for _ in range(steps):
        logits = engine.step(state, tokens).copy()
        logits[:, list(hidden)] = -np.inf
        tokens = logits.argmax(-1)[:, None]
        decoded.append(tokens)
    return list(np.concatenate(decoded, 1))


def by_name(requests: list[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]] | None:
    names = list(requests[0]) if requests else []
    return {name: [request[name] for request in requests] for name in names} or None
