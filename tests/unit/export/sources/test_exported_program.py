"""A program of torch.export as the source of an export, without its Python class, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tformer_export import causal, export, padding
from tformer_export.sources import load_source
from tformer_export.sources.exported_program import from_program
from tformer_runtime import SourceError
from tformer_runtime.engine.engine import Engine

VOCABULARY, WIDTH = 19, 16
DYNAMIC_AXES = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


class Translator(nn.Module):
    """An encoder-decoder. `wide` is a plain value of the call, which a program fixes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 24, dropout=0.1, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, src, tgt, *, wide=False):
        padding, past = src == 0, nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        x = self.transformer(
            self.embed(src), self.embed(tgt) * (2 if wide else 1), tgt_mask=past, tgt_is_causal=True,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        return {"states": x, "logits": self.out(x)}


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, mask):
        x = self.embed(ids)
        return self.out(torch.softmax((x @ x.mT).masked_fill(~mask, -1e9), -1) @ x)


def make_ids(length):
    return torch.arange(2 * length).reshape(2, length) % (VOCABULARY - 1) + 1


def program(src=DYNAMIC_AXES, tgt=DYNAMIC_AXES, lengths=(5, 7), train=False, **options):
    module = Translator().train(train)
    keyword_inputs = {"tgt": make_ids(lengths[1]), **options}
    shapes = {"src": src, "tgt": tgt, **dict.fromkeys(options)}
    return torch.export.export(module, (make_ids(lengths[0]),), keyword_inputs, dynamic_shapes=shapes)


def test_file_of_a_program_matches_its_module(tmp_path):
    batch = Dim("batch")
    exported_program = program({0: batch, 1: Dim("source", max=24)}, {0: batch, 1: Dim("target", max=16)}, wide=True)
    torch.export.save(exported_program, tmp_path / "model.pt2")
    source = load_source(tmp_path / "model.pt2", step_input="tgt")
    assert source.name == "model.pt2"
    export(source, tmp_path / "model.onnx")
    engine = Engine(tmp_path / "model.onnx", device="cpu", threads=1)
    assert engine.manifest.max_length == 16
    assert [i.max_length for i in engine.manifest.encode.inputs] == [24]
    module, rows, tokens = Translator().eval(), [[3, 4, 5, 6, 7], [8, 9]], [1, 11, 12]
    state = engine.start({"src": [np.array(row) for row in rows]}, 2)
    actual = np.stack([engine.step(state, np.array([[t], [t]])).copy() for t in tokens], 1)
    for row, logits in zip(rows, actual, strict=True):
        with torch.no_grad():
            expected = module(torch.tensor([row]), torch.tensor([tokens]), wide=True)["logits"][0]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_masks_of_a_program_need_descriptions():
    free = {"ids": DYNAMIC_AXES, "mask": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    example = (make_ids(6), torch.ones(6, 6, dtype=torch.bool).tril())
    masked_program = torch.export.export(Masked(), example, dynamic_shapes=free)
    with pytest.raises(SourceError, match=r"'mask' looks like a mask.* masks={'mask': "):
        from_program(masked_program, "ids")
    source = from_program(masked_program, "ids", masks={"mask": causal("ids")})
    torch.testing.assert_close(
        source.module(make_ids(9)), Masked()(make_ids(9), torch.ones(9, 9, dtype=torch.bool).tril())
    )
    with pytest.raises(SourceError, match="describes the input 'src'"):
        from_program(masked_program, "ids", masks={"mask": padding("src")})


@pytest.mark.parametrize(
    ("make_program", "message"),
    [
        (
            lambda: program(None, None),
            r"fixed batch of src, 2, .* export it again with torch.export.export\(model, …, dy",
        ),
        (lambda: program({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}), "fixed length of src, 5, and runs at no other"),
        (lambda: program(tgt={0: Dim.DYNAMIC}), "fixed length of tgt, 7"),
        (
            lambda: program({0: Dim.DYNAMIC, 1: Dim("n")}, {0: Dim.DYNAMIC, 1: Dim("n")}, (6, 6)),
            "one length for src an",
        ),
        (lambda: program(tgt={0: Dim.DYNAMIC, 1: 4 * Dim("n")}, lengths=(5, 8)), r"axis 1 of tgt that are 4\*n"),
        (lambda: program(tgt={0: Dim.DYNAMIC, 1: Dim("n", min=4)}), "axis 1 of tgt of at least 4, and decoding begins"),
        (lambda: program(train=True), r"exported in training mode, with dropout: call model.eval\(\)"),
    ],
)
def test_programs_with_fixed_sizes_are_refused(make_program, message):
    with pytest.raises(SourceError, match=message):
        from_program(make_program(), "tgt")


def test_missing_step_input_is_refused():
    with pytest.raises(SourceError, match="no input 'target' to step over: it has src, tgt"):
        from_program(program(), "target")


class Trap:
    """An object that must not be unpickled."""

    def __reduce__(self):
        return print, ("this ran",)


def test_pickled_objects_are_not_loaded(tmp_path, capfd):
    path = tmp_path / "model.pt2"
    pickling_program = program()
    pickling_program.example_inputs = ((make_ids(5),), {"tgt": Trap()})
    torch.export.save(pickling_program, path)
    with pytest.raises(SourceError, match="is not a whole program"):
        load_source(path, step_input="tgt")
    assert "this ran" not in capfd.readouterr().out


@pytest.mark.parametrize("share_of_bytes", [0, 0.5, 0.99])
def test_truncated_program_is_refused(share_of_bytes, tmp_path):
    torch.export.save(program(), tmp_path / "whole.pt2")
    content = (tmp_path / "whole.pt2").read_bytes()
    (tmp_path / "cut.pt2").write_bytes(content[: int(len(content) * share_of_bytes)])
    with pytest.raises(SourceError, match=r"cut.pt2 is not a whole program of torch.export.save: "):
        load_source(tmp_path / "cut.pt2", step_input="tgt")
