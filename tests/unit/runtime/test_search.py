"""Greedy and beam search against transformers' generate(), and rows against themselves in other company."""

from __future__ import annotations

import itertools

import hf_models as hf
import numpy as np
import pytest

from tformer_runtime.beam import BeamRules, beam_search, best, settled
from tformer_runtime.sampling import greedy
from tformer_runtime.search import Limits, follow, padded, without

SOURCES = [np.array(s) for s in ([5, 6, 7, 8, 9, 2], [4, 2], [20, 11, 19, 2], [13, 13, 2])]
PROMPTS = [np.array(p) for p in ([5, 6, 7, 8, 9], [4], [20, 11, 19], [13, 13])]


def _case(kind: str, rows: list[int], seed: int):
    """The model, the inputs that generate() takes, a stepper over them and its prompts."""
    if kind == "marian":
        model, inputs = hf.marian(seed), [SOURCES[r] for r in rows]
        return model, inputs, hf.HfStepper(model, list(inputs), len(rows)), [np.array([hf.START])] * len(rows)
    model, inputs = hf.gpt2(seed), [PROMPTS[r] for r in rows]
    return model, inputs, hf.HfStepper(model, None, len(rows)), inputs


@pytest.mark.parametrize("kind", ["marian", "gpt2"])
@pytest.mark.parametrize(("most", "least"), [(12, 0), (12, 5), (1, 0), (3, 3)])
def test_greedy_yields_the_tokens_of_generate(kind, most, least):
    model, inputs, stepper, prompts = _case(kind, [0, 1, 2, 3], seed=1)
    ids = [[] for _ in prompts]
    finish = {}
    for token in follow(stepper, prompts, greedy, Limits((hf.END,), [most] * len(prompts), least)):
        ids[token.row].append(token.id)
        assert token.row not in finish
        if token.finish:
            finish[token.row] = token.finish
    for row, given in enumerate(inputs):
        (expected,), _ = hf.generate(model, given, num_beams=1, max_new_tokens=most, min_new_tokens=least or None)
        assert ids[row] == expected
        assert finish[row] == ("end" if expected[-1] == hf.END else "length")


def test_finished_rows_leave_the_batch():
    _, _, stepper, prompts = _case("marian", [0, 1, 2, 3], seed=1)
    lengths = [0] * len(prompts)
    for token in follow(stepper, prompts, greedy, Limits((hf.END,), [3, 9, 5, 7])):
        lengths[token.row] += 1
    assert stepper.calls == [sum(n > i for n in lengths) for i in range(max(lengths))]


BEAMS = [
    {"num_beams": b, "length_penalty": p, "early_stopping": e}
    for b, p, e in itertools.product([2, 4], [1.0, 0.0, -0.7, 2.0], [False, True, "never"])
]


@pytest.mark.parametrize("kind", ["marian", "gpt2"])
@pytest.mark.parametrize("options", BEAMS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_beams_find_the_hypotheses_of_generate(kind, options):
    rules = BeamRules(options["num_beams"], options["length_penalty"], options["early_stopping"])
    model, inputs, stepper, prompts = _case(kind, [0, 1, 2], seed=1 if rules.beams == 2 else 2)
    found = beam_search(stepper, prompts, rules, Limits((hf.END,), [10] * len(prompts)))
    for given, hypotheses in zip(inputs, found, strict=True):
        rows, scores = hf.generate(model, given, max_new_tokens=10, num_return_sequences=rules.beams, **options)
        assert [list(h.ids) for h in hypotheses] == rows
        np.testing.assert_allclose([h.score for h in hypotheses], scores, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "ends", "least"),
    [
        ({"eos_token_id": [hf.END, hf.OTHER_END]}, (hf.END, hf.OTHER_END), 0),
        ({"min_new_tokens": 6}, (hf.END,), 6),
        ({"min_new_tokens": 4, "eos_token_id": [hf.END, hf.OTHER_END]}, (hf.END, hf.OTHER_END), 4),
    ],
)
@pytest.mark.parametrize("kind", ["marian", "gpt2"])
def test_beams_with_several_ends_and_a_minimum(kind, options, ends, least):
    model, inputs, stepper, prompts = _case(kind, [3, 0, 2], seed=3)
    found = beam_search(stepper, prompts, BeamRules(3), Limits(ends, [9] * len(prompts), least))
    for given, hypotheses in zip(inputs, found, strict=True):
        rows, scores = hf.generate(model, given, max_new_tokens=9, num_beams=3, num_return_sequences=3, **options)
        assert [list(h.ids) for h in hypotheses] == rows
        np.testing.assert_allclose([h.score for h in hypotheses], scores, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("early", [False, True, "never"])
def test_a_beam_search_does_not_depend_on_its_neighbours(early):
    rules, most = BeamRules(3, early_stopping=early), [8, 3, 12, 5]
    _, _, stepper, prompts = _case("gpt2", [0, 1, 2, 3], seed=4)
    together = beam_search(stepper, prompts, rules, Limits((hf.END,), most))
    for row in range(4):
        _, _, stepper, prompts = _case("gpt2", [row], seed=4)
        (alone,) = beam_search(stepper, prompts, rules, Limits((hf.END,), [most[row]]))
        assert [h.ids for h in alone] == [h.ids for h in together[row]]


def test_a_hypothesis_tells_why_it_ended_and_adds_up():
    _, _, stepper, prompts = _case("marian", [0, 2], seed=1)
    limits = Limits((hf.END,), [8, 8], stopped=lambda row, ids: ids[-1] == 9)
    for h in itertools.chain(*beam_search(stepper, prompts, BeamRules(4, length_penalty=0.5), limits)):
        expected = "end" if h.ids[-1] == hf.END else "stop" if h.ids[-1] == 9 else "length"
        assert h.finish == expected
        assert len(h.ids) == len(h.logprobs)
        assert (len(h.ids) == 8) or h.finish != "length"
        assert h.score == pytest.approx(sum(h.logprobs) / len(h.ids) ** 0.5, abs=1e-5)


@pytest.mark.parametrize("vocabulary", [3, 255, 256, 257, 1000, 2049, 5000])
def test_best_is_a_sort(vocabulary):
    rng = np.random.default_rng(vocabulary)
    scores = rng.standard_normal((3, 2, vocabulary)).astype(np.float32)
    top, beams, tokens = best(scores, 5)
    for g in range(3):
        order = np.argsort(-scores[g].reshape(-1))[:5]
        np.testing.assert_array_equal(top[g], scores[g].reshape(-1)[order])
        np.testing.assert_array_equal(beams[g] * vocabulary + tokens[g], order)


def test_best_pads_when_there_are_too_few_candidates():
    top, beams, tokens = best(np.zeros((1, 1, 3), np.float32), 8)
    assert np.isfinite(top).sum() == 3
    assert (tokens < 3).all()
    assert (beams == 0).all()


def test_children_stay_in_their_parents_rows():
    parents = np.array([2, 0, 2, 1, 0, 0])
    order = settled(np.array([0, 1, 2]), parents, width=3)
    assert parents[order].tolist() == [0, 2, 2]
    assert settled(np.array([0, 1, 2]), np.zeros(6, int), width=1).tolist() == [0, 1, 2]


def test_gaps_are_filled_from_the_end():
    assert without(6, {1, 4}).tolist() == [0, 5, 2, 3]
    assert without(3, {0, 1, 2}).tolist() == []
    assert without(3, set()).tolist() == [0, 1, 2]


def test_padded_keeps_each_rows_length():
    tokens, counts = padded([np.array([1, 2, 3]), np.array([4])])
    assert tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert counts.tolist() == [3, 1]
