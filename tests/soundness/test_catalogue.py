"""Every model of the catalogue is refused, or its file gives its results, on inputs that the gate has not drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from soundness import (  # noqa: F401, each adds its models to the catalogue
    data_in_python,
    lengths,
    looks_ahead,
    numbers_of_no_value,
    rows_that_meet,
    rows_without_keys,
    traced_behaviour,
)
from soundness.models import CATALOGUE, RARE, ROW, WIDTH, Decoder, Suspect
from tformer_export import export
from tformer_runtime import Model, TformerError
from tformer_runtime.engine.engine import Engine

TOLERANCE = 1e-3  # of the spread of a row; float32 sums in another order differ by some 1e-6
STEPS = 2  # single tokens at the end of each row


def made(case: Suspect) -> torch.nn.Module:
    torch.manual_seed(0)
    return case.build().eval()


CASES = [pytest.param(case, id=name, marks=[pytest.mark.thorough] * case.thorough) for name, case in CATALOGUE.items()]


@pytest.mark.parametrize("case", CASES)
def test_refused_or_exact(case: Suspect, tmp_path: Path) -> None:
    path, generator = tmp_path / "model.onnx", torch.Generator().manual_seed(1)
    example = torch.randint(3, RARE, (2, ROW), generator=generator) if case.step else torch.randn(2, ROW, WIDTH)
    told = {"step_input": "ids", **case.told} if case.step else dict(case.told)
    try:
        export(made(case), path, {"ids" if case.step else "x": example}, **told)
    except TformerError as error:
        print("refused", type(error).__name__, error)
        assert not list(tmp_path.iterdir())
        return
    engine = Engine(path, "cpu", threads=1)
    for rows in case.batches:
        try:
            results = decoded(engine, rows) if case.step else encoded(engine, rows)
        except TformerError as error:
            print("refused at run time", error)
            continue
        for row, result in zip(rows, results, strict=True):
            with torch.no_grad():
                expected = made(case)(row[None])[0].numpy()
            assert_equal(result, expected)
    print("exact")


def decoded(engine: Engine, rows: list[torch.Tensor]) -> list[np.ndarray]:
    """Return the logits of each row: of its prompt, then of its last tokens one by one."""
    for row in rows:  # an id that no row may hold is refused before the engine runs
        Model(engine).score(row[:-1].numpy(), row[-1:].numpy())
    longest = max(map(len, rows)) - STEPS
    counts = np.array([len(row) - STEPS for row in rows])
    prompts = np.zeros((len(rows), longest), np.int64)
    for prompt, row, count in zip(prompts, rows, counts, strict=True):
        prompt[:count] = row[:count].numpy()
    state = engine.start(None, len(rows))
    logits = engine.step(state, prompts, counts, logit_positions="all")
    results = [[*logits[row, :count].copy()] for row, count in enumerate(counts)]
    for step in range(STEPS):
        tokens = np.array([[int(row[count + step])] for row, count in zip(rows, counts, strict=True)])
        for result, logits in zip(results, engine.step(state, tokens), strict=True):
            result.append(logits.copy())
    return [np.stack(result) for result in results]


def encoded(engine: Engine, rows: list[torch.Tensor]) -> list[np.ndarray]:
    (values,) = engine.encode({"x": [row.numpy() for row in rows]}, len(rows)).values()
    return [value[: len(row)] for value, row in zip(values.numpy(), rows, strict=True)]


def assert_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        finite = np.isfinite(e)
        np.testing.assert_array_equal(np.isfinite(a), finite, err_msg=f"position {position}")
        if finite.any():
            np.testing.assert_array_equal(np.isnan(a), np.isnan(e))
            visible = finite & (e > e.max(where=finite, initial=-np.inf) - 100)
            spread = np.ptp(e[visible]) or 1.0
            np.testing.assert_allclose(a[visible], e[visible], rtol=0, atol=TOLERANCE * spread)


def test_decoder_and_encoder_of_the_catalogue_export(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert export(Decoder().eval(), tmp_path / "model.onnx", {"ids": torch.tensor([[3, 4]])}, "ids").parity.tokens
