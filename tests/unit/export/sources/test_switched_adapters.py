"""Adapters that rows choose among: which adapters and models are refused, and models that are not transformers'."""

from __future__ import annotations

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_models import gpt2, llama
from support.peft_adapters import make_adapter
from torch import nn

from tformer_export.sources.hugging_face.folder import from_transformers
from tformer_export.sources.switched_adapters import with_adapters
from tformer_export.sources.torch_module import from_module
from tformer_runtime import OptionError, SourceError
from tformer_runtime.format.manifest import ADAPTER_INPUT

LORA = {"r": 2, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def source():
    return from_transformers(llama())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(**LORA, use_dora=True), "sets use_dora, and only plain LoRA"),
        (peft.LoraConfig(**LORA, modules_to_save=["lm_head"]), "sets modules_to_save, and only plain LoRA"),
        (peft.LoraConfig(**LORA, bias="all"), "sets bias, and only plain LoRA"),
        (peft.LoraConfig(**LORA, lora_bias=True), "sets lora_bias, and only plain LoRA"),
        (peft.LoraConfig(**LORA, trainable_token_indices=[3]), "sets trainable_token_indices, and only plain LoRA"),
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "is of the kind IA3, and only LoRA"),
    ],
)
def test_adapters_that_are_more_than_low_rank_are_refused(source, config, message, tmp_path):
    make_adapter(llama(), config, tmp_path / "adapter", "base")
    with pytest.raises(SourceError, match=message) as refusal:
        with_adapters(source, [tmp_path / "adapter"])
    assert f"tformer-export {tmp_path / 'adapter'}" in str(refusal.value)


def test_start_that_changes_the_base_is_refused(source, tmp_path):
    make_adapter(llama(), peft.LoraConfig(**LORA), tmp_path / "adapter", "base")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "pissa"}))
    with pytest.raises(SourceError, match="sets init_lora_weights, and only plain LoRA"):
        with_adapters(source, [tmp_path / "adapter"])


def test_names_must_differ_from_each_other_and_from_the_base(source, tmp_path):
    make_adapter(llama(), peft.LoraConfig(**LORA), tmp_path / "one", "base")
    make_adapter(llama(), peft.LoraConfig(**LORA), tmp_path / "base", "base")
    with pytest.raises(OptionError, match=r"'one' is given twice: write NAME="):
        with_adapters(source, [tmp_path / "one", tmp_path / "one"])
    with pytest.raises(OptionError, match=r"'base' is the model without an adapter: write NAME="):
        with_adapters(source, [tmp_path / "base"])
    named = with_adapters(source, [f"a.b={tmp_path / 'one'}", f"c={tmp_path / 'base'}", tmp_path / "one"])
    assert named.adapters == ("a.b", "c", "one")
    assert named.caller_inputs == ["input_ids"]


def test_adapters_of_another_model_and_missing_ones_are_refused(source, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["c_attn"])
    make_adapter(gpt2(), config, tmp_path / "adapter", "base")
    with pytest.raises(SourceError, match=r"does not fit its base model: .*c_attn"):
        with_adapters(source, [tmp_path / "adapter"])
    with pytest.raises(SourceError, match=r"is not a folder of an adapter: it holds no adapter_config.json"):
        with_adapters(source, [tmp_path])


def test_convolution_is_refused_by_name(tmp_path):
    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(9, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 9)

        def forward(self, ids):
            return self.head(self.mix(self.embed(ids).transpose(1, 2)).transpose(1, 2))

    model = Convolved().eval()
    make_adapter(model, peft.LoraConfig(r=2, target_modules=["mix"]), tmp_path / "adapter", "base")
    source = from_module(model, {"ids": torch.ones(2, 3, dtype=torch.int64)}, "ids")
    with pytest.raises(SourceError, match=r"adapts mix, a Conv1d, and only LoRA of nn.Linear, nn.Embedding and Conv1D"):
        with_adapters(source, [tmp_path / "adapter"])


def test_saved_embeddings_must_be_those_of_the_model(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    make_adapter(llama(), config, tmp_path / "same", "base")
    make_adapter(llama(1), config, tmp_path / "other", "base")
    path = tmp_path / "same" / "adapter_model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(path).items()}, path)
    model = copy.deepcopy(llama())
    model.lm_head.weight.requires_grad_(False)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    source = from_transformers(model)
    assert with_adapters(source, [tmp_path / "same"]).adapters == ("same",)
    with pytest.raises(SourceError, match=r"holds the whole weight model.embed_tokens.weight with other values"):
        with_adapters(source, [tmp_path / "other"])
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["lm_head.weight"]


class Scaled(nn.Embedding):
    """An embedding with a scale of its own, by which PEFT multiplies the adapter's part as well."""

    embed_scale = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


def test_scale_of_an_embedding_holds_for_its_adapter(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(9, 8), nn.Linear(8, 9)).eval()
    adapted = make_adapter(model, peft.LoraConfig(r=2, target_modules=["0"]), tmp_path / "adapter", "base")
    source = from_module(model, {"input": torch.ones(2, 3, dtype=torch.int64)}, "input")
    ids = torch.arange(8).reshape(2, 4)
    outputs = with_adapters(source, [tmp_path / "adapter"]).module(ids, torch.tensor([1, 0]))
    assert torch.allclose(outputs[0], adapted(ids)[0], atol=1e-5)
    assert torch.allclose(outputs[1], model(ids)[1], atol=1e-5)


class Flat(nn.Module):
    """Rows and positions are one axis in the feed-forward layer, as in layers that sort them by expert."""

    def __init__(self, turned: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
        self.turned = turned

    def forward(self, ids):
        x = self.embed(ids)
        x = x.transpose(0, 1) if self.turned else x
        y = self.inner(x.reshape(-1, 8)).reshape(x.shape)
        y = y.transpose(0, 1) if self.turned else y
        return self.head(y)


def flat_source(model, tmp_path):
    """Return a source with two adapters of the layer, and the models with one adapter each."""
    models = [model]
    for seed in (0, 1):
        config = peft.LoraConfig(r=2 + seed, target_modules=["inner"])
        models.append(make_adapter(model, config, tmp_path / f"adapter{seed}", "base", seed=seed, size=1))
    example = {"ids": torch.ones(2, 3, dtype=torch.int64)}
    return from_module(model, example, "ids"), [tmp_path / "adapter0", tmp_path / "adapter1"], models


def test_rows_and_positions_in_one_axis_keep_their_adapters(tmp_path):
    source, adapters, models = flat_source(Flat().eval(), tmp_path)
    before = copy.deepcopy(source.module.state_dict())
    switched = with_adapters(source, adapters)
    ids, numbers = torch.arange(15).reshape(3, 5) % 9, [2, 0, 1]
    with torch.no_grad():
        outputs = switched.module(ids, torch.tensor(numbers))
        for row, number in enumerate(numbers):
            assert torch.allclose(outputs[row], models[number](ids[row : row + 1])[0], atol=1e-5)
        assert torch.equal(source.module(ids), models[0](ids))
    assert list(switched.example) == ["ids", ADAPTER_INPUT]
    assert all(torch.equal(before[name], value) for name, value in source.module.state_dict().items())


def test_model_that_turns_rows_around_is_refused(tmp_path):
    source, adapters, _ = flat_source(Flat(turned=True).eval(), tmp_path)
    with pytest.raises(SourceError, match="the model may not keep the rows apart where it is adapted"):
        with_adapters(source, adapters)


def test_default_adapter_must_exist(source, tmp_path):
    from dataclasses import replace

    make_adapter(llama(), peft.LoraConfig(**LORA), tmp_path / "one", "base")
    named = replace(source, generation_defaults={"adapter": "two"})
    with pytest.raises(OptionError, match="the generation defaults name the adapter 'two', and there are one"):
        with_adapters(named, [tmp_path / "one"])
