"""Models that run once per input, in the styles of published forecasters, export unchanged and equal PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from tiny import WIDTH, Attention

from tformer_export import export, lengths, padding
from tformer_runtime import InputError, Model, SourceError, UnsupportedModelError
from tformer_runtime.engine.engine import Engine

COLUMNS, HISTORY = 3, 12
# A result is a sum of at most 96 products after at most eight layers, each with as many, and float32 rounds each
# partial sum by 2⁻²⁴ of its value: 9 · 96 · 2⁻²⁴ of the range.
TOLERANCE = 5e-5


class Encoder(nn.Module):
    """Numbers (batch, time, columns) → numbers of the same shape, by one attention."""

    def __init__(self):
        super().__init__()
        self.enter, self.attention, self.leave = nn.Linear(COLUMNS, WIDTH), Attention(), nn.Linear(WIDTH, COLUMNS)

    def encode(self, x, mask=None):
        states = self.enter(x)
        return self.leave(states + self.attention(states, mask))

    def forward(self, x):
        return self.encode(self.change(x))

    def change(self, x):
        return x


class DistanceGrid(Encoder):
    """Distances by a grid of positions, without the argument `indexing`."""

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        rows, columns = torch.meshgrid(positions, positions)
        return self.encode(x, (rows - columns).abs() > 3)


class MaskOfNumpy(Encoder):
    """A mask that numpy makes, and a division by the root of the length."""

    def forward(self, x):
        far = np.empty((x.shape[1], x.shape[1]))
        i, j = np.indices(far.shape)
        far[i, j] = np.abs(i - j) > 3
        return self.encode(x, torch.BoolTensor(far)) / np.sqrt(x.shape[1])


class RootOfLength(Encoder):
    def change(self, x):
        return x / math.sqrt(x.shape[1]) + x * np.sqrt(x.shape[1]) + x / math.log(1 + x.shape[1], 2)


class Dates(Encoder):
    """Months and hours as numbers of floating point, which are the ids of two tables."""

    def __init__(self):
        super().__init__()
        self.months, self.hours = nn.Embedding(13, COLUMNS), nn.Embedding(24, COLUMNS)

    def forward(self, x, dates):
        dates = dates.long()
        return self.encode(x + self.months(dates[:, :, 0]) + self.hours(dates[:, :, 1]))


class ChosenFrequencies(Encoder):
    """Weights for two frequencies, which are written into a spectrum of zeros."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(COLUMNS, 2, 2))

    def change(self, x):
        spectrum = torch.fft.rfft(x, dim=1)
        chosen = torch.zeros(x.shape[0], x.shape[1] // 2 + 1, COLUMNS, dtype=torch.cfloat)
        for place, frequency in enumerate((0, 2)):
            chosen[:, place, :] = spectrum[:, frequency, :] * torch.view_as_complex(self.scale)[:, place]
        return x + torch.fft.irfft(chosen, n=x.shape[1], dim=1)


class StrongestFrequencies(Encoder):
    """The two strongest frequencies of each column, by an index tensor for each axis."""

    def change(self, x):
        spectrum = torch.fft.rfft(x, dim=1)[:, 1:]
        strongest = spectrum.abs().topk(2, dim=1).indices
        rows, columns = torch.meshgrid(torch.arange(x.shape[0]), torch.arange(COLUMNS))
        chosen = spectrum[rows.unsqueeze(1), strongest, columns.unsqueeze(1)]
        again = spectrum.gather(1, strongest).unsqueeze(-1).expand(-1, -1, -1, 2)[..., 1]
        return x + chosen.abs().mean(1, keepdim=True) * torch.cos(again.angle().sum(1, keepdim=True))


class HyperbolicTangent(Encoder):
    """Attention between spectra, whose scores are complex numbers."""

    def change(self, x):
        spectrum = torch.fft.rfft(x, dim=1)[:, :3]
        scores = torch.einsum("bfc,bgc->bfg", spectrum, spectrum).tanh()
        return x + torch.einsum("bfg,bgc->bfc", scores, spectrum).abs().sum(1, keepdim=True)


class Pooled(Encoder):
    def change(self, x):
        return F.max_pool1d(x.transpose(1, 2), 3, 2, 1).transpose(1, 2)


class UnnamedArguments(Encoder):
    def forward(self, *inputs):
        x, dates = inputs
        return self.encode(x + dates.mean(-1, keepdim=True))


class OneIdInAnAxis(Encoder):
    """ids (batch, time, 1)."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(24, COLUMNS)

    def forward(self, ids):
        return self.encode(self.tokens(ids).sum(2))


class RelativeTable(Encoder):
    """A window of a table of distances: cut for short inputs, padded with zeros for long ones."""

    def __init__(self):
        super().__init__()
        self.distances = nn.Parameter(torch.randn(9, COLUMNS))

    def change(self, x):
        time = x.shape[1]
        pad, start = max(time - 5, 0), max(5 - time, 0)
        table = F.pad(self.distances, (0, 0, pad, pad))[start : start + 2 * time - 1]
        return x + table.sum(0)


class WholeWindows(Encoder):
    """Windows of four positions, whose number is rounded up, less their mean."""

    def windows(self, time):
        return math.ceil(time / 4)

    def change(self, x):
        missing = self.windows(x.shape[1]) * 4 - x.shape[1]
        windows = F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, 4))
        return (windows - windows.mean(2, keepdim=True)).flatten(1, 2)[:, : x.shape[1]]


class WindowsByFloat(WholeWindows):
    def windows(self, time):
        return math.ceil(float(time) / 4.0)


class WindowsOfNumpy(WholeWindows):
    def windows(self, time):
        return int(np.ceil(time / 4))


class WindowsByNegative(WholeWindows):
    """-(-n // 4), which ONNX's division would round the other way."""

    def windows(self, time):
        return -(-time // 4)


class WindowsByRemainder(WholeWindows):
    def windows(self, time):
        return (time + (-time) % 4) // 4


class LargestOfAll(Encoder):
    def change(self, x):
        return x / x.abs().amax()


def draw(rows: int, time: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dates = [torch.randint(low, high, (rows, time), generator=generator) for low, high in ((1, 13), (0, 24))]
    numbers = torch.randn(rows, time, COLUMNS, generator=generator)
    ids = torch.randint(24, (rows, time, 1), generator=generator)
    return {"x": numbers, "dates": torch.stack(dates, -1).float(), "ids": ids}


MODELS: Mapping[type[Encoder], tuple[str, ...]] = {
    DistanceGrid: ("x",), MaskOfNumpy: ("x",), RootOfLength: ("x",), Dates: ("x", "dates"), ChosenFrequencies: ("x",),
    StrongestFrequencies: ("x",), HyperbolicTangent: ("x",), Pooled: ("x",), UnnamedArguments: ("x", "dates"),
    OneIdInAnAxis: ("ids",), RelativeTable: ("x",), WholeWindows: ("x",), WindowsByFloat: ("x",),
    WindowsOfNumpy: ("x",), WindowsByNegative: ("x",), WindowsByRemainder: ("x",),
}  # fmt: skip


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_file_matches_module(build: type[Encoder], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = build().eval(), tmp_path / "model.onnx"
    names = MODELS[build]
    export(model, path, {name: draw(2, HISTORY, 0)[name] for name in names})
    engine = Engine(path, "cpu", threads=1)
    for rows, time in ((1, 4), (1, 9), (3, 12), (5, 16)):
        inputs: dict[str, Any] = {name: draw(rows, time, rows)[name] for name in names}
        (actual,) = engine.encode({name: [*value.numpy()] for name, value in inputs.items()}, rows).values()
        with torch.no_grad():
            expected = model(*inputs.values()).numpy()
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


class OneLength(Encoder):
    """A class for a history of one length, whose padding is described: learned positions, and a layer over all rows."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(HISTORY, COLUMNS))
        self.classes = nn.Linear(HISTORY * COLUMNS, 4)

    def forward(self, x, valid):
        states = self.encode(x + self.positions, ~valid[:, None, None]) * valid.unsqueeze(-1)
        return self.classes(states.flatten(1))


def test_short_rows_of_an_input_of_one_length_are_padded_to_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = OneLength().eval(), tmp_path / "model.onnx"
    export(model, path, {"x": draw(2, HISTORY, 0)["x"]}, masks={"valid": padding("x")})
    rows = [draw(1, time, time)["x"][0] for time in (HISTORY, 5, 1)]
    engine = Engine(path, "cpu", threads=1)
    (actual,) = engine.encode({"x": [row.numpy() for row in rows]}, len(rows)).values()
    for row, result in zip(rows, actual.numpy(), strict=True):
        padded = F.pad(row, (0, 0, 0, HISTORY - len(row)), value=7.0)  # hidden, whatever it is
        with torch.no_grad():
            expected = model(padded[None], torch.arange(HISTORY)[None] < len(row))[0].numpy()
        np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))
    with pytest.raises(InputError, match=rf"has the shape \({HISTORY + 1}, 3\)"):
        engine.encode({"x": [draw(1, HISTORY + 1, 0)["x"][0].numpy()]}, 1)


class LoopOverRows(Encoder):
    """A mask that a loop over the rows of a batch makes from their lengths."""

    def forward(self, x, counts):
        valid = x.new_ones(x.shape[:2])
        for row in range(x.shape[0]):
            valid[row, counts[row] :] = 0
        return self.encode(x * valid.unsqueeze(-1), valid[:, None, None] == 0)


def test_loop_over_rows_exports(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = LoopOverRows().eval(), tmp_path / "model.onnx"
    export(model, path, {"x": draw(2, HISTORY, 0)["x"]}, masks={"counts": lengths("x")})
    batch, counts = draw(3, HISTORY, 1)["x"], torch.tensor([HISTORY, 5, 1])
    engine = Engine(path, "cpu", threads=1)
    rows = [row[:count].numpy() for row, count in zip(batch, counts, strict=True)]
    (actual,) = engine.encode({"x": rows}, len(rows)).values()
    with torch.no_grad():
        expected = model(batch, counts).numpy()
    for count, result, row in zip(counts, actual.numpy(), expected, strict=True):
        np.testing.assert_allclose(result[:count], row[:count], rtol=0, atol=TOLERANCE * np.ptp(expected))


class UnitVectors(Encoder):
    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def test_small_number_in_a_denominator_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export(UnitVectors().eval(), path, {"x": draw(2, HISTORY, 0)["x"]})
    rows = np.zeros((1, 2, COLUMNS), np.float32)
    rows[0, 1] = 1e-8
    (actual,) = Engine(path, "cpu", threads=1).encode({"x": [*rows]}, 1).values()
    expected = rows / (np.linalg.norm(rows, axis=-1, keepdims=True) + 1e-8)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-6)


class CountByLogarithm(Encoder):
    def change(self, x):
        return x.topk(int(2 * math.log(x.shape[1])), dim=1)[0].sum(1, keepdim=True) + x


def test_whole_number_of_a_logarithm_is_not_called_data(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"computes from sizes or weights .* at .*topk\(int"):
        export(CountByLogarithm().eval(), tmp_path / "model.onnx", {"x": draw(2, HISTORY, 0)["x"]})


class PackedRows(Encoder):
    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.GRU(COLUMNS, COLUMNS, batch_first=True)

    def forward(self, x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.recurrent(packed)[1][-1]


def test_packed_rows_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="packs rows of several lengths into one sequence"):
        export(
            PackedRows().eval(),
            tmp_path / "model.onnx",
            {"x": draw(2, HISTORY, 0)["x"]},
            masks={"lengths": lengths("x")},
        )


class RootInAnIndex(Encoder):
    def change(self, x):
        side = int(math.sqrt(x.shape[1]))
        return x + (torch.arange(x.shape[1]) // side)[:, None]


def test_whole_number_of_a_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"makes a whole number of a fraction of a size, at .*side = int"
    ) as e:
        export(RootInAnIndex().eval(), tmp_path / "model.onnx", {"x": draw(2, HISTORY, 0)["x"]})
    assert 'axes={"x": (0,)}' in str(e.value)
    export(RootInAnIndex().eval(), tmp_path / "fixed.onnx", {"x": draw(2, HISTORY, 0)["x"]}, axes={"x": (0,)})


class LoopThatEndsEarly(Encoder):
    """Steps that are fed back, until each row has had the class 0; of the export's random rows one never has."""

    def __init__(self):
        super().__init__()
        self.step, self.classes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 60)

    def forward(self, x):
        state, ended, results = self.enter(x).mean(1), torch.zeros(len(x), dtype=torch.bool), []
        for _ in range(8):
            state = torch.tanh(self.step(state))
            results.append(self.classes(state))
            ended = ended | (results[-1].argmax(-1) == 0)
            if ended.all():
                break
        return torch.stack(results, 1)


def test_loop_that_may_end_early_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match=r"decide which code runs, at .*if ended.all\(\)"):
        export(LoopThatEndsEarly().eval(), tmp_path / "model.onnx", {"x": draw(2, HISTORY, 0)["x"]})


class ComparedCondition(Encoder):
    def change(self, x):
        return x.cumsum(1) if (x.shape[1] < 2 * HISTORY) == self.training else x


def test_condition_that_is_compared_with_a_value_limits_the_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    export(ComparedCondition().eval(), path, {"x": draw(2, HISTORY, 0)["x"]})
    engine = Engine(path, "cpu", threads=1)
    engine.encode({"x": draw(1, 2 * HISTORY - 1, 0)["x"].numpy()}, 1)
    with pytest.raises(InputError, match=rf"at most {2 * HISTORY - 1}"):
        engine.encode({"x": draw(1, 2 * HISTORY, 0)["x"].numpy()}, 1)


class ShortPath(Encoder):
    def change(self, x):
        return x.cumsum(1) if x.shape[1] < 4 else x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ShortPath, r"another execution path if 'x' has fewer than 4 positions, by .*x.shape\[1\] < 4"),
        (LargestOfAll, r"amax.* lets the rows of a batch change each other"),
    ],
)
def test_model_that_differs_for_other_inputs_is_refused(model: type[Encoder], reason: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match=reason):
        export(model().eval(), tmp_path / "model.onnx", {"x": draw(2, HISTORY, 0)["x"]})


class Diffusion(Encoder):
    """Numbers with their time and their class, one of each for a row, and a map of kinds of places."""

    def __init__(self):
        super().__init__()
        self.classes, self.kinds = nn.Embedding(10, COLUMNS), nn.Embedding(7, COLUMNS)

    def forward(self, x, t, y, kinds):
        states = x + (self.classes(y) + t[:, None] / 100 + self.kinds(kinds).sum((1, 2)))[:, None]
        return {"noise": self.encode(states), "scale": states.mean(1)}


def test_numbers_and_maps_of_rows_are_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Diffusion().eval(), tmp_path / "model.onnx"
    example = {"x": draw(2, HISTORY, 0)["x"], "t": torch.tensor([3.0, 500.0]), "y": torch.tensor([1, 7])}
    example |= {"kinds": torch.randint(7, (2, 3, 5))}
    with pytest.raises(SourceError, match=r"number for each row, axes=\{'t': \(0,\)\}"):
        export(model, path, example)
    axes = {"t": (0,), "y": (0,), "kinds": (0,)}
    export(model, path, example, axes=axes, output=["noise", "scale"])
    file = Model.load(path)
    rows = [{**{name: value[i].numpy() for name, value in example.items()}, "t": float(10 * i), "y": i} for i in (0, 1)]
    for i, result in enumerate(file.predict(rows)):
        inputs = (example["x"][i], torch.tensor(10.0 * i), torch.tensor(i), example["kinds"][i])
        with torch.no_grad():
            expected = model(*(value[None] for value in inputs))
        assert list(result) == ["noise", "scale"]
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value[0], rtol=0, atol=TOLERANCE * np.ptp(value.numpy()))
    with pytest.raises(InputError, match=r"id 10 .* ends at 9"):
        list(file.predict([rows[0] | {"y": 10}]))
    with pytest.raises(InputError, match="kinds takes whole numbers"):
        list(file.predict([rows[0] | {"kinds": np.full((3, 5), 0.5)}]))


class Patches(nn.Module):
    """Images in patches of eight rows, of any height."""

    def __init__(self):
        super().__init__()
        self.cut, self.leave = nn.Conv2d(3, WIDTH, (8, 32), 8), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.leave(self.cut(x).flatten(2).mean(-1))


def test_named_axis_of_patches_is_tried_at_sizes_that_hold_patches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Patches().eval(), tmp_path / "model.onnx"
    export(model, path, {"x": torch.randn(2, 3, 32, 32)}, axes={"x": (0, 2)})
    for height in (8, 24, 40):
        x = torch.randn(3, height, 32)
        (actual,) = Engine(path, "cpu", threads=1).encode({"x": [x.movedim(1, 0).numpy()]}, 1).values()
        with torch.no_grad():
            expected = model(x[None]).numpy()
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=TOLERANCE * max(1, np.ptp(expected)))


class FirstStep(Encoder):
    """A row has the number of its first step, by which a vector is gathered from a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 20, COLUMNS))

    def forward(self, x, step):
        rows = self.table.repeat_interleave(len(x), 0)
        return self.encode(x + rows.gather(1, step.repeat_interleave(COLUMNS, -1)))


def test_example_may_have_one_id_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = FirstStep().eval(), tmp_path / "model.onnx"
    example = {"x": torch.randn(2, 6, COLUMNS), "step": torch.zeros(2, 1, 1, dtype=torch.int64)}
    export(model, path, example, axes={"step": (0,)})
    (actual,) = Model.load(path, "cpu").predict([{"x": example["x"][0].numpy(), "step": example["step"][0].numpy()}])
    with torch.no_grad():
        expected = model(**example)[0].numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))
