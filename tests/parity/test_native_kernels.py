"""Files with float32 products on native kernels: results near those of onnxruntime's operators, rows on their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import peft
import pytest
import torch
import transformers
from support.families import PAD, VOCABULARY
from support.native_products import PATHS, native_operators, requires_kernels
from support.peft_adapters import greedy, make_adapter

from tformer_export import export
from tformer_runtime import AsyncModel, Model
from tformer_runtime.backend.native_kernels import OFF, VARIABLE
from tformer_runtime.engine.engine import Engine
from tformer_runtime.rewriting.attention_rewrite import ATTENTION, CONTEXT_ATTENTION
from tformer_runtime.rewriting.float_product import FLOAT_PRODUCTS
from tformer_runtime.rewriting.product_rewrite import FLOAT_OPERATOR

BATCHES, STEPS = (1, 2, 3, 5, 8, 13, 21, 33), 2


# -- rows and batches -------------------------------------------------------------------------------------------------


@dataclass
class Row:
    source: np.ndarray
    prompt: np.ndarray
    more: np.ndarray


def draw(length):
    random = np.random.default_rng(length)
    source = 1 + 7 * length % 19  # lengths in another order than those of the prompts
    return Row(*(random.integers(3, VOCABULARY - 6, n) for n in (source, length, STEPS)))


def logits_of(engine, request, rows):
    """Return the logits of each row, those of its prompt and of single steps after it: (tokens, vocabulary)."""
    counts = np.array([len(row.prompt) for row in rows])
    chunk = np.full((len(rows), counts.max()), PAD)
    for i, row in enumerate(rows):
        chunk[i, : counts[i]] = row.prompt
    state = engine.start({request: [row.source for row in rows]} if request else None, len(rows))
    logits = engine.step(state, chunk, counts, logit_positions="all").copy()
    steps = [engine.step(state, np.array([[row.more[k]] for row in rows])).copy() for k in range(STEPS)]
    return [np.stack([*logits[i, :count], *(step[i] for step in steps)]) for i, count in enumerate(counts)]


@requires_kernels
@pytest.mark.parametrize("name", ["wide-llama", "wide-seq2seq"])
def test_row_has_the_same_bits_alone_and_in_any_batch(exported, monkeypatch, name):
    """Each prompt has another length, and sources have many lengths."""
    file = exported(name)
    operators = native_operators(file.path)
    assert operators & {FLOAT_OPERATOR, *FLOAT_PRODUCTS} == {FLOAT_OPERATOR}
    assert not operators & {ATTENTION, CONTEXT_ATTENTION}
    monkeypatch.setenv(VARIABLE, PATHS[0])  # all paths have the same bits
    engine = Engine(file.path, device="cpu", threads=2)
    lengths = np.random.default_rng(0).permutation(BATCHES[-1]) + 1
    rows = [draw(length) for length in lengths]
    alone = [logits_of(engine, file.family.request, [row])[0] for row in rows]
    for count in BATCHES:
        for actual, expected in zip(logits_of(engine, file.family.request, rows[:count]), alone, strict=False):
            np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))
    assert len({logits.tobytes() for logits in alone}) == BATCHES[-1]


# -- files of other forms ---------------------------------------------------------------------------------------------

WIDTH, INNER, IDS, RANK = 48, 96, 64, 32
NAMES = ("base", "a", "b")
PROMPTS = ([1, 5, 7, 9], [1, 11], [1, 4, 20, 3, 8, 8, 15], [1, 33, 6])
# Of the range of logits. A result passes 7 products, of which the longest sums have INNER terms. A sum of K terms is
# off by at most K · 2⁻²⁴ of their magnitudes, on either side.
TOLERANCE = 2 * 7 * INNER * 2.0**-24


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Return the file of a Llama with two adapters, and PEFT's models."""
    path = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=IDS, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).eval()
    configs = {
        "a": peft.LoraConfig(r=RANK, target_modules=["q_proj", "lm_head", "embed_tokens"]),
        "b": peft.LoraConfig(r=RANK, target_modules=["v_proj", "down_proj"]),
    }
    models = {name: make_adapter(base, config, path / name, "base", size=0.1) for name, config in configs.items()}
    export(base, path / "model.onnx", adapters=[path / name for name in configs], max_length=40)
    return path / "model.onnx", {"base": base, **models}


@requires_kernels
def test_adapters_of_a_batch_are_as_in_peft_with_and_without_kernels(adapters, monkeypatch):
    """The low-rank factors are gathered for each row: these products stay with onnxruntime."""
    path, models = adapters
    assert native_operators(path) >= {FLOAT_OPERATOR, "MatMul"}
    requests = [(prompt, name) for prompt in PROMPTS for name in NAMES]
    results = {}

    async def generate(model):
        async with AsyncModel(model, max_batch_size=5) as shared:
            return await asyncio.gather(
                *(shared.generate(prompt, adapter=name, max_new_tokens=8) for prompt, name in requests)
            )

    for kernels in (OFF, *PATHS):
        monkeypatch.setenv(VARIABLE, kernels)
        model = Model.load(path, "cpu", threads=1)
        assert (model.engine.session.kernels is None) == (kernels == OFF)
        results[kernels] = asyncio.run(generate(model))
    for of_kernels in results.values():
        for (prompt, name), actual, peer in zip(requests, of_kernels, results[OFF], strict=True):
            ids, logprobs = greedy(models[name], prompt, 8)
            assert list(actual.token_ids) == ids
            scale = np.ptp(models[name](input_ids=torch.tensor([prompt])).logits.detach().numpy())
            np.testing.assert_allclose(actual.token_logprobs, logprobs, rtol=0, atol=TOLERANCE * scale)
            np.testing.assert_allclose(actual.token_logprobs, peer.token_logprobs, rtol=0, atol=TOLERANCE * scale)
