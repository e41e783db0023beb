"""The list of rewrites: each changes its place, and none changes a result."""

from __future__ import annotations

import pytest
import torch
from support.small_models import VOCABULARY, Mixer, Small, captured_of, causal, joined
from torch import nn

from tformer_export.analysis.interpreter import run
from tformer_export.normalise import NORMALISE, Normalised, NormaliseSettings, normalise

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])  # no padding, which is 0


class EinsumAttention(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(~causal(x), float("-inf"))
        return joined(torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v))


class HidesPadding(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        seen = causal(x) & (tgt != 0)[:, None, None]
        return joined(torch.softmax((q @ k.mT).masked_fill(~seen, -1e9), -1) @ v)


class PreviousToken(Mixer):
    def forward(self, x, tgt):
        earlier = x.roll(1, 1)
        earlier[:, 0] = 0
        return earlier


class LastLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = Small(EinsumAttention)

    def forward(self, tgt):
        return self.small(tgt)[:, -1]


MODELS = {
    "einsum": lambda: Small(EinsumAttention),
    "attention_patterns": lambda: Small(EinsumAttention),
    "padding_tests": lambda: Small(HidesPadding),
    "hidden_wraps": lambda: Small(PreviousToken),
    "last_position": LastLogits,
    "equal_nodes": lambda: Small(HidesPadding),
}


@pytest.mark.parametrize("name", MODELS)
def test_rewrite_changes_its_place_and_no_result(name):
    torch.manual_seed(0)
    graph = captured_of(MODELS[name]())
    results, normalised = [run(graph, {"tgt": IDS})[graph.output]], Normalised()
    for rewrite in NORMALISE:
        rewrite.apply(graph, NormaliseSettings(padding=0), normalised)
        graph.graph.lint()
        result = run(graph, {"tgt": IDS})[graph.output]
        expected = results[-1]
        assert result.isfinite().all(), rewrite.name
        assert torch.allclose(result[:, -1] if expected.dim() < result.dim() else result, expected, atol=1e-5), (
            rewrite.name
        )
        results.append(result)
    counts = normalise(captured_of(MODELS[name]()), NormaliseSettings(padding=0)).counts
    assert counts[name] > 0
    assert list(counts) == [rewrite.name for rewrite in NORMALISE]


def test_facts_of_the_results():
    graph = captured_of(LastLogits())
    assert normalise(graph, NormaliseSettings()).gives_last
    assert run(graph, {"tgt": IDS})[graph.output].shape == (2, 4, VOCABULARY)
    hides = captured_of(Small(HidesPadding))
    assert normalise(hides, NormaliseSettings(padding=0)).hides_padding
    other = captured_of(Small(HidesPadding))
    assert not normalise(other, NormaliseSettings(padding=1)).hides_padding
