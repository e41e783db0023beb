"""Arguments of forward: masks, lengths and positions are described, and built from lengths alone.

A padded row with masks must equal the row alone in PyTorch."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from tformer_export import causal, export, lengths, padding, positions
from tformer_export.sources.torch_module import from_module
from tformer_runtime import OptionError, SourceError, TformerError
from tformer_runtime.engine.engine import Engine

VOCABULARY, WIDTH, MAX_LENGTH = 19, 16, 24
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
EXAMPLE = {"src": IDS, "tgt": IDS}


class Core(nn.Module):
    """An encoder-decoder of one layer each, which knows padding from its masks only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MAX_LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(3))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def attend(self, layer, x, memory, keep):
        """Return attention over the memory. keep: bool, or 0 and −inf, broadcast to (batch, heads, queries, keys)."""
        heads = [p(y).unflatten(2, (2, -1)).transpose(1, 2) for p, y in zip(layer, (x, memory, memory), strict=True)]
        q, k, v = heads
        scores = q @ k.transpose(2, 3) / math.sqrt(8)
        scores = scores.masked_fill(~keep, -math.inf) if keep.dtype == torch.bool else scores + keep
        return x + (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)

    def read(self, src, keep, places=None):
        x = self.embed(src) + self.place(torch.arange(src.shape[1]) if places is None else places)
        return self.attend(self.layers[0], x, x, keep)

    def write(self, tgt, memory, keep, past, places=None):
        y = self.embed(tgt) + self.place(torch.arange(tgt.shape[1]) if places is None else places)
        y = self.attend(self.layers[1], y, y, past)
        return self.out(self.attend(self.layers[2], y, memory, keep))

    def run(self, src, tgt, keep, past=None, places=(None, None)):
        past = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril() if past is None else past
        return self.write(tgt, self.read(src, keep, places[0]), keep, past, places[1])


class Booleans(Core):
    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.run(src, tgt, src_mask[:, None, None], tgt_mask)


class Ignored(Core):
    def forward(self, src, tgt, src_key_padding_mask, tgt_mask):
        return self.run(src, tgt, ~src_key_padding_mask[:, None, None], ~tgt_mask)


class Integers(Core):
    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.run(src, tgt, (src_mask == 1).unsqueeze(1), tgt_mask != 0)


class Floats(Core):
    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.run(src, tgt, (1 - src_mask) * -1e9, (1 - tgt_mask) * -1e9)


class Additive(Core):
    def forward(self, src, tgt, *, src_mask, tgt_mask):
        return self.run(src, tgt, src_mask, tgt_mask)


class Combined(Core):
    """One mask for padding and causality of the target, and a mask of the memory for each query."""

    def forward(self, src, tgt, src_mask, tgt_mask, memory_mask):
        memory = self.read(src, src_mask[:, None])
        return self.write(tgt, memory, memory_mask[:, None], tgt_mask)


class TargetPadding(Core):
    def forward(self, src, tgt, src_mask, tgt_mask, tgt_pad):
        return self.run(src, tgt, src_mask[:, None, None], tgt_mask & tgt_pad[:, None, None])


class Lengths(Core):
    def forward(self, src, src_lengths, tgt, tgt_lengths):
        keep = torch.arange(src.shape[1]) < src_lengths[:, None]
        past = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        valid = torch.arange(tgt.shape[1]) < tgt_lengths[:, None]
        return self.run(src, tgt, keep[:, None, None], past & valid[:, None, None])


class Positions(Core):
    def forward(self, src, tgt, src_mask, src_pos, tgt_pos, row_pos):
        return self.run(src, tgt, src_mask[:, None, None], places=(src_pos, (tgt_pos + row_pos) // 2))


class TimeFirst(Core):
    def forward(self, src, tgt, src_mask):
        return self.run(src.T, tgt.T, src_mask.T[:, None, None]).transpose(0, 1)


FORMS = {
    Booleans: {"src_mask": padding("src"), "tgt_mask": causal("tgt")},
    Ignored: {"src_key_padding_mask": padding("src", keep=False), "tgt_mask": causal("tgt", keep=False)},
    Integers: {
        "src_mask": padding("src", dtype=torch.int64, shape=("batch", 1, "time")),
        "tgt_mask": causal("tgt", dtype=torch.int32, shape=(1, 1, "time", "time")),
    },
    Floats: {
        "src_mask": padding("src", dtype=torch.float32, shape=("batch", 1, 1, "time")),
        "tgt_mask": causal("tgt", dtype=torch.float32),
    },
    Additive: {
        "src_mask": padding("src", keep="additive", shape=("batch", 1, 1, "time")),
        "tgt_mask": causal("tgt", keep="additive", shape=("batch", 1, "time", "time")),
    },
    Combined: {
        "src_mask": padding("src", shape=("batch", "time", "time")),
        "tgt_mask": causal("tgt", shape=("batch", 1, "time", "time")),
        "memory_mask": padding("src", shape=("batch", "tgt", "time")),
    },
    TargetPadding: {"src_mask": padding("src"), "tgt_mask": causal("tgt"), "tgt_pad": padding("tgt")},
    Lengths: {"src_lengths": lengths("src"), "tgt_lengths": lengths("tgt", dtype=torch.int32)},
    Positions: {
        "src_mask": padding("src"),
        "src_pos": positions("src", shape=(1, "time")),
        "tgt_pos": positions("tgt", shape=("time",)),
        "row_pos": positions("tgt"),
    },
    TimeFirst: {"src_mask": padding("src", shape=("time", "batch"))},
}
TIME_FIRST = {"src": (1, 0), "tgt": (1, 0)}


def make_example(form):
    return {n: v.T for n, v in EXAMPLE.items()} if form is TimeFirst else EXAMPLE


def make_options(form):
    return {"masks": FORMS[form], **({"axes": TIME_FIRST} if form is TimeFirst else {})}


@torch.no_grad()
def single_row_logits(module, source, target):
    """Return the logits (time, vocabulary) of the core for one row without padding."""
    return module.run(torch.tensor([source]), torch.tensor([target]), torch.ones(1, 1, 1, 1, dtype=torch.bool))[0]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_padded_row_matches_single_row(form):
    module = form().eval()
    source = from_module(module, make_example(form), "tgt", **make_options(form))
    assert {mask.of for mask in source.masks.values()} == {"src"}
    rows, targets = ([3, 4, 5, 6, 7], [8, 9]), ([1, 11, 12], [1, 13, 14])
    padded = torch.tensor(
        [rows[0], [*rows[1], 17, 18, 17]]
    )  # padding ids are also valid ids: only the mask separates them
    (keep,) = source.masks
    inputs = {"src": padded, "tgt": torch.tensor(targets), keep: torch.tensor([[True] * 5, [True] * 2 + [False] * 3])}
    with torch.no_grad():
        actual = source.module(*(inputs[name] for name in source.example))
    for row, target, logits in zip(rows, targets, actual, strict=True):
        torch.testing.assert_close(logits, single_row_logits(module, row, target), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        Ignored,
        Combined,
        Lengths,
        *(pytest.param(f, marks=pytest.mark.thorough) for f in (Additive, Positions, TimeFirst)),
    ],
    ids=lambda f: f.__name__,
)
def test_file_matches_single_rows(form, tmp_path):
    module, path = form().eval(), tmp_path / "model.onnx"
    export(module, path, make_example(form), "tgt", **make_options(form), max_length=MAX_LENGTH)
    engine = Engine(path, device="cpu", threads=1)
    rows, targets = ([3, 4, 5, 6, 7], [8, 9]), ([1, 11, 12], [1, 13, 14])
    state = engine.start({"src": [np.array(row) for row in rows]}, 2)
    tokens = np.array(targets)
    first = engine.step(state, tokens[:, :2], logit_positions="all").copy()
    actual = np.concatenate([first, engine.step(state, tokens[:, 2:], logit_positions="all")], 1)
    for row, target, logits in zip(rows, targets, actual, strict=True):
        np.testing.assert_allclose(logits, single_row_logits(module, row, target), rtol=0, atol=1e-4)


class Stages(Core):
    """A module without forward: a method for each stage, and a mask that both take."""

    forward = nn.Module.forward

    def encode(self, src, src_mask):
        return {"states": self.read(src, src_mask[:, None, None])}

    def decode(self, memory, tgt, src_mask, tgt_mask=None):
        past = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril() if tgt_mask is None else tgt_mask
        return self.write(tgt, memory["states"], src_mask[:, None, None], past)


def test_encode_and_decode_replace_forward(tmp_path):
    module, path = Stages().eval(), tmp_path / "model.onnx"
    masks = {"src_mask": padding("src"), "tgt_mask": causal("tgt")}
    export(
        module,
        path,
        EXAMPLE,
        "tgt",
        masks=masks,
        max_length=MAX_LENGTH,
        special_tokens={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    row, tokens = [3, 4, 5, 6, 7], [1]
    for _ in range(6):
        tokens.append(int(single_row_logits(module, row, tokens)[-1].argmax()))
    engine = Engine(path, device="cpu", threads=1)
    state = engine.start({"src": [np.array(row)]}, 1)
    actual = [int(engine.step(state, np.array([[token]]))[0].argmax()) for token in tokens[:-1]]
    assert actual == tokens[1:]


def test_ambiguous_memory_of_decode_is_refused():
    with pytest.raises(SourceError, match=r"decode\(memory, tgt, src_mask, tgt_mask\).* memory, src_mask: name all"):
        from_module(Stages(), EXAMPLE, "tgt")
    with pytest.raises(SourceError, match="has no forward, and no encode"):
        from_module(nn.ModuleList(), EXAMPLE, "tgt")


# -- outputs ---------------------------------------------------------------------------------------------------------

OutputTuple = collections.namedtuple("Named", ["attentions", "scores"])


@dataclasses.dataclass
class OutputDataclass:
    attentions: torch.Tensor
    logits: torch.Tensor


class Language(nn.Module):
    """A language model whose output `form` builds from another tensor and the logits."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.form = nn.Embedding(VOCABULARY, VOCABULARY), form

    def forward(self, ids, /, temperature=1.0, *, use_cache=True, extra=None):
        logits = self.embed(ids) / temperature
        return self.form(logits[..., :1], logits) if not use_cache else None


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (lambda other, logits: logits, None),
        (lambda other, logits: logits, 0),
        (lambda other, logits: (logits, other), None),
        (lambda other, logits: (None, [other], logits), None),
        (lambda other, logits: (other, logits), 1),
        (lambda other, logits: (other, logits), -1),
        (lambda other, logits: {"other": other, "logits": logits}, None),
        (lambda other, logits: {"loss": None, "predictions": logits}, None),
        (lambda other, logits: {"other": other, "scores": logits}, "scores"),
        (lambda other, logits: OutputDataclass(other, logits), None),
        (lambda other, logits: OutputDataclass(logits, other), "attentions"),
        (lambda other, logits: OutputTuple(other, logits), "scores"),
        (lambda other, logits: OutputTuple(other, logits), 1),
    ],
)
def test_logits_are_found_among_outputs(form, output):
    module = Language(form).eval()
    source = from_module(
        module, {"ids": IDS}, "ids", fixed_arguments={"use_cache": False, "temperature": 2.0}, output=output
    )
    torch.testing.assert_close(source.module(IDS), module.embed(IDS) / 2)


@pytest.mark.parametrize(
    ("form", "output", "message"),
    [
        (lambda other, logits: "text", None, "returned str, which holds no tensor"),
        (lambda other, logits: {"other": other}, "scores", "no tensor 'scores' among its outputs, which are 'other'$"),
        (lambda other, logits: (other, logits), 2, "no tensor 2 among its outputs, which are '0', '1'$"),
    ],
)
def test_outputs_without_logits_are_refused(form, output, message):
    source = from_module(Language(form), {"ids": IDS}, "ids", fixed_arguments={"use_cache": False}, output=output)
    with pytest.raises(SourceError, match=message):
        source.module(IDS)


# -- refusals --------------------------------------------------------------------------------------------------------

TRIANGLE = torch.ones(3, 3).tril()


@pytest.mark.parametrize(
    ("name", "value", "description"),
    [
        ("src_mask", torch.ones(2, 3, dtype=torch.bool), "padding"),
        ("src_mask", torch.ones(2, 1, 3), "padding"),
        ("src_mask", torch.zeros(2, 3), "padding"),
        ("tgt_mask", TRIANGLE.bool(), "causal"),
        ("tgt_mask", TRIANGLE.log(), "causal"),
        ("tgt_mask", TRIANGLE.expand(2, 1, 3, 3), "causal"),
        ("hidden", ~TRIANGLE.bool(), "causal"),
        ("src_lengths", torch.tensor([3, 2]), "lengths"),
        ("positions", torch.arange(3), "positions"),
    ],
)
def test_undescribed_mask_in_example_is_refused(name, value, description):
    class WithMasks(Core):
        def forward(self, src, tgt, src_mask=None, tgt_mask=None, hidden=None, src_lengths=None, positions=None):
            raise AssertionError("not called")

    with pytest.raises(SourceError, match=rf"'{name}' looks like .*masks={{'{name}': {description}\(…\)}}"):
        from_module(WithMasks(), {**EXAMPLE, name: value}, "tgt")


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        (EXAMPLE, {"masks": {"src_mask": padding("src")}}, "forward needs tgt_mask too"),
        (EXAMPLE, {"masks": {"mask": padding("src")}}, "no parameter 'mask': it takes src, tgt, src_mask, tgt_mask"),
        (
            EXAMPLE,
            {"masks": {"src_mask": padding("source"), "tgt_mask": causal("tgt")}},
            "describes the input 'source'",
        ),
        (EXAMPLE, {"fixed_arguments": {"src": 1}}, "'src' is in the example and in fixed_arguments"),
        ({**EXAMPLE, "src_mask": None}, {}, "must be a tensor, .* fixed_arguments={'src_mask': …}"),
        ({**EXAMPLE, "src_mask": torch.tensor(1.0)}, {"masks": {"tgt_mask": causal("tgt")}}, "is a single number"),
    ],
)
def test_invalid_arguments_are_refused(example, options, message):
    with pytest.raises(SourceError, match=message):
        from_module(Booleans(), example, "tgt", **options)


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (lambda: padding("src", keep="yes"), "keep is True, False or 'additive'"),
        (lambda: padding("src", keep="additive", dtype=torch.int64), "floating point dtype"),
        (lambda: padding("src", shape=("time",)), "has 'batch' and 'time'"),
        (lambda: padding("src", shape=("batch", 8, "time")), "no size but 1"),
        (lambda: causal("tgt", shape=("batch", "time")), "has 'time' twice"),
        (lambda: positions("tgt", shape=("batch", 1)), "has 'time' once"),
    ],
)
def test_invalid_descriptions_raise_option_error(describe, message):
    with pytest.raises(OptionError, match=message):
        describe()


def test_options_that_need_an_example_are_refused_without_one(tmp_path):
    source = from_module(Language(lambda other, logits: logits), {"ids": IDS}, "ids")
    with pytest.raises(OptionError, match="fixed_arguments, step_input is read together with an example"):
        export(source, tmp_path / "model.onnx", step_input="ids", fixed_arguments={"use_cache": False})


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def forward(self, ids):
        return self.table(ids).sigmoid()


@pytest.mark.parametrize(
    ("model", "example", "options", "message"),
    [
        (Logits(), {"ids": IDS}, {"step_input": "idx"}, "step_input='idx' is not in the example, which has ids"),
        (Logits(), IDS, {}, "example must name the parameters of forward, {name: tensor}, and is a Tensor"),
        (Logits, {"ids": IDS}, {}, "the model is the class Logits: give an instance with its weights"),
        (Logits().state_dict(), {"ids": IDS}, {}, "the model is a state dict, which holds no code: load it into"),
        (Logits(), {"ids": IDS}, {"axes": {"tgt": (1, 0)}}, "axes names the input 'tgt', which is not in the example"),
        (Logits(), {"ids": IDS.tolist()}, {}, "must be a tensor, (batch, time, …), not list: make it one with"),
        (Logits(), {"ids": IDS.float()}, {}, "ids are whole numbers, torch.int64"),
        (Logits(), {"ids": IDS}, {"step_input": "ids"}, "returns numbers from 0 to 1 alone"),
    ],
)
def test_mistake_in_the_call_is_named(model, example, options, message, tmp_path):
    with pytest.raises(TformerError, match=re.escape(message)):
        export(model, tmp_path / "model.onnx", example, **options)
    assert not list(tmp_path.iterdir())
