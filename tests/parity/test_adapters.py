"""Files with several LoRA adapters, of which each request chooses one: against PEFT's own models, one per adapter."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import peft
import pytest
import torch
import transformers
from msgspec.structs import replace
from support.hf_models import gpt2, llama, t5
from support.peft_adapters import greedy, make_adapter

from tformer_export import Quantization, export
from tformer_runtime import AsyncModel, Model, OptionError
from tformer_runtime.engine.engine import Engine

STEPS = 12
PROMPTS = ([1, 5, 7, 9], [1, 11], [1, 4, 20, 3, 8, 8, 15], [1, 23, 6], [1, 9, 9], [1, 17, 13, 12, 5])
NAMES = ("base", "wide", "narrow")
TARGETS = {  # other modules for each adapter: a model has layers with both, with one, and with none
    "llama": (["q_proj", "v_proj", "embed_tokens"], ["v_proj", "down_proj", "lm_head"]),
    "gpt2": (["c_attn"], ["c_proj", "wte"]),
    "t5": (["q", "v", "wo"], ["k", "lm_head"]),
}


@dataclass
class File:
    """A file, its source without adapters, and PEFT's models by the names of the adapters."""

    model: Model
    peft: dict[str, Any]

    def expected(self, prompt, name, steps=STEPS):
        return greedy(self.peft[name], prompt, steps)


@pytest.fixture(scope="module", params=["llama", "gpt2", "t5"])
def file(request, tmp_path_factory):
    path, name = tmp_path_factory.mktemp(request.param), request.param
    base = {"llama": llama, "gpt2": gpt2, "t5": t5}[name]()
    wide, narrow = TARGETS[name]
    adapted = {
        "wide": make_adapter(base, peft.LoraConfig(r=5, lora_alpha=8, target_modules=wide), path / "wide", "base"),
        "narrow": make_adapter(
            base,
            peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=narrow, rank_pattern={"v_proj": 3}),
            path / "narrow",
            "base",
            seed=1,
        ),
    }
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    export(base, path / "model.onnx", adapters=[path / "wide", path / "narrow"], max_length=40)
    assert all(torch.equal(before[name], weight) for name, weight in base.state_dict().items())
    return File(Model.load(path / "model.onnx", "cpu"), {"base": base, **adapted})


def test_each_adapter_generates_as_peft_does(file):
    assert file.model.manifest.adapters == ("wide", "narrow")
    chosen = set()
    for name in NAMES:
        for prompt in PROMPTS[:3]:
            result = file.model.generate(prompt, adapter=name, max_new_tokens=STEPS)
            ids, logprobs = file.expected(prompt, name)
            assert list(result.token_ids) == ids
            assert np.allclose(result.token_logprobs, logprobs, atol=2e-4)
        chosen.add(result.token_logprobs)
    assert len(chosen) == len(NAMES)
    assert file.model.generate(PROMPTS[0], max_new_tokens=4) == file.model.generate(
        PROMPTS[0], adapter="base", max_new_tokens=4
    )


def test_requests_of_one_batch_have_adapters_of_their_own(file):
    """More requests than rows, so that rows of other adapters leave and join while the others decode."""
    requests = [(prompt, NAMES[(i + turn) % 3]) for turn in range(3) for i, prompt in enumerate(PROMPTS)]

    async def run():
        async with AsyncModel(file.model, max_batch_size=5) as model:
            return await asyncio.gather(
                *(
                    model.generate(prompt, adapter=name, max_new_tokens=3 + i % 5)
                    for i, (prompt, name) in enumerate(requests)
                )
            )

    for i, (result, (prompt, name)) in enumerate(zip(asyncio.run(run()), requests, strict=True)):
        ids, logprobs = file.expected(prompt, name, 3 + i % 5)
        assert list(result.token_ids) == ids
        assert np.allclose(result.token_logprobs, logprobs, atol=2e-4)


def test_beams_of_one_batch_have_adapters_of_their_own(file):
    requests = [(prompt, name) for prompt in PROMPTS[:2] for name in NAMES]

    async def run():
        async with AsyncModel(file.model, max_batch_size=12) as model:
            options = {"num_beams": 3, "max_new_tokens": 6, "early_stopping": True}
            return await asyncio.gather(*(model.generate(p, adapter=name, **options) for p, name in requests))

    for result, (prompt, name) in zip(asyncio.run(run()), requests, strict=True):
        out = file.peft[name].generate(
            input_ids=torch.tensor([prompt]), num_beams=3, max_new_tokens=6, do_sample=False, early_stopping=True
        )
        skipped = 1 if file.model.manifest.encode else len(prompt)
        ids = out[0, skipped:].tolist()
        assert list(result.token_ids) == ids[: len(result.token_ids)]
        assert set(ids[len(result.token_ids) :]) <= {0}


def test_scores_follow_the_adapter(file):
    target = [4, 8, 15]
    for name in NAMES:
        if file.model.manifest.encode:
            inputs = {"input_ids": torch.tensor([PROMPTS[0]]), "decoder_input_ids": torch.tensor([[1, *target[:-1]]])}
            logits = file.peft[name](**inputs).logits[0]
        else:
            logits = file.peft[name](input_ids=torch.tensor([PROMPTS[0] + target[:-1]])).logits[0, -3:]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None])[:, 0].detach().numpy()
        assert np.allclose(file.model.score(PROMPTS[0], target, adapter=name), expected, atol=2e-4)


@pytest.mark.parametrize("file", ["llama"], indirect=True)
def test_cached_prefix_belongs_to_one_adapter(file):
    prompt = PROMPTS[2]
    for name in NAMES:
        prefix = file.model.cache_prefix(prompt[:4], adapter=name)
        result = file.model.generate(prompt[4:], prefix=prefix, adapter=name, max_new_tokens=STEPS)
        assert list(result.token_ids) == file.expected(prompt, name)[0]
        other = NAMES[(NAMES.index(name) + 1) % 3]
        with pytest.raises(OptionError, match=f"read with the adapter '{name}', and the request has '{other}'"):
            file.model.generate(prompt[4:], prefix=prefix, adapter=other)


@pytest.mark.parametrize("file", ["llama"], indirect=True)
def test_conversation_is_read_again_if_the_adapter_changes(file):
    chat, ids = file.model.chat(), []
    for message, name in (([1, 5], "wide"), ([7], "wide"), ([9, 4], "narrow"), ([3], "base")):
        result = chat.send(message, adapter=name, max_new_tokens=3)
        ids += message
        assert list(result.token_ids) == file.expected(ids, name, 3)[0]
        ids += result.token_ids


@pytest.mark.parametrize("file", ["gpt2"], indirect=True)
def test_speculation_follows_the_adapter(file):
    for name in NAMES:
        result = file.model.generate(PROMPTS[2], adapter=name, prompt_lookup=True, max_new_tokens=STEPS)
        assert list(result.token_ids) == file.expected(PROMPTS[2], name)[0]


def test_unknown_adapter_is_refused_with_the_names(file):
    message = "adapter must be one of base, wide, narrow, not 'wid'"
    for call in (file.model.generate, file.model.score):
        with pytest.raises(OptionError, match=message):
            call(PROMPTS[0], *([[4]] if call == file.model.score else []), adapter="wid")


def test_default_adapter_of_the_file_holds_unless_a_request_names_another(file):
    manifest = replace(file.model.manifest, generation_defaults={"adapter": "narrow"})
    model = Model(Engine(file.model.engine.session, manifest=manifest))
    for options, name in (({}, "narrow"), ({"adapter": "base"}, "base"), ({"adapter": "wide"}, "wide")):
        result = model.generate(PROMPTS[1], max_new_tokens=4, **options)
        assert np.allclose(result.token_logprobs, file.expected(PROMPTS[1], name, 4)[1], atol=2e-4)
        assert np.allclose(model.score(PROMPTS[1], [4], **options), file.model.score(PROMPTS[1], [4], adapter=name))


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        max_position_embeddings=40, pad_token_id=0, initializer_range=0.4,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def test_classifier_switches_adapters(encoder, tmp_path):
    """The pooler and the classifier have no axis of positions."""
    adapted = {
        "base": encoder,
        "a": make_adapter(
            encoder, peft.LoraConfig(r=3, target_modules=["query", "dense", "classifier"]), tmp_path / "a", "base"
        ),
        "b": make_adapter(
            encoder, peft.LoraConfig(r=2, target_modules=["value", "word_embeddings"]), tmp_path / "b", "base", seed=1
        ),
    }
    export(encoder, tmp_path / "model.onnx", adapters={"a": tmp_path / "a", "b": tmp_path / "b"})
    model = Model.load(tmp_path / "model.onnx", "cpu")
    for name, reference in adapted.items():
        results = model.classify(PROMPTS, adapter=name)
        for prompt, result in zip(PROMPTS, results, strict=True):
            expected = reference(input_ids=torch.tensor([prompt])).logits.softmax(-1)[0].detach().numpy()
            assert np.allclose([result.scores[f"LABEL_{i}"] for i in range(3)], expected, atol=1e-5)
    with pytest.raises(OptionError, match="adapter must be one of base, a, b, not 'c'"):
        model.classify(PROMPTS, adapter="c")


def test_low_rank_weights_stay_float_in_a_quantised_file(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).eval()
    lora = peft.LoraConfig(r=32, target_modules=["lm_head", "embed_tokens"])  # 1536 values and more, as matrices have
    adapted = make_adapter(base, lora, tmp_path / "a", "base", size=0.1)
    report = export(
        base,
        tmp_path / "model.onnx",
        adapters=[tmp_path / "a"],
        quantization=Quantization("int8", max_degradation="50%"),
    )
    assert len(report.products) == 5  # two of attention, two of the feed-forward layer, and the output
    stored = {tuple(weight.dims): weight.data_type for weight in onnx.load(tmp_path / "model.onnx").graph.initializer}
    for factor in ((1, 48, 32), (1, 32, 64), (64, 1, 32), (1, 32, 48)):
        assert stored[factor] == onnx.TensorProto.FLOAT
    prompt, model = PROMPTS[2], Model.load(tmp_path / "model.onnx", "cpu")
    for name, reference in (("base", base), ("a", adapted)):
        expected = reference(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1).detach().numpy()
        wanted = expected[np.arange(len(prompt) - 1), prompt[1:]]
        assert np.abs(model.score(prompt, adapter=name) - wanted).max() < 0.1 * np.ptp(expected)


def test_file_without_adapters_names_the_way_to_get_them(tmp_path):
    export(llama(), tmp_path / "model.onnx", max_length=16)
    with pytest.raises(OptionError, match=r"the file holds none: export the model with --adapters FOLDER"):
        Model.load(tmp_path / "model.onnx", "cpu").generate(PROMPTS[0], adapter="a")
