"""Beam search over an exported file finds the hypotheses of transformers' generate(), with their scores."""

from __future__ import annotations

import numpy as np
import torch
from families import END, VOCABULARY


def test_beams_equal_generate(exported):
    file = exported("marian-sdpa")
    random = np.random.default_rng(5)
    rows = [random.integers(END + 1, VOCABULARY, length) for length in (6, 11, 3)]
    results = list(file.model.generate_batch(rows, beam_size=4, num_return=2, max_new_tokens=12))
    for row, result in zip(rows, results, strict=True):
        with torch.no_grad():
            expected = file.family.module.generate(
                torch.from_numpy(row)[None],
                attention_mask=torch.ones(1, len(row), dtype=torch.long),
                num_beams=4,
                num_return_sequences=2,
                do_sample=False,
                max_new_tokens=12,
                output_scores=True,
                return_dict_in_generate=True,
            )
        found = [result, *result.alternatives]
        assert [list(r.token_ids) for r in found] == [cut(ids[1:]) for ids in expected.sequences.tolist()]
        # Sums of a dozen log-probabilities, each wrong by some 1e-6.
        np.testing.assert_allclose([r.score for r in found], expected.sequences_scores.numpy(), atol=1e-4)
    assert len({r.token_ids for result in results for r in (result, *result.alternatives)}) == 6


def cut(ids: list[int]) -> list[int]:
    return ids[: ids.index(END) + 1] if END in ids else ids
