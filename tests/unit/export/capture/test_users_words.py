"""Operations, sizes and errors of a trace are named in the words of the user's code."""

from __future__ import annotations

import operator

import pytest
import sympy
import torch
import torch.nn.functional as F
from support.small_models import WIDTH, captured_of
from torch import nn

from tformer_export.common.fx_nodes import operation_name, source_line
from tformer_export.common.source_lines import operation_words, size_words, torch_error_words


class Many(nn.Module):
    """Each line is one call, for which the trace has other names."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(23, WIDTH), nn.Linear(WIDTH, 23)
        self.batch_norm, self.encoder = nn.BatchNorm1d(WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True)

    def forward(self, tgt):
        x = self.embed(tgt)
        a = x.prod(1, keepdim=True)
        b = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        c = self.encoder(x)
        d = a - b
        e = c[:, :1] * d
        f = F.layer_norm(e, (WIDTH,))
        g = f.sub(x)
        h = torch.special.bessel_j0(g)
        return self.out(h.roll(1, 1))


def test_an_operation_has_the_name_of_the_call():
    names = {}
    for node in captured_of(Many()).nodes:
        line = source_line(node)
        if node.op == "call_function" and "test_users_words" in line:
            names.setdefault(line.split(": ", 1)[1].split(" (in its")[0], set()).add(operation_name(node))
    assert names["a = x.prod(1, keepdim=True)"] == {"`prod`"}
    assert names["b = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)"] >= {"`nn.BatchNorm`", "`transpose`"}
    assert names["c = self.encoder(x)"] == {"`nn.TransformerEncoderLayer`"}
    assert names["d = a - b"] == {"`-`"}
    assert names["e = c[:, :1] * d"] == {"`[…]`", "`*`"}
    assert names["f = F.layer_norm(e, (WIDTH,))"] == {"`layer_norm`"}
    assert names["g = f.sub(x)"] == {"`sub`"}
    assert names["h = torch.special.bessel_j0(g)"] == {"`special_bessel_j0`"}
    assert names["return self.out(h.roll(1, 1))"] == {"`roll`", "`nn.Linear`"}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.ops.aten.native_dropout.default, "`dropout`"),
        (torch.ops.prims.prod.default, "`prod`"),
        (torch.ops.aten._to_copy.default, "`to`"),
        (torch.ops.aten.add_.Tensor, "`+`"),
        (operator.getitem, "`[…]`"),
    ],
)
def test_an_operation_without_a_stack_has_no_namespace(target, words):
    assert operation_words(target, []) == words


def test_sizes_are_named_by_their_inputs():
    time, source, unknown = sympy.symbols("s22 s7 u0", integer=True, positive=True)
    size = sympy.Min(4, time) + source * unknown
    assert size_words(size, {time: "time", source: "len(src)"}) == "len(src)*n + min(4, time)"


def test_errors_of_torch_lose_its_symbols_and_namespaces():
    assert torch_error_words("The size s98 must match u0 in torch.ops.aten.add.Tensor, prims.prod.default") == (
        "The size n must match n in add, prod"
    )
