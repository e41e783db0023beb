"""Folders of PEFT adapters as sources: merged into the base model that they name, against PEFT's own model."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from support.hf_models import gpt2, llama, t5
from support.peft_adapters import greedy, make_adapter

from tformer_export import export
from tformer_export.sources import load_source
from tformer_export.sources.hugging_face import peft_adapter
from tformer_runtime import Model, SourceError

PROMPT = [1, 5, 7, 9]
STEPS = 10


def save_base(model, path):
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of base models next to each other, and the models."""
    path = tmp_path_factory.mktemp("models")
    for name, model in {"llama": llama(), "t5": t5(), "gpt2": gpt2()}.items():
        save_base(model, path / name)
    return path


def configs():
    everywhere = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    yield "lora", llama(), peft.LoraConfig(r=4, lora_alpha=6, **everywhere)
    yield "dora", llama(), peft.LoraConfig(r=3, use_dora=True, use_rslora=True, **everywhere)
    yield "ia3", gpt2(), peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True)
    saved = ["lm_head"]
    yield (
        "saved",
        llama(),
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM"),
    )


@pytest.mark.parametrize(("name", "model", "config"), [pytest.param(*c, id=c[0]) for c in configs()])
def test_merged_weights_give_the_logits_of_peft(name, model, config, models, tmp_path):
    adapted = make_adapter(model, config, tmp_path / "adapter", models / model.config.model_type)
    source, ids = load_source(tmp_path / "adapter"), torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        logits, expected, base = source.module(ids), adapted(input_ids=ids).logits, model(ids).logits
    assert torch.allclose(logits, expected, atol=1e-4)
    assert not torch.allclose(logits, base, atol=1e-1)


def test_merged_adapter_generates_as_peft_does(models, tmp_path):
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = make_adapter(llama(), config, tmp_path / "adapter", models / "llama")
    report = export(load_source(tmp_path / "adapter"), tmp_path / "model.onnx", max_length=32)
    assert report.source == "adapter"
    result = Model.load(tmp_path / "model.onnx", "cpu").generate(PROMPT, max_new_tokens=STEPS)
    ids, logprobs = greedy(adapted, PROMPT, STEPS)
    assert list(result.token_ids) == ids
    assert np.allclose(result.token_logprobs, logprobs, atol=1e-4)


def test_base_is_found_next_to_the_adapter_and_in_the_working_directory(models, tmp_path, monkeypatch):
    adapted = make_adapter(
        t5(), peft.LoraConfig(r=2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"), tmp_path / "a" / "b", "../base"
    )
    shutil.copytree(models / "t5", tmp_path / "a" / "base")
    source = load_source(tmp_path / "a" / "b")
    assert (source.task, source.name) == ("text2text-generation", "b")
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.allclose(expected[name], value) for name, value in source.users_module.state_dict().items())
    monkeypatch.chdir(models)
    settings = tmp_path / "a" / "b" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": "t5"}))
    assert load_source(tmp_path / "a" / "b").name == "b"


def test_classifier_of_the_adapter_goes_onto_an_encoder_without_one(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=40, pad_token_id=0,
    )  # fmt: skip
    encoder = transformers.BertModel(config)
    encoder.save_pretrained(tmp_path / "base")
    classifier = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5).eval()
    lora = peft.LoraConfig(r=2, target_modules=["query", "dense"], task_type="SEQ_CLS")
    adapted = make_adapter(classifier, lora, tmp_path / "adapter", tmp_path / "base")
    report = export(load_source(tmp_path / "adapter"), tmp_path / "model.onnx")
    assert report.task == "text-classification"
    ids = [3, 7, 8, 11]
    scores = Model.load(tmp_path / "model.onnx", "cpu").classify([ids], top_k=None)[0].scores
    expected = adapted(input_ids=torch.tensor([ids])).logits.softmax(-1)[0].detach().numpy()
    assert np.allclose([scores[f"LABEL_{i}"] for i in range(5)], expected, atol=1e-5)


def test_added_tokens_come_with_the_adapter(models, tmp_path):
    larger = copy.deepcopy(llama())
    larger.resize_token_embeddings(27, mean_resizing=False)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = make_adapter(larger, lora, tmp_path / "adapter", models / "llama")
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    source = load_source(tmp_path / "adapter")
    ids = torch.tensor([[1, 25, 26]])
    assert torch.allclose(source.module(ids), adapted(ids).logits, atol=1e-5)


@pytest.fixture
def adapter(models, tmp_path):
    make_adapter(
        llama(),
        peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        tmp_path / "ad",
        models / "llama",
    )
    return tmp_path / "ad"


def change(adapter, **settings):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "no such/folder here"}, "neither a Hugging Face folder nor a hub id"),
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING, which changes no weights and cannot be merged"),
        ({"peft_type": "NO_SUCH_KIND"}, "which PEFT does not know"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "sets megatron_config, with which PEFT"),
        ({"corda_config": {"cache_file": "x.pt"}}, "sets corda_config, with which PEFT"),
        ({"init_lora_weights": "corda"}, "init_lora_weights='corda', which needs the data of its training"),
        ({"target_modules": ["no_such_part"]}, "does not fit its base model: .*no_such_part"),
        ({"target_modules": ["q_proj", "k_proj"]}, "do not fit its base model .*missing: .*k_proj"),
        ({"r": 3}, "does not fit its base model: .*size mismatch"),
        ({"r": 10**9}, "states the rank 1000000000, and no axis of its weights"),
        ({"rank_pattern": {"q_proj": 10**9}}, "states the rank 1000000000, and no axis of its weights"),
        ({"layer_replication": [[0, 2]] * 100_000}, r"more than 1000 \(layer_replication\)"),
        ({"layer_replication": [[0, 10**9], [10**9, 0]]}, r"more than 1000 \(layer_replication\)"),
        ({"peft_type": "SHADOW", "shadow_model": "someone/else"}, "SHADOW, which changes no weights"),
        ({"r": "many"}, "does not fit its base model|that PEFT does not read"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(adapter, settings, message):
    change(adapter, **settings)
    with pytest.raises(SourceError, match=message):
        load_source(adapter)


ENDLESS = "([a-z._0-9]+)+!"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ENDLESS},
        {"exclude_modules": ENDLESS},
        {"exclude_modules": "(.|..)" * 25 + "!"},
        {"rank_pattern": {ENDLESS: 2}},
        {"alpha_pattern": {ENDLESS: 2}},
        {"alpha_pattern": {f"layers.{i}.q_proj": 2 for i in range(100_000)}},
        {"layers_to_transform": [0], "layers_pattern": [ENDLESS]},
        {"modules_to_save": [ENDLESS]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_expressions_that_do_not_end_are_refused(settings, adapter, monkeypatch):
    monkeypatch.setattr(peft_adapter, "MAX_MATCH_SECONDS", 1.0)
    change(adapter, **settings)
    with pytest.raises(
        SourceError, match=rf"expressions in its adapter_config.json \({[*settings][-1]}\) that took more"
    ):
        load_source(adapter)


def test_expressions_of_published_adapters_are_taken(adapter):
    expected = load_source(adapter).module.state_dict()
    parts = "(?:.*?(?:language|text|model).*?(?:self_attn|attention|attn|mlp).*?(?:k_proj|v_proj|q_proj|o_proj).*?)"
    change(adapter, target_modules=rf"(?!.*vision){parts}|(?:\bmodel\.layers\.[\d]{{1,}}\.self_attn\.q_proj)")
    path = adapter / "adapter_config.json"
    expression = json.loads(path.read_text())["target_modules"]
    change(
        adapter,
        target_modules=expression.replace("k_proj|v_proj|q_proj|o_proj", "q_proj"),
        alpha_pattern={"q_[a-z]+": 8},
    )
    found = load_source(adapter).module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_config_of_any_size_is_refused(adapter):
    change(adapter, target_modules=["a"] * 1_000_000)
    with pytest.raises(SourceError, match="bytes, and at most 4,194,304 are read"):
        load_source(adapter)


def test_code_that_the_settings_name_is_not_imported(adapter, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit('this code must not run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    change(
        adapter, auto_mapping={"base_model_class": "Evil", "parent_library": "evil_module"}, megatron_core="evil_module"
    )
    assert load_source(adapter).name == "ad"


def test_pickles_and_damaged_files_are_refused(adapter):
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:50])
    with pytest.raises(SourceError, match=r"adapter_model.safetensors cannot be read"):
        load_source(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(SourceError, match=r"holds no adapter_model.safetensors: its adapter_model.bin is a pickle"):
        load_source(adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(SourceError, match="must hold a JSON object"):
        load_source(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(SourceError, match=r"adapter_config.json cannot be read"):
        load_source(adapter)


def test_merge_that_changes_a_shared_embedding_is_refused(models, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["wte"], task_type="CAUSAL_LM")
    make_adapter(gpt2(), config, tmp_path / "adapter", models / "gpt2")
    with pytest.raises(SourceError, match="computes something else after PEFT has merged it"):
        load_source(tmp_path / "adapter")
