"""Extra outputs: selected heads, hidden states, their layouts, and refused selections."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.small_models import VOCABULARY, Mixer, Small, captured_of, causal, joined
from torch import nn

from tformer_export.analysis.binding_time import binding_times
from tformer_export.analysis.interpreter import run
from tformer_export.common.onnx_writer import save
from tformer_export.compile import analyse
from tformer_export.normalise.attention_patterns import recognise
from tformer_export.normalise.attention_weights import add_cross_attentions, select_heads
from tformer_export.sources.torch_module import from_module
from tformer_export.staging.auxiliary_outputs import find_auxiliary_outputs
from tformer_export.trace.lengths import trace_source
from tformer_export.verify.parity import ParityGate
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import OptionError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import SpecialTokens

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
EXAMPLE_INPUTS = {"src": IDS, "tgt": IDS}


def seq2seq(decoder_layers=3):
    torch.manual_seed(0)
    return Seq2SeqTransformer(
        19, 23, width=16, heads=4, encoder_layers=1, decoder_layers=decoder_layers, feedforward=24, max_length=24
    )


@pytest.fixture(scope="module")
def aligned():
    """A graph with added alignments of layer 0 and of one head of layer 2."""
    captured = captured_of(seq2seq(), example=EXAMPLE_INPUTS)
    recognise(captured)
    add_cross_attentions(captured, [0, (2, 1)])
    return captured


def refusal(call, *arguments):
    with pytest.raises(OptionError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (True, {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}),
        ("last", {2: [0, 1, 2, 3]}),
        (0, {0: [0, 1, 2, 3]}),
        ([(2, 3), (0, 1), (2, 0)], {0: [1], 2: [0, 3]}),
        ([1, (1, 2)], {1: [0, 1, 2, 3]}),
    ],
)
def test_selected_heads_are_resolved(selection, expected):
    assert select_heads(selection, [4, 4, 4]) == expected


def test_mean_of_heads_is_a_distribution_over_the_source(aligned):
    values = run(aligned, {"src": torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]]), "tgt": IDS})
    added = [n for n in aligned.nodes if n.target is torch.ops.tformer.attention_weights.default]
    assert [node.args[5] for node in added] == [[0, 1, 2, 3], [1]]
    weights = values[aligned.extras["cross_attentions"]]
    assert weights.shape == (2, 3, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(weights * 5, sum(values[node][:, 0] for node in added))
    assert not weights[1, :, 2:].any()  # padding


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (3, "cross_attentions: there is no layer 3, the cross-attentions are 0 to 2"),
        ([(1, 4)], "cross_attentions: layer 1 has no head 4, its heads are 0 to 3"),
        ("first", "cross_attentions are True, \"last\", layers, or pairs of layer and head, not 'first'"),
        ([], 'cross_attentions are True, "last", layers, or pairs of layer and head, not []'),
    ],
)
def test_missing_heads_are_refused(selection, message):
    assert refusal(select_heads, selection, [4, 4, 4]) == message


class SelfAttention(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal(x)))


def test_model_without_cross_attention_is_refused():
    assert refusal(add_cross_attentions, captured_of(Small(SelfAttention)), True) == (
        "the model reads nothing but tgt: it has no cross-attention, so it has no cross_attentions"
    )


class SquaredWeights(nn.Module):
    """Cross-attention with squared weights, which is staged operation by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        x, y = self.embed(tgt), self.embed(src)
        return self.out(x + torch.softmax(x @ y.transpose(1, 2), -1) ** 2 @ y)


def test_unrecognised_cross_attention_is_refused():
    captured = captured_of(SquaredWeights(), example=EXAMPLE_INPUTS)
    assert recognise(captured).count == 0
    text = refusal(add_cross_attentions, captured, True)
    assert text.startswith("the model has no cross-attention for cross_attentions: none of the 0 attentions recognised")


class Modules(nn.Module):
    """One submodule for each kind of output."""

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
    source = from_module(Modules().eval(), EXAMPLE_INPUTS, "tgt")
    captured = trace_source(source, names)
    encode, decode = find_auxiliary_outputs(captured, binding_times(captured))
    return [[(extra.name, extra.axes, extra.shape) for extra in stage] for stage in (encode, decode)]


def test_layouts_of_hidden_states():
    encode, decode = layouts("turned", "source", "several", "pooled")
    assert encode == [
        ("hidden_states.source", (0,), ("batch", "src_length", 8)),
        ("hidden_states.pooled", (0,), ("batch", 8)),
    ]
    assert decode == [
        ("hidden_states.turned", (1, 0), ("batch", "selected", 8)),
        ("hidden_states.several", (0, 1), ("batch", "selected", 8)),
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
def test_invalid_submodules_are_refused(name, message):
    assert message in refusal(layouts, name)


class WithoutForward(Modules):
    """A module with encode and decode, which is traced through a wrapper."""

    forward = nn.Module.forward

    def encode(self, src):
        return self.source(src)

    def decode(self, tgt, memory):
        return self.out(self.several(self.target(tgt))["first"] + memory.mean(1, keepdim=True))


def test_hidden_states_have_names_of_the_users_module():
    source = from_module(WithoutForward().eval(), EXAMPLE_INPUTS, "tgt")
    captured = trace_source(source, ["several"])
    assert list(captured.extras) == ["hidden_states.several"]


def test_trace_removes_its_hooks():
    module = Modules().eval()
    source = from_module(module, EXAMPLE_INPUTS, "tgt")
    trace_source(source, ["source"])
    assert not any(part._forward_hooks for part in module.modules())


class Shifted(Engine):
    """An engine with correct logits and one wrong extra output."""

    shifted_output = ""

    def encode(self, *arguments):
        outputs = super().encode(*arguments)
        if self.shifted_output in outputs:
            outputs[self.shifted_output] = self.session.device_tensor(
                outputs[self.shifted_output].numpy() + np.float32(0.1)
            )
        return outputs

    def step(self, state, tokens, counts=None, logit_positions="last"):
        logits = super().step(state, tokens, counts, logit_positions)
        state.extras = {name: value + 0.1 * (name == self.shifted_output) for name, value in state.extras.items()}
        return logits


def test_wrong_extra_output_is_refused(tmp_path):
    special = SpecialTokens((1,), (2,), 0)
    source = from_module(seq2seq(1).eval(), EXAMPLE_INPUTS, "tgt", special_tokens=special)
    analysed = analyse(source, "cpu", cross_attentions=True, hidden_states=["encoder.0", "decoder.0", "output"])
    compiled = analysed.compile()
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
        engine.shifted_output = name
        with pytest.raises(ParityError, match=rf"^{name} differs from its source in the case 'one row': row 0"):
            gate.check(engine)
