"""A shortcut that all drawn data take, random numbers of the module's own seed, and sizes that an example meets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
from tiny import WIDTH, Attention

from tformer_export import export
from tformer_runtime import UnsupportedModelError
from tformer_runtime.engine.engine import Engine

COLUMNS, ROWS = 3, 6
TOLERANCE = 5e-5  # the sums of test_single_pass_styles.py


class Table(nn.Module):
    """Numbers (rows, tables, columns), as a model that learns in its context takes them, → scores (tables, columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.attention, self.leave = nn.Linear(COLUMNS, WIDTH), Attention(), nn.Linear(WIDTH, COLUMNS)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        states = self.enter(x.transpose(0, 1))
        return self.leave(states + self.attention(states, None)).mean(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


class HidesConstantColumns(Table):
    """No column that is drawn is constant, so that all draws take the first path."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        varies = (x != x[:1]).any(0, keepdim=True)
        if torch.all(varies):
            return self.encode(x)
        return self.encode(torch.where(varies, x, torch.full_like(x, 2.0)))


class OtherScaleForConstantColumns(HidesConstantColumns):
    """The general path gives other results for the data of the shortcut: no path is right for both."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x) * 2 if torch.all((x != x[:1]).any(0)) else super().encode(x)


class OwnSeed(Table):
    """Names of columns are random vectors of a fixed seed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(5))
        return self.encode(x + drawn)


class SharedRandom(Table):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x + torch.randn(COLUMNS))


class LayoutByTheLargerSize(Table):
    """A layout in memory that two comparisons choose. Three tables of three columns would fix the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < COLUMNS or x.shape[1] > COLUMNS:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return self.encode(x)


class WritesItsResults(nn.Module):
    """Returns nothing: its results are in the dict that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, data: dict[str, torch.Tensor]) -> None:
        data["columns"] = data["x"].mean(0)
        data["scores"] = self.table(data["x"])


def draw(tables: int, seed: int) -> torch.Tensor:
    return torch.randn(ROWS, tables, COLUMNS, generator=torch.Generator().manual_seed(seed))


def results(path: Path, x: torch.Tensor) -> np.ndarray:
    """Return the results of the file. Its batch is the first axis."""
    (result,) = Engine(path, "cpu", threads=1).encode({"x": [*x.transpose(0, 1).numpy()]}, x.shape[1]).values()
    return result.numpy()


@torch.no_grad()
def assert_equals(path: Path, model: nn.Module, x: torch.Tensor) -> None:
    expected = torch.cat([model(x[:, [table]]) for table in range(x.shape[1])]).numpy()
    np.testing.assert_allclose(results(path, x), expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


@pytest.mark.parametrize("build", [Table, HidesConstantColumns, OwnSeed, LayoutByTheLargerSize])
def test_batch_on_the_second_axis_is_the_batch_of_the_file(build: type[Table], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = build().eval(), tmp_path / "model.onnx"
    export(model, path, {"x": draw(2, 0)}, axes={"x": (1,)})
    for tables in (1, 3, 5):
        assert_equals(path, model, draw(tables, tables))


def test_general_path_is_taken_for_the_data_of_the_shortcut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = HidesConstantColumns().eval(), tmp_path / "model.onnx"
    export(model, path, {"x": draw(2, 0)}, axes={"x": (1,)})
    x = draw(4, 7)
    x[:, 0, 1] = 5.0
    x[:, 2] = -1.0
    assert_equals(path, model, x)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(OtherScaleForConstantColumns, "values of its data"), (SharedRandom, "each time it runs")],
)
def test_what_no_file_can_hold_is_refused(build: type[Table], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        export(build().eval(), tmp_path / "model.onnx", {"x": draw(2, 0)}, axes={"x": (1,)})
    assert not list(tmp_path.iterdir())


def test_results_that_forward_writes_into_its_dict_are_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path, x = WritesItsResults().eval(), tmp_path / "model.onnx", draw(3, 1)
    export(model, path, {"data": {"x": draw(2, 0)}}, axes={"x": (1,)}, output="scores")
    with torch.no_grad():
        model(data := {"x": x})
    expected = data["scores"].numpy()
    np.testing.assert_allclose(results(path, x), expected, rtol=0, atol=TOLERANCE * np.ptp(expected))
