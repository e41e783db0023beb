"""Beam search and logit rules over exported files give the hypotheses and scores of transformers' generate()."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import END, VOCABULARY

LENGTHS = (6, 11, 3, 1, 8)


def expected(family, row, **options):
    """Return the ids and scores of the hypotheses of generate() for a single row."""
    output = generate_by_transformers(family, row, **options)
    return generated_ids(family, row, output), output.sequences_scores.numpy()


def generate_by_transformers(family, row, **options):
    """Return the output of generate() for a single row."""
    with torch.no_grad():
        return family.module.generate(
            torch.from_numpy(row)[None],
            attention_mask=torch.ones(1, len(row), dtype=torch.long),
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )


def generated_ids(family, row, output):
    """Return the generated ids of each sequence, up to the end token."""
    prompt = len(row) if family.decoder_only else 1
    return [truncate_at_end(ids[prompt:]) for ids in output.sequences.tolist()]


def truncate_at_end(ids: list[int]) -> list[int]:
    """Return the ids up to the first end token."""
    return ids[: ids.index(END) + 1] if END in ids else ids


@pytest.mark.parametrize("batch_size", [32, 2])
@pytest.mark.parametrize("name", ["marian-eager", "gpt2-sdpa"])
def test_beam_search_matches_generate(exported, name, batch_size):
    """All rows decode at once, and two at a time, so that rows join a running batch."""
    file = exported(name)
    rng = np.random.default_rng(5)
    rows = [rng.integers(END + 1, VOCABULARY, length) for length in LENGTHS]
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12, "length_penalty": 0.7}
    results = list(file.model.generate_batch(rows, batch_size=batch_size, **options))
    for row, result in zip(rows, results, strict=True):
        ids, scores = expected(
            file.family, row, num_beams=4, num_return_sequences=2, max_new_tokens=12, length_penalty=0.7
        )
        hypotheses = [result, *result.alternatives]
        assert [list(r.token_ids) for r in hypotheses] == ids
        # A score is a sum of a dozen log-probabilities, each with an error of some 1e-6.
        np.testing.assert_allclose([r.score for r in hypotheses], scores, atol=1e-4)
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
@pytest.mark.parametrize(("options", "transformers_options"), RULES)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_logit_rules_match_generate(exported, name, options, transformers_options, num_beams):
    file = exported(name)
    rng = np.random.default_rng(6)
    rows = [rng.integers(END + 1, VOCABULARY, length) for length in LENGTHS]
    results = file.model.generate_batch(rows, batch_size=2, num_beams=num_beams, max_new_tokens=10, **options)
    for row, result in zip(rows, results, strict=True):
        output = generate_by_transformers(
            file.family, row, num_beams=num_beams, max_new_tokens=10, **transformers_options
        )
        expected_ids, *_ = generated_ids(file.family, row, output)
        assert list(result.token_ids) == expected_ids
