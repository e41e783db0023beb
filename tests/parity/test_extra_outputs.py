"""Extra outputs of exported files match the source model: cross-attention weights and hidden states.

The references for weights are transformers' generate() and a hand-written attention that stores its weights. The
references for hidden states are transformers' outputs and forward hooks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import END, PAD, START, VOCABULARY
from torch import nn

from tformer_export import ExtraOutputs, export
from tformer_runtime import Model

TOLERANCE_UNIT = dict(rtol=0, atol=2e-5)  # float32 sums in another order, with values of about 1
TOLERANCE_TEN = dict(rtol=0, atol=2e-4)  # values of about 10
HEADS = ((0, 1), (1, 0), (1, 3))
HAND_WRITTEN = ExtraOutputs(
    cross_attentions=HEADS,
    hidden_states=("encoder.0.4", "decoder.0.6", "decoder.1.1", "decoder.0.0.linears.0", "tgt", "out"),
)
LLAMA = ExtraOutputs(hidden_states=("model.layers.0", "model.layers.1.self_attn.q_proj", "model.norm", "lm_head"))


def draw_rows(*lengths):
    """Return random rows of ids of these lengths."""
    rng = np.random.default_rng(5)
    return [rng.integers(END + 1, VOCABULARY, length) for length in lengths]


def generate_by_transformers(module, row, **options):
    """Return the output of generate() with attentions, for a single row."""
    with torch.no_grad():
        return module.generate(
            torch.from_numpy(row)[None],
            attention_mask=torch.ones(1, len(row), dtype=torch.long),
            do_sample=False,
            max_new_tokens=10,
            output_attentions=True,
            return_dict_in_generate=True,
            **options,
        )


def mean_weights(layers, beam):
    """Return the mean over layers and heads of one beam's weights (heads, 1, source)."""
    return torch.stack([layer[beam, :, -1] for layer in layers]).mean((0, 1)).numpy()


@pytest.mark.parametrize("name", ["marian-eager", pytest.param("t5-eager", marks=pytest.mark.thorough)])
def test_greedy_cross_attentions_match_generate(exported, name):
    file = exported(name, extra_outputs=ExtraOutputs(cross_attentions=True))
    for row in draw_rows(6, 11, 3):
        result = file.model.generate(row, cross_attentions=True, max_new_tokens=10)
        expected = generate_by_transformers(file.family.module, row)
        assert list(result.token_ids) == expected.sequences[0, 1:].tolist()
        weights = [mean_weights(layers, 0) for layers in expected.cross_attentions]
        assert result.cross_attentions.dtype == np.float32
        np.testing.assert_allclose(result.cross_attentions, np.stack(weights), **TOLERANCE_UNIT)


@pytest.mark.parametrize("name", ["marian-eager", pytest.param("t5-eager", marks=pytest.mark.thorough)])
def test_cross_attentions_of_beams_match_generate_along_beam_indices(exported, name):
    file = exported(name, extra_outputs=ExtraOutputs(cross_attentions=True))
    num_reordered = 0
    for row in draw_rows(6, 11, 3):
        result_of_beams = file.model.generate(
            row, cross_attentions=True, num_beams=4, num_return_sequences=3, max_new_tokens=10
        )
        expected = generate_by_transformers(
            file.family.module, row, num_beams=4, num_return_sequences=3, output_scores=True
        )
        for result, ids, beams in zip(
            (result_of_beams, *result_of_beams.alternatives),
            expected.sequences.tolist(),
            expected.beam_indices.tolist(),
            strict=True,
        ):
            length = len(result.token_ids)
            assert list(result.token_ids) == ids[1 : 1 + length]
            weights = [mean_weights(expected.cross_attentions[t], beams[t]) for t in range(length)]
            np.testing.assert_allclose(result.cross_attentions, np.stack(weights), **TOLERANCE_UNIT)
            num_reordered += len(set(beams[1:length])) > 1
    assert num_reordered > 3


def test_cross_attentions_in_a_batch_match_align_of_single_rows(exported):
    file = exported("marian-eager", extra_outputs=ExtraOutputs(cross_attentions=True))
    rows = draw_rows(6, 11, 3, 1)
    for options in (
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"temperature": 1.3, "seed": 4, "num_return_sequences": 2},
    ):
        options = {**options, "cross_attentions": True, "max_new_tokens": 8}
        results = list(file.model.generate_batch(rows, batch_size=2, **options))
        for row, result in zip(rows, results, strict=True):
            for hypothesis in (result, *result.alternatives):
                assert hypothesis.cross_attentions.shape == (len(hypothesis.token_ids), len(row))
                np.testing.assert_allclose(
                    hypothesis.cross_attentions, file.model.align(row, hypothesis.token_ids), **TOLERANCE_UNIT
                )


@pytest.mark.parametrize("target", ["cpu", pytest.param("portable", marks=pytest.mark.thorough)])
def test_cross_attentions_of_chosen_heads_match_hand_written_attention(exported, target):
    file = exported("hand-written", target, extra_outputs=HAND_WRITTEN)
    (row,) = draw_rows(7)
    result = file.model.generate(row, cross_attentions=True, max_new_tokens=9)
    module, tokens = file.family.module, torch.tensor([[START, *result.token_ids[:-1]]])
    with torch.no_grad():
        module(torch.from_numpy(row)[None], tokens)
    expected = torch.stack([module.decoder[layer][1].weights[0, head] for layer, head in HEADS]).mean(0)
    np.testing.assert_allclose(result.cross_attentions, expected.numpy(), **TOLERANCE_UNIT)


def test_hidden_states_match_forward_hooks(exported):
    file = exported("hand-written", extra_outputs=HAND_WRITTEN)
    names = HAND_WRITTEN.hidden_states
    for row in draw_rows(7, 2):
        result = file.model.generate(row, hidden_states=True, max_new_tokens=9)
        assert set(result.hidden_states) == set(names)
        tokens = [START, *result.token_ids[:-1]]
        expected = submodule_outputs(file.family.module, names, torch.from_numpy(row)[None], torch.tensor([tokens]))
        for name, value in expected.items():
            np.testing.assert_allclose(result.hidden_states[name], value, **TOLERANCE_TEN)
        all_states = file.model.hidden_states(row, tokens[1:])
        for name, value in expected.items():
            np.testing.assert_allclose(all_states[name], value, **TOLERANCE_TEN)
    assert set(file.model.hidden_states(row)) == {"encoder.0.4"}


def submodule_outputs(module, names, *inputs):
    """Return name → output of each submodule for a single row, recorded by forward hooks."""
    outputs = {}
    handles = [
        module.get_submodule(name).register_forward_hook(lambda m, a, output, name=name: outputs.update({name: output}))
        for name in names
    ]
    with torch.no_grad():
        module(*inputs)
    for handle in handles:
        handle.remove()
    return {name: outputs[name][0].numpy() for name in names}


def test_hidden_states_of_a_decoder_only_model_match_transformers(exported):
    file = exported("llama-sdpa", extra_outputs=LLAMA)
    (prompt,) = draw_rows(5)
    result = file.model.generate(prompt, hidden_states=True, max_new_tokens=6)
    ids = torch.tensor([[*prompt, *result.token_ids[:-1]]])
    with torch.no_grad():
        output = file.family.module(ids, output_hidden_states=True, use_cache=False)
    expected = {
        "model.layers.0": output.hidden_states[1],
        "model.norm": output.hidden_states[-1],
        "lm_head": output.logits,
    }
    all_states = file.model.hidden_states(prompt, result.token_ids[:-1])
    assert set(all_states) == set(result.hidden_states) == set(LLAMA.hidden_states)
    for name, value in expected.items():
        np.testing.assert_allclose(all_states[name], value[0].numpy(), **TOLERANCE_TEN)
        np.testing.assert_allclose(result.hidden_states[name], value[0, len(prompt) - 1 :].numpy(), **TOLERANCE_TEN)
    query = submodule_outputs(file.family.module, LLAMA.hidden_states[1:2], ids)[LLAMA.hidden_states[1]]
    np.testing.assert_allclose(all_states["model.layers.1.self_attn.q_proj"], query, **TOLERANCE_TEN)
    batch = file.model.generate_batch([prompt, prompt[:2]], hidden_states=True, max_new_tokens=6)
    for name, value in next(batch).hidden_states.items():
        np.testing.assert_allclose(value, result.hidden_states[name], **TOLERANCE_TEN)


class Encoder(nn.Module):
    """A single-pass encoder. Its layer returns a tuple with a tensor (time, batch, width)."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0], None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.out = nn.Embedding(VOCABULARY, 16), self.Layer(), nn.Linear(16, 3)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(src).transpose(0, 1), src == PAD)[0].transpose(0, 1))


def test_hidden_states_of_a_single_pass_model_match_its_layer(tmp_path):
    module = Encoder().eval()
    report = export(
        module,
        tmp_path / "m.onnx",
        {"src": torch.tensor([[3, 4, 5], [6, 7, 8]])},
        extra_outputs=ExtraOutputs(hidden_states="layer"),
    )
    assert 0 < report.parity.extras["hidden_states.layer"] < 1e-4
    model = Model.load(tmp_path / "m.onnx", "cpu")
    for row in draw_rows(9, 4):
        with torch.no_grad():
            expected, _ = module.layer(module.embed(torch.from_numpy(row)[:, None]), torch.zeros(1, len(row)) > 0)
        (actual,) = model.hidden_states(row).values()
        np.testing.assert_allclose(actual, expected[:, 0].numpy(), **TOLERANCE_UNIT)


def test_report_and_manifest_list_the_extra_outputs(exported):
    file = exported("hand-written", extra_outputs=HAND_WRITTEN)
    names = {"cross_attentions", *(f"hidden_states.{name}" for name in HAND_WRITTEN.hidden_states)}
    assert set(file.report.parity.extras) == names
    assert all(0 <= error < 1e-4 for error in file.report.parity.extras.values())
    manifest = file.model.manifest
    assert {extra.name for extra in manifest.extras} == names
    shapes = {extra.name: extra.shape for extra in manifest.decode.extras}
    assert shapes["cross_attentions"] == ("batch", "selected", "src_length")
    assert shapes["hidden_states.decoder.0.6"] == ("batch", "selected", 32)
    assert [(extra.name, extra.shape) for extra in manifest.encode.extras] == [
        ("hidden_states.encoder.0.4", ("batch", "src_length", 32))
    ]
    assert type(manifest).from_json(manifest.to_json()) == manifest
