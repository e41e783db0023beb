"""The parity gate accepts a correct file, refuses a damaged one and names the first difference."""

from __future__ import annotations

import math
import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from tformer_export.compile import analyse
from tformer_export.sources.torch_module import from_module
from tformer_export.verify.parity import ParityGate
from tformer_export.verify.report import TOLERANCE
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import MANIFEST_KEY, SpecialTokens

MAX_LENGTH = 24


class Compiled:
    """A source model, its gate and its correct file."""

    def __init__(self, path):
        torch.manual_seed(0)
        self.module = Seq2SeqTransformer(
            19, 23, width=16, heads=2, encoder_layers=1, decoder_layers=1, feedforward=24, max_length=MAX_LENGTH,
            positions="learned", tie_output=False,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
        special = SpecialTokens((1,), (2,), 0)
        self.source = from_module(self.module, {"src": ids, "tgt": ids}, "tgt", special_tokens=special)
        self.source.module.eval()
        compiled = analyse(self.source, "cpu").compile()
        self.inputs, self.path = compiled.inputs, path
        compiled.model.metadata_props[MANIFEST_KEY] = compiled.manifest.to_json()
        ir.save(compiled.model, path)

    def check(self, engine):
        return ParityGate(self.source, self.inputs).check(engine)

    def damaged_engine(self, weight, change, path):
        """Return an engine of a copy of the file in which `change` has modified one weight of the module."""
        model = onnx.load(self.path)
        expected = weight.detach().numpy()
        num_matches = 0
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor).copy()
            for layout in (expected, expected.T):
                if array.shape == layout.shape and np.array_equal(array, layout):
                    change(array if layout is expected else array.T)
                    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
                    num_matches += 1
                    break
        assert num_matches == 1
        onnx.save(model, path)
        return Engine(path, device="cpu", threads=1)

    def refusal(self, engine):
        """Return the case, row, position and stage of the first difference, and the whole message."""
        with pytest.raises(ParityError) as caught:
            self.check(engine)
        text = str(caught.value)
        match = re.search(r"in the case '([\w ]+)': row (\d+), position (\d+) (of the prompt|\(step \d+)", text)
        assert match, text
        assert text.endswith("no file was written")
        return match[1], int(match[2]), int(match[3]), match[4], text


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("gate") / "model.onnx")


def test_correct_file_passes(compiled):
    report = compiled.check(Engine(compiled.path, device="cpu", threads=1))
    assert set(report.errors) == {"one row", "ragged rows", "long prompt"}
    assert report.relative_error < TOLERANCE / 10
    assert report.tokens_equal == report.tokens > 0
    assert report.max_abs_error == max(report.errors.values())


@pytest.mark.parametrize(
    ("position", "case", "row", "stage"),
    [
        (0, "one row", 0, "of the prompt"),
        (5, "one row", 0, "(step 5"),
        (6, "ragged rows", 0, "(step 5"),
        (9, "ragged rows", 1, "(step 3"),
        (13, "long prompt", 0, "of the prompt"),
        (MAX_LENGTH - 1, "long prompt", 0, "(step 5"),
    ],
)
def test_wrong_row_of_position_table_is_located(compiled, position, case, row, stage, tmp_path):
    def change(table):
        table[position] += 1

    engine = compiled.damaged_engine(compiled.module.target.positions, change, tmp_path / "model.onnx")
    assert compiled.refusal(engine)[:4] == (case, row, position, stage)


def test_position_table_off_by_one_is_refused(compiled, tmp_path):
    def change(table):
        table[:] = np.roll(table, 1, 0)

    engine = compiled.damaged_engine(compiled.module.target.positions, change, tmp_path / "model.onnx")
    assert compiled.refusal(engine)[:3] == ("one row", 0, 0)


def test_one_wrong_matrix_entry_is_refused(compiled, tmp_path):
    def change(matrix):
        matrix[3, 5] += 0.5

    engine = compiled.damaged_engine(
        compiled.module.decoder[0].feedforward.contract.weight, change, tmp_path / "model.onnx"
    )
    case, row, _, _, text = compiled.refusal(engine)
    assert (case, row) == ("one row", 0)
    difference, share = (float(x) for x in re.search(r"by ([\d.e+-]+), ([\d.e+-]+) of what", text).groups())
    assert difference > 0
    assert TOLERANCE < share < 1


def test_nan_is_refused(compiled, tmp_path):
    def change(bias):
        bias[4] = math.nan

    engine = compiled.damaged_engine(compiled.module.output.bias, change, tmp_path / "model.onnx")
    assert compiled.refusal(engine)[:3] == ("one row", 0, 0)


def test_wrong_encoder_is_refused(compiled, tmp_path):
    def change(table):
        table[:] = table[::-1].copy()

    engine = compiled.damaged_engine(compiled.module.source.positions, change, tmp_path / "model.onnx")
    assert compiled.refusal(engine)[:3] == ("one row", 0, 0)


class PaddingBlindEngine(Engine):
    """An engine that takes the padding of a ragged prompt for tokens."""

    def step(self, state, tokens, counts=None, logit_positions="last"):
        return super().step(state, tokens, None, logit_positions)


def test_runtime_that_reads_padding_is_refused(compiled):
    case, row, position, _, _ = compiled.refusal(PaddingBlindEngine(compiled.path, device="cpu", threads=1))
    assert (case, row) == ("ragged rows", 0)
    assert position == 2  # the two tokens of its prompt are correct


class SwappingEngine(Engine):
    """An engine that swaps the contexts of the rows of a batch."""

    def start(self, requests, rows, *rest, **options):
        return super().start({name: values[::-1] for name, values in requests.items()}, rows, *rest, **options)


def test_swapped_rows_are_refused(compiled):
    assert compiled.refusal(SwappingEngine(compiled.path, device="cpu", threads=1))[:3] == ("ragged rows", 0, 0)
