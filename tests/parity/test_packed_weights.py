"""Folders of GPTQ and AWQ: the file keeps their integers, and computes as the model with the dequantised weights does.

The folders are packed here by the published layouts, number by number: `QuantLinear.pack` of AutoGPTQ 0.7 and
`WQLinear_GEMM.from_linear` of AutoAWQ 0.2.
"""

from __future__ import annotations

import json

import numpy as np
import onnx
import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.peft_adapters import greedy, make_adapter
from torch import nn
from transformers.pytorch_utils import Conv1D

from tformer_export import Quantization, export
from tformer_export.sources import load_source
from tformer_runtime import Model, OptionError, SourceError

PROMPT = [1, 5, 6]
TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def decoder():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=44, initializer_range=0.5, **TOKENS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def translator():
    config = transformers.BartConfig(
        vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=44, init_std=0.5,
        decoder_start_token_id=1, forced_eos_token_id=None, **TOKENS,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def transposed():
    """Its layers store (K, N)."""
    config = transformers.GPT2Config(vocab_size=40, n_embd=48, n_layer=1, n_head=2, n_positions=44, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def pack_rows(numbers):
    """Pack (R, C) to int32 (R / 8, C): eight rows in one, the first in the lowest bits."""
    packed = np.zeros((len(numbers) // 8, numbers.shape[1]), np.uint32)
    for row in range(len(numbers)):
        packed[row // 8] |= numbers[row].astype(np.uint32) << np.uint32(4 * (row % 8))
    return packed.view(np.int32)


def pack_gptq(integers, zeros, scales, groups, offset):
    return {
        "qweight": pack_rows(integers),
        "qzeros": np.ascontiguousarray(pack_rows((zeros - offset).T).T),
        "scales": scales,
        "g_idx": groups.astype(np.int32),
    }


def pack_awq(integers, zeros, scales):
    def pack(numbers):
        packed = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
        for column in range(packed.shape[1]):
            for place in range(8):
                packed[:, column] |= numbers[:, 8 * column + AWQ_ORDER[place]].astype(np.uint32) << np.uint32(4 * place)
        return packed.view(np.int32)

    return {"qweight": pack(integers), "qzeros": pack(zeros), "scales": scales}


def save_packed(folder, module, method, size, layout="", act_order=False, symmetric=False, **config):
    """Save a module whose linear layers, but for the logits, are packed. Its weights become the dequantised ones."""
    rng = np.random.default_rng(0)
    state, integers = {name: value.clone() for name, value in module.state_dict().items()}, {}
    if module.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Linear, Conv1D)) or name == "lm_head":
            continue
        weight = layer.weight.detach().numpy().T if isinstance(layer, nn.Linear) else layer.weight.detach().numpy()
        inner, columns = weight.shape
        groups = np.arange(inner) // (inner if size == -1 else size)
        groups = rng.permutation(groups) if act_order else groups
        shape = (groups.max() + 1, columns)
        scales = rng.uniform(0.02, 0.2, shape).astype(np.float16)
        zeros = np.full(shape, 8) if symmetric else rng.integers(1, 16, shape)
        q = np.clip(np.rint(weight / scales[groups] + zeros[groups]), 0, 15).astype(np.int64)
        offset = int(layout != "gptq_v2")
        parts = pack_awq(q, zeros, scales) if method == "awq" else pack_gptq(q, zeros, scales, groups, offset)
        del state[f"{name}.weight"]
        state |= {f"{name}.{part}": torch.from_numpy(array) for part, array in parts.items()}
        floats = torch.from_numpy(((q - zeros[groups]) * scales[groups].astype(np.float64)).astype(np.float32))
        layer.weight.data = floats.T.contiguous() if isinstance(layer, nn.Linear) else floats
        integers[name] = q
        if layer.bias is None and method == "gptq":
            state[f"{name}.bias"] = torch.zeros(columns, dtype=torch.float16)  # as older packers write it
    quantization = {"quant_method": method, "bits": 4, "group_size": size, "desc_act": act_order, **config}
    quantization |= {"version" if method == "awq" else "checkpoint_format": layout} if layout else {}
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = {**module.config.to_dict(), "quantization_config": quantization}
    settings["architectures"] = [type(module).__name__]
    (folder / "config.json").write_text(json.dumps(settings))
    module.generation_config.save_pretrained(folder)
    return integers


CASES = {
    "gptq": (decoder, "gptq", 32, "gptq", False, False),
    "gptq_act_order": (decoder, "gptq", 16, "", True, False),
    "gptq_v2_whole_columns": (decoder, "gptq", -1, "gptq_v2", False, True),
    "gptq_transposed": (transposed, "gptq", 48, "", True, False),
    "awq": (translator, "awq", 32, "gemm", False, False),
}


@pytest.fixture
def packed(request, tmp_path):
    make, *layout = CASES[request.param]
    torch.manual_seed(0)
    module = make().eval()
    module.generation_config.update(num_beams=1, **TOKENS)
    integers = save_packed(tmp_path / "folder", module, *layout)
    return tmp_path / "folder", module, integers


@pytest.mark.parametrize("packed", CASES, indirect=True)
def test_reference_model_has_the_dequantised_weights(packed):
    folder, module, integers = packed
    source = load_source(folder)
    state = source.users_module.state_dict()
    for name, expected in module.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=0, atol=0)
    assert {name.removesuffix(".weight") for name in source.packed_weights} == set(integers)


@pytest.mark.parametrize("packed", ["gptq_act_order", "awq"], indirect=True)
def test_file_keeps_the_integers_and_decodes_as_the_dequantised_model(packed, tmp_path):
    folder, module, integers = packed
    report = export(load_source(folder), tmp_path / "model.onnx")
    assert report.parity.relative_error < 1e-4
    assert (report.quantization, report.counts["packed_weights"]) == ("int4", len(integers))
    assert ("kept", f"{len(integers)} weights in the 4-bit integers of the source") in report.rows()
    stored = {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(tmp_path / "model.onnx").graph.initializer
    }
    for name, q in integers.items():
        numbers = stored[f"{name}.weight.integers"]
        halves = np.stack([numbers & 15, numbers >> 4], -1).reshape(q.shape[1], -1)[:, : len(q)]
        order = stored.get(f"{name}.weight.order", np.arange(len(q)))
        assert np.array_equal(halves.T, q[order])
    shapes = {shape for q in integers.values() for shape in (q.shape, q.T.shape)}
    assert not any(array.shape in shapes for array in stored.values())  # no weight is in the file as floats too
    model = Model.load(tmp_path / "model.onnx", "cpu", threads=1)
    for prompt in (PROMPT, [1, 9, 4, 4, 7, 21]):
        with torch.no_grad():
            expected = module.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
        start = 1 if module.config.is_encoder_decoder else len(prompt)
        generated = list(model.generate(prompt, max_new_tokens=12).token_ids)
        assert generated == expected[start:]


@pytest.mark.parametrize("packed", ["gptq"], indirect=True)
def test_adapters_stay_apart_from_the_integers(packed, tmp_path):
    folder, module, integers = packed
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = make_adapter(module, lora, tmp_path / "adapter", folder)
    report = export(load_source(folder), tmp_path / "model.onnx", adapters=[tmp_path / "adapter"])
    assert (report.quantization, report.counts["packed_weights"]) == ("int4", len(integers))
    model = Model.load(tmp_path / "model.onnx", "cpu", threads=1)
    for name, reference in (("base", module), ("adapter", adapted)):
        assert list(model.generate(PROMPT, adapter=name, max_new_tokens=8).token_ids) == greedy(reference, PROMPT, 8)[0]
    with pytest.raises(
        SourceError, match=r"its weights are 4-bit integers, into which the adapter .* cannot be merged"
    ):
        load_source(tmp_path / "adapter")


@pytest.mark.parametrize("packed", ["gptq"], indirect=True)
def test_options_that_contradict_packed_weights_are_refused(packed, tmp_path):
    source = load_source(packed[0])
    for options, named in (
        ({"quantization": "int8"}, "--quantize int8"),
        ({"target": "cuda"}, "--target cuda"),
        ({"target": "portable", "tune": False}, "--target portable"),
        ({"tune": True}, "--tune"),
    ):
        with pytest.raises(OptionError, match=f"are 4-bit integers already.*leave out {named}"):
            export(source, tmp_path / "out.onnx", **options)
    report = export(source, tmp_path / "out.onnx", quantization=Quantization(kv_cache="int8"))
    assert (report.counts["packed_weights"], report.kv_cache) == (7, "int8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantised with bitsandbytes, and only gptq and awq are read: give the folder",
        ),
        ({"quant_method": "fp8"}, "quantised with fp8, and only"),
        ({"bits": 3}, "quantised with gptq to 3 bits, and only 4 are read"),
        ({"checkpoint_format": "marlin"}, "packed in the layout marlin of gptq, and only gptq is read"),
        ({"quant_method": "awq", "version": "gemv"}, "packed in the layout gemv of awq, and only gemm is read"),
        ({"group_size": 128}, "is not in 4 bits with groups of 128 rows: qzeros is"),
        ({"group_size": "32"}, "the group_size in its quantization_config must be a whole number"),
    ],
)
def test_packings_that_are_not_read_are_refused_by_name(changes, message, tmp_path):
    torch.manual_seed(0)
    save_packed(tmp_path, decoder(), "gptq", 32, **changes)
    with pytest.raises(SourceError, match=message):
        load_source(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qzeros", lambda zeros: zeros | 15, "has a zero point of 16"),
        ("qweight", lambda weight: weight[:-1], "is not in 4 bits"),
        ("qweight", lambda weight: weight.float(), "must be matrices, of int32 and floats"),
        ("scales", lambda scales: scales * float("inf"), "has scales that are not finite"),
        ("g_idx", lambda groups: torch.zeros_like(groups), "has a g_idx whose groups are not of 32 rows each"),
        ("scales", None, "has no scales next to it"),
    ],
)
def test_damaged_packed_weights_are_refused(part, change, message, tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(0)
    save_packed(tmp_path, decoder(), "gptq", 32)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.down_proj.{part}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=f"the packed weight model.layers.0.mlp.down_proj.qweight .*{message}"):
        load_source(tmp_path)
