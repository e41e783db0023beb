"""With guesses of any kind, exported files decode what transformers' generate() does, with its own and without."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.families import BY_NAME, END, VOCABULARY

from tformer_runtime import Model
from tformer_runtime.decoding import drafting

LENGTHS = (6, 11, 3, 1)
MOST = 16


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    """Drafts of the size of the model would never pay."""
    monkeypatch.setattr(drafting, "relative_cost", lambda *_: 0.1)


@pytest.mark.parametrize(
    ("name", "other"),
    [("gpt2-sdpa", "llama-sdpa"), ("llama-sdpa", "gpt2-sdpa"), ("marian-eager", "t5-eager"), ("mixtral", "llama-sdpa")],
)
def test_greedy_tokens_equal_generates(exported, name, other):
    """Guesses from what was read, from another model, most of them wrong, and from the same one, all of them right."""
    file, random = exported(name), np.random.default_rng(5)
    family, assistant = file.family, BY_NAME[other].module
    twin = Model.load(file.path, device="cpu", threads=1)
    drafts = {
        "prompt": {"prompt_lookup": True},
        "other": {"draft_model": exported(other).model},
        "twin": {"draft_model": twin},
    }
    came, made = dict.fromkeys(drafts, 0), dict.fromkeys(drafts, 0)
    for length in LENGTHS:
        row = np.concatenate([random.integers(END + 1, VOCABULARY, length)] * 2)
        expected = family.greedy(row, MOST)
        for given in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            assert assisted(family, row, **given) == expected
        for kind, draft in drafts.items():
            result = file.model.generate(row, max_new_tokens=MOST, **draft)
            assert list(result.token_ids) == expected
            came[kind] += result.speculation.accepted
            made[kind] += result.speculation.guessed
    assert came["twin"] == made["twin"] > len(LENGTHS) * MOST / 2
    assert made["other"] > came["other"]


@pytest.mark.parametrize(("quantization", "most"), [("int8", 2), ("int4", 3)])
def test_guesses_stay_within_the_kernels_for_few_tokens(exported, monkeypatch, quantization, most):
    """Beyond, logits are others than without guesses: by 0.1 in the median. Within, they are the same to float32's last
    digits, but where an activation on the edge of two integers is rounded to the other one."""
    file, random = exported("wide-llama", quantization=quantization, optimize_for="latency"), np.random.default_rng(5)
    twin = Model.load(file.path, device="cpu", threads=1)
    step, sizes = file.model.engine.step, []

    def counted(state, tokens, *args, **kwargs):
        sizes.append(tokens.size)
        return step(state, tokens, *args, **kwargs)

    monkeypatch.setattr(file.model.engine, "step", counted)
    moved, equal, steps = [], [], set()
    for length in range(4, 12):
        row = np.concatenate([random.integers(END + 1, VOCABULARY, length)] * 2)
        plain = file.model.generate(row, max_new_tokens=30)
        for draft in ({"prompt_lookup": True}, {"draft_model": twin}):
            del sizes[:]
            result = file.model.generate(row, max_new_tokens=30, **draft)
            pairs = zip(result.token_ids, plain.token_ids, strict=False)
            same = sum(itertools.takewhile(bool, (ours == theirs for ours, theirs in pairs)))
            moved.append(np.abs(np.subtract(result.token_logprobs[:same], plain.token_logprobs[:same])))
            equal.append(result.token_ids == plain.token_ids)
            assert sizes[0] == len(row)
            steps |= set(sizes[1:])
    assert steps == set(range(1, most + 1))
    assert np.median(np.concatenate(moved)) < 1e-5
    assert np.mean(equal) > 0.5


def assisted(family, row, **options):
    ids = torch.from_numpy(row)[None]
    with torch.no_grad():
        found = family.module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, **options
        )[0].tolist()
    return found[len(row) :] if family.decoder_only else found[1:]
