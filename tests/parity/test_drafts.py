"""With guesses of any kind, exported files decode what transformers' generate() does, with its own and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import BY_NAME, END, VOCABULARY

from tformer_runtime import Model, guesses

LENGTHS = (6, 11, 3, 1)
MOST = 16


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    """Drafts of the size of the model would never pay."""
    monkeypatch.setattr(guesses, "relative_cost", lambda *_: 0.1)


@pytest.mark.parametrize(
    ("name", "other"),
    [("gpt2-sdpa", "llama-sdpa"), ("llama-sdpa", "gpt2-sdpa"), ("marian-eager", "t5-eager"), ("mixtral", "llama-sdpa")],
)
def test_greedy_tokens_equal_generates(exported, name, other):
    """Guesses from what was read, from another model, most of them wrong, and from the same one, all of them right."""
    file, random = exported(name), np.random.default_rng(5)
    family, assistant = file.family, BY_NAME[other].module
    twin = Model.load(file.path, device="cpu", threads=1)
    drafts = {"prompt": "prompt", "other": exported(other).model, "twin": twin}
    came, made = dict.fromkeys(drafts, 0), dict.fromkeys(drafts, 0)
    for length in LENGTHS:
        row = np.concatenate([random.integers(END + 1, VOCABULARY, length)] * 2)
        expected = family.greedy(row, MOST)
        for given in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            assert assisted(family, row, **given) == expected
        for kind, draft in drafts.items():
            result = file.model.generate(row, max_new_tokens=MOST, draft=draft)
            assert list(result.token_ids) == expected
            came[kind] += result.speculation.accepted
            made[kind] += result.speculation.guessed
    assert came["twin"] == made["twin"] > len(LENGTHS) * MOST / 2
    assert made["other"] > came["other"]


def assisted(family, row, **options):
    ids = torch.from_numpy(row)[None]
    with torch.no_grad():
        found = family.module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, **options
        )[0].tolist()
    return found[len(row) :] if family.decoder_only else found[1:]
