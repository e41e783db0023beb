"""Speculative decoding of exported files gives the tokens of transformers' generate(), with and without assistance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.families import BY_NAME, END, VOCABULARY

from tformer_runtime import Model
from tformer_runtime.decoding import drafting
from tformer_runtime.engine.engine import Engine

LENGTHS = (6, 11, 3, 1)
MAX_NEW_TOKENS = 16


@pytest.fixture(autouse=True)
def _cheap_drafts(monkeypatch):
    """Lower the relative cost of drafts: a draft of the model's size would be disabled."""
    monkeypatch.setattr(drafting, "relative_cost", lambda *_: 0.1)


@pytest.mark.parametrize(
    ("name", "other_name"),
    [("gpt2-sdpa", "llama-sdpa"), ("llama-sdpa", "gpt2-sdpa"), ("marian-eager", "t5-eager"), ("mixtral", "llama-sdpa")],
)
def test_speculative_greedy_tokens_match_generate(exported, name, other_name):
    """Drafts come from the prompt, from another model with mostly wrong guesses, and from the same model."""
    file, rng = exported(name), np.random.default_rng(5)
    family, assistant = file.family, BY_NAME[other_name].module
    twin = Model.load(file.path, device="cpu", threads=1)
    drafts = {
        "prompt": {"prompt_lookup": True},
        "other": {"draft_model": exported(other_name).model},
        "twin": {"draft_model": twin},
    }
    num_accepted, num_guessed = dict.fromkeys(drafts, 0), dict.fromkeys(drafts, 0)
    for length in LENGTHS:
        row = np.concatenate([rng.integers(END + 1, VOCABULARY, length)] * 2)
        expected = family.greedy(row, MAX_NEW_TOKENS)
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            assert assisted_generate(family, row, **options) == expected
        for kind, draft in drafts.items():
            result = file.model.generate(row, max_new_tokens=MAX_NEW_TOKENS, **draft)
            assert list(result.token_ids) == expected
            num_accepted[kind] += result.speculation.accepted
            num_guessed[kind] += result.speculation.guessed
    assert num_accepted["twin"] == num_guessed["twin"] > len(LENGTHS) * MAX_NEW_TOKENS / 2
    assert num_guessed["other"] > num_accepted["other"]


@pytest.mark.parametrize(("quantization", "max_tokens"), [("int8", 2), ("int4", 3)])
def test_steps_with_drafts_stay_within_the_kernels_for_few_tokens(exported, monkeypatch, quantization, max_tokens):
    """With more tokens in a step, logits differ from logits of single steps by 0.1 in the median.

    Within the limit they are equal up to float32 rounding, except where an activation rounds to the other integer.
    """
    file, rng = exported("wide-llama", quantization=quantization, optimize_for="latency"), np.random.default_rng(5)
    model, twin = (Model(Engine(file.path, "cpu", threads=1, native_kernels=False)) for _ in range(2))
    step, sizes = model.engine.step, []

    def record_size(state, tokens, *args, **kwargs):
        sizes.append(tokens.size)
        return step(state, tokens, *args, **kwargs)

    monkeypatch.setattr(model.engine, "step", record_size)
    logprob_differences, equal, step_sizes = [], [], set()
    for length in range(4, 12):
        row = np.concatenate([rng.integers(END + 1, VOCABULARY, length)] * 2)
        plain = model.generate(row, max_new_tokens=30)
        for draft in ({"prompt_lookup": True}, {"draft_model": twin}):
            del sizes[:]
            result = model.generate(row, max_new_tokens=30, **draft)
            pairs = zip(result.token_ids, plain.token_ids, strict=False)
            num_equal = sum(itertools.takewhile(bool, (actual == expected for actual, expected in pairs)))
            logprob_differences.append(
                np.abs(np.subtract(result.token_logprobs[:num_equal], plain.token_logprobs[:num_equal]))
            )
            equal.append(result.token_ids == plain.token_ids)
            assert sizes[0] == len(row)
            step_sizes |= set(sizes[1:])
    assert step_sizes == set(range(1, max_tokens + 1))
    assert np.median(np.concatenate(logprob_differences)) < 1e-5
    assert np.mean(equal) > 0.5


def assisted_generate(family, row, **options):
    """Return the greedy ids of generate() with an assistant."""
    ids = torch.from_numpy(row)[None]
    with torch.no_grad():
        sequence = family.module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            **options,
        )[0].tolist()
    return sequence[len(row) :] if family.decoder_only else sequence[1:]
