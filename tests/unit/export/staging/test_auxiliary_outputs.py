"""What can be asked of a model beside logits, in which layout it is given, and what is refused in one sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.small_models import VOCABULARY, Mixer, Small, captured_of, causal, joined
from torch import nn

from tformer_export.analysis.attention import recognise
from tformer_export.analysis.attention_weights import _select_heads, add_cross_attentions
from tformer_export.analysis.binding_time import binding_times
from tformer_export.analysis.interpreter import run
from tformer_export.common.onnx_writer import save
from tformer_export.compile import _trace, analyse
from tformer_export.sources.torch_module import from_module
from tformer_export.staging.auxiliary_outputs import find_auxiliary_outputs
from tformer_export.verify.parity import ParityGate
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import OptionError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import SpecialTokens

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
BOTH = {"src": IDS, "tgt": IDS}


def seq2seq(decoder_layers=3):
    torch.manual_seed(0)
    return Seq2SeqTransformer(
        19, 23, width=16, heads=4, encoder_layers=1, decoder_layers=decoder_layers, feedforward=24, max_length=24
    )


@pytest.fixture(scope="module")
def aligned():
    """A graph to which alignments of layer 0 and of one head of layer 2 are added."""
    captured = captured_of(seq2seq(), example=BOTH)
    recognise(captured)
    add_cross_attentions(captured, [0, (2, 1)])
    return captured


def refusal(call, *arguments):
    with pytest.raises(OptionError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (True, {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}),
        ("last", {2: [0, 1, 2, 3]}),
        (0, {0: [0, 1, 2, 3]}),
        ([(2, 3), (0, 1), (2, 0)], {0: [1], 2: [0, 3]}),
        ([1, (1, 2)], {1: [0, 1, 2, 3]}),
    ],
)
def test_which_heads_are_averaged(wanted, expected):
    assert _select_heads(wanted, [4, 4, 4]) == expected


def test_the_mean_of_the_heads_is_a_distribution_over_the_source(aligned):
    values = run(aligned, {"src": torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]]), "tgt": IDS})
    added = [n for n in aligned.nodes if n.target is torch.ops.tformer.attention_weights.default]
    assert [node.args[4] for node in added] == [[0, 1, 2, 3], [1]]
    weights = values[aligned.extras["cross_attentions"]]
    assert weights.shape == (2, 3, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(weights * 5, sum(values[node][:, 0] for node in added))
    assert not weights[1, :, 2:].any()  # padding


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (3, "alignments: there is no layer 3, the cross-attentions are 0 to 2"),
        ([(1, 4)], "alignments: layer 1 has no head 4, its heads are 0 to 3"),
        ("first", "alignments are True, \"last\", layers, or pairs of layer and head, not 'first'"),
        ([], 'alignments are True, "last", layers, or pairs of layer and head, not []'),
    ],
)
def test_heads_that_there_are_not(wanted, message):
    assert refusal(_select_heads, wanted, [4, 4, 4]) == message


class SelfAttention(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal(x)))


def test_a_model_that_reads_nothing_beside_its_own_tokens():
    assert refusal(add_cross_attentions, captured_of(Small(SelfAttention)), True) == (
        "the model reads nothing beside tgt: it has no cross-attention, so there are no alignments to give"
    )


class OneHeadByHand(nn.Module):
    """Cross-attention without an axis of heads, which is staged operation by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        x, y = self.embed(tgt), self.embed(src)
        return self.out(x + torch.softmax(x @ y.transpose(1, 2), -1) @ y)


def test_cross_attention_that_is_not_recognised():
    captured = captured_of(OneHeadByHand(), example=BOTH)
    assert recognise(captured) == 0
    text = refusal(add_cross_attentions, captured, True)
    assert text.startswith("alignments are the weights of cross-attention, and of the 0 attentions recognised")


class Modules(nn.Module):
    """One submodule for each thing that an output may be."""

    class Of(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.change = change

        def forward(self, *x):
            return self.change(*x)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(19, 8), nn.Embedding(23, 8)
        self.turned, self.merged = self.Of(lambda x: x.transpose(0, 1)), self.Of(lambda x: x.flatten(0, 1))
        self.pooled, self.positions = self.Of(lambda x: x.mean(1)), self.Of(lambda x: torch.arange(x.shape[1]))
        self.several = self.Of(lambda x: {"none": None, "first": x * 2, "second": x})
        self.nothing, self.unused = self.Of(lambda x: None), nn.Linear(8, 8)
        self.out = nn.Linear(8, 23)

    def forward(self, src, tgt):
        x, y = self.source(src), self.target(tgt)
        self.nothing(y)
        x = x + self.positions(x)[:, None]
        y = self.turned(self.merged(y).reshape(y.shape)).transpose(0, 1)
        return self.out(y + self.pooled(x)[:, None] + self.several(y)["first"])


def layouts(*names):
    source = from_module(Modules().eval(), BOTH, "tgt")
    captured = _trace(source, names)
    encode, decode = find_auxiliary_outputs(captured, binding_times(captured))
    return [[(extra.name, extra.axes, extra.shape) for extra in stage] for stage in (encode, decode)]


def test_layouts():
    encode, decode = layouts("turned", "source", "several", "pooled")
    assert encode == [
        ("hidden_states.source", (0,), ("batch", "src_length", 8)),
        ("hidden_states.pooled", (0,), ("batch", 8)),
    ]
    assert decode == [
        ("hidden_states.turned", (1, 0), ("batch", "wanted", 8)),
        ("hidden_states.several", (0, 1), ("batch", "wanted", 8)),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("positions", "hidden_states.positions is the same for every input"),
        ("merged", "needs one axis for the batch, its positions"),
        ("nothing", "forward gets no tensor from the submodule 'nothing', so it cannot be given"),
        ("unused", "forward gets no tensor from the submodule 'unused', so it cannot be given"),
        ("sauce", "the model has no submodule 'sauce': there are source, and others"),
        ("decoder.layers.1", "the model has no submodule 'decoder.layers.1': there are source, target, turned"),
    ],
)
def test_submodules_that_cannot_be_given(name, message):
    assert message in refusal(layouts, name)


class WithoutForward(Modules):
    """Its stages are called one by one, so what is traced is a module around it."""

    forward = nn.Module.forward

    def encode(self, src):
        return self.source(src)

    def decode(self, tgt, memory):
        return self.out(self.several(self.target(tgt))["first"] + memory.mean(1, keepdim=True))


def test_names_are_those_of_the_users_own_module():
    source = from_module(WithoutForward().eval(), BOTH, "tgt")
    captured = _trace(source, ["several"])
    assert list(captured.extras) == ["hidden_states.several"]


def test_the_module_is_left_as_it_was():
    module = Modules().eval()
    source = from_module(module, BOTH, "tgt")
    _trace(source, ["source"])
    assert not any(part._forward_hooks for part in module.modules())


class Shifted(Engine):
    """Right in its logits, and wrong in one of the values beside them."""

    wrong = ""

    def encode(self, *arguments):
        given = super().encode(*arguments)
        if self.wrong in given:
            given[self.wrong] = self.session.device_tensor(given[self.wrong].numpy() + np.float32(0.1))
        return given

    def step(self, state, tokens, counts=None, logit_positions="last"):
        logits = super().step(state, tokens, counts, logit_positions)
        state.extras = {name: value + 0.1 * (name == self.wrong) for name, value in state.extras.items()}
        return logits


def test_a_file_that_is_wrong_only_beside_its_logits_is_refused(tmp_path):
    special = SpecialTokens((1,), (2,), 0)
    source = from_module(seq2seq(1).eval(), BOTH, "tgt", special_tokens=special)
    understood = analyse(source, "cpu", cross_attentions=True, hidden_states=["encoder.0", "decoder.0", "output"])
    compiled = understood.compile()
    engine = Shifted(save(compiled.model, compiled.manifest, tmp_path / "m.onnx"), device="cpu", threads=1)
    gate = ParityGate(source, compiled.inputs, compiled.locator)
    errors = gate.check(engine).extras
    assert list(errors) == [
        "hidden_states.encoder.0",
        "hidden_states.decoder.0",
        "hidden_states.output",
        "cross_attentions",
    ]
    assert max(errors.values()) < 1e-4
    for name in errors:
        engine.wrong = name
        with pytest.raises(ParityError, match=rf"^{name} differs from its source in the case 'one row': row 0"):
            gate.check(engine)
