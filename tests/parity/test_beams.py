"""Beam search over exported files finds the hypotheses of transformers' generate(), with their scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import END, VOCABULARY

LENGTHS = (6, 11, 3, 1, 8)


def expected(family, row, **options):
    """generate() for one row alone: generated ids, and scores."""
    found = generated(family, row, **options)
    return own_ids(family, row, found), found.sequences_scores.numpy()


def generated(family, row, **options):
    with torch.no_grad():
        return family.module.generate(
            torch.from_numpy(row)[None],
            attention_mask=torch.ones(1, len(row), dtype=torch.long),
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )


def own_ids(family, row, found):
    """The generated ids of each sequence, up to an end token."""
    prompt = len(row) if family.decoder_only else 1
    return [cut(ids[prompt:]) for ids in found.sequences.tolist()]


def cut(ids: list[int]) -> list[int]:
    return ids[: ids.index(END) + 1] if END in ids else ids


@pytest.mark.parametrize("batch_size", [32, 2])
@pytest.mark.parametrize("name", ["marian-eager", "gpt2-sdpa"])
def test_beams_equal_generate(exported, name, batch_size):
    """All rows at once, and two at a time, which others then join."""
    file = exported(name)
    random = np.random.default_rng(5)
    rows = [random.integers(END + 1, VOCABULARY, length) for length in LENGTHS]
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12, "length_penalty": 0.7}
    results = list(file.model.generate_batch(rows, batch_size=batch_size, **options))
    for row, result in zip(rows, results, strict=True):
        ids, scores = expected(
            file.family, row, num_beams=4, num_return_sequences=2, max_new_tokens=12, length_penalty=0.7
        )
        found = [result, *result.alternatives]
        assert [list(r.token_ids) for r in found] == ids
        # Sums of a dozen log-probabilities, each wrong by some 1e-6.
        np.testing.assert_allclose([r.score for r in found], scores, atol=1e-4)
    assert len({r.token_ids for result in results for r in (result, *result.alternatives)}) > 1.5 * len(rows)


RULES = [
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ({"no_repeat_ngram_size": 2, "min_new_tokens": 7}, {"no_repeat_ngram_size": 2, "min_new_tokens": 7}),
    (
        {"bad_words_ids": [[5], [9, 10]], "suppress_tokens": [7]},
        {"bad_words_ids": [[5], [9, 10]], "suppress_tokens": [7]},
    ),
]


@pytest.mark.parametrize("name", ["marian-eager", "gpt2-sdpa"])
@pytest.mark.parametrize(("ours", "theirs"), RULES)
@pytest.mark.parametrize("beams", [1, 3])
def test_rules_equal_generates(exported, name, ours, theirs, beams):
    file = exported(name)
    random = np.random.default_rng(6)
    rows = [random.integers(END + 1, VOCABULARY, length) for length in LENGTHS]
    results = file.model.generate_batch(rows, batch_size=2, num_beams=beams, max_new_tokens=10, **ours)
    for row, result in zip(rows, results, strict=True):
        given = {"num_beams": beams, "max_new_tokens": 10, **theirs}
        found, *_ = own_ids(file.family, row, generated(file.family, row, **given))
        assert list(result.token_ids) == found
