"""Decoding equals transformers' generate(), token for token, with each option and with many options together."""

from __future__ import annotations

import itertools
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from support import hf_models as hf

from tformer_runtime.decoding.beam_ranking import best
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.row_placement import pad_rows, place_rows
from tformer_runtime.decoding.rules.logit_rules import make_rules
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.format.manifest import SpecialTokens

SOURCES = [np.array(s) for s in ([5, 6, 7, 8, 9, 2], [4, 2], [20, 11, 19, 2], [13, 13, 2])]
PROMPTS = [np.array(p) for p in ([5, 6, 7, 8, 9], [4], [20, 11, 19], [13, 13])]
MODELS = {"marian": hf.marian, "t5": hf.t5, "gpt2": hf.gpt2, "llama": hf.llama}
ENCODED = ("marian", "t5")
KINDS = pytest.mark.parametrize("kind", list(MODELS))


def tasks_for(kind, rows, ends=(hf.END,), max_tokens=None, **options):
    """Return tasks for the rows of a model, and the input of generate() for each."""
    settings = Settings.of(GenerationOptions(**options), {})
    special = SpecialTokens((hf.START,), tuple(ends), hf.PAD)
    rules = make_rules(settings, special, hf.VOCABULARY)
    tasks, inputs = [], []
    for i, row in enumerate(rows):
        given = SOURCES[row] if kind in ENCODED else PROMPTS[row]
        prompt = np.array([hf.START]) if kind in ENCODED else given
        sources = {"src": given} if kind in ENCODED else {}
        limit = settings.max_new_tokens if max_tokens is None else max_tokens[i]
        tasks.append(SequenceTask(i, prompt, limit, settings, tuple(ends), rules, sources=sources))
        inputs.append(given)
    return tasks, inputs


def run(scheduler, tasks):
    """Run the tasks to their ends."""
    for task in tasks:
        scheduler.submit(task)
    while not scheduler.idle:
        scheduler.step()


def decoded(model, tasks, rows=32):
    """Decode tasks in one batch; return their hypotheses and the starter."""
    starter = hf.HfStarter(model)
    run(Scheduler(starter, rows), tasks)
    for task in tasks:
        assert task.error is None, task.error
    return [task.hypotheses for task in tasks], starter


def same_as_generate(kind, rows, seed, theirs, ends=(hf.END,), **ours):
    model = MODELS[kind](seed)
    tasks, inputs = tasks_for(kind, rows, ends, **ours)
    actual, _ = decoded(model, tasks)
    beams = ours.get("num_beams", 1)
    lengths = set()
    for given, hypotheses in zip(inputs, actual, strict=True):
        options = {"max_new_tokens": ours["max_new_tokens"], "num_beams": beams, **theirs}
        if beams > 1:
            options["num_return_sequences"] = ours.get("num_return_sequences", 1)
        expected, scores = hf.generate(model, given, **options)
        if beams > 1:
            np.testing.assert_allclose([h.score for h in hypotheses], scores, rtol=1e-6, atol=1e-5)
            # Rounding decides the order of hypotheses with equal scores, and which of them is the last.
            within = range(max(1, len(scores) - 1))
            clear = [i for i in within if all(abs(scores[i] - s) > 2e-5 for s in np.delete(scores, i))]
            assert [list(hypotheses[i].ids) for i in clear] == [expected[i] for i in clear]
        else:
            assert [list(h.ids) for h in hypotheses] == expected
        lengths.add(len(hypotheses[0].ids))
    return lengths


@KINDS
@pytest.mark.parametrize(("max_tokens", "min_tokens"), [(12, 0), (12, 5), (1, 0), (3, 3)])
def test_greedy_tokens_equal_generate(kind, max_tokens, min_tokens):
    same_as_generate(
        kind,
        [0, 1, 2, 3],
        1,
        {"min_new_tokens": min_tokens or None},
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
    )


BEAMS = [
    {"num_beams": b, "length_penalty": p, "early_stopping": e}
    for b, p, e in itertools.product([2, 4], [1.0, 0.0, -0.7, 2.0], [False, True, "never"])
]


@pytest.mark.parametrize("kind", ["marian", "gpt2"])
@pytest.mark.parametrize("options", BEAMS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_beam_hypotheses_equal_generate(kind, options):
    theirs = {"length_penalty": options["length_penalty"], "early_stopping": options["early_stopping"]}
    seed = 1 if options["num_beams"] == 2 else 2
    same_as_generate(
        kind, [0, 1, 2], seed, theirs, max_new_tokens=10, num_return_sequences=options["num_beams"], **options
    )


@pytest.mark.parametrize("kind", ["t5", "llama"])
@pytest.mark.parametrize("early", [False, True, "never"])
def test_beam_hypotheses_of_other_models_equal_generate(kind, early):
    theirs = {"early_stopping": early}
    same_as_generate(
        kind, [3, 0, 2], 5, theirs, max_new_tokens=12, num_beams=3, num_return_sequences=3, early_stopping=early
    )


@pytest.mark.parametrize(
    ("theirs", "ends", "min_tokens"),
    [
        ({"eos_token_id": [hf.END, hf.OTHER_END]}, (hf.END, hf.OTHER_END), 0),
        ({"min_new_tokens": 6}, (hf.END,), 6),
        ({"min_new_tokens": 4, "eos_token_id": [hf.END, hf.OTHER_END]}, (hf.END, hf.OTHER_END), 4),
    ],
)
@KINDS
def test_beams_with_several_end_tokens_and_a_minimum_equal_generate(kind, theirs, ends, min_tokens):
    same_as_generate(
        kind,
        [3, 0, 2],
        3,
        theirs,
        ends,
        max_new_tokens=9,
        num_beams=3,
        num_return_sequences=3,
        min_new_tokens=min_tokens,
    )


# (our options, the options of generate())
RULES = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "encouraged": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "ngrams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "suppressed": ({"suppress_tokens": [5, 9, 13]}, {"suppress_tokens": [5, 9, 13]}),
    "not first": ({"begin_suppress_tokens": [hf.END, 7, 8]}, {"begin_suppress_tokens": [hf.END, 7, 8]}),
    "bad words": ({"bad_words_ids": [[6], [11, 12], [5, 5]]}, {"bad_words_ids": [[6], [11, 12], [5, 5]]}),
    "biased": ({"logit_bias": {4: 2.0, 10: -3.0}}, {"sequence_bias": {(4,): 2.0, (10,): -3.0}}),
    "least": ({"min_new_tokens": 4}, {"min_new_tokens": 4}),
}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "short beams": {"num_beams": 2, "length_penalty": 0.4},
}


@KINDS
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("rule", list(RULES))
def test_each_rule_equals_generate(kind, way, rule):
    ours, theirs = RULES[rule]
    penalty = {"length_penalty": WAYS[way]["length_penalty"]} if "length_penalty" in WAYS[way] else {}
    same_as_generate(kind, [1, 0, 2], 4, {**theirs, **penalty}, max_new_tokens=10, **ours, **WAYS[way])


@KINDS
@pytest.mark.parametrize("draw", range(6))
def test_rules_together_equal_generate(kind, draw):
    chosen = random.Random(draw).sample([r for r in RULES if r != "encouraged"], 4)
    ours = {name: value for rule in chosen for name, value in RULES[rule][0].items()}
    theirs = {name: value for rule in chosen for name, value in RULES[rule][1].items()}
    way = [{}, {"num_beams": 2, "num_return_sequences": 2}, {"num_beams": 4, "num_return_sequences": 4}][draw % 3]
    same_as_generate(kind, [0, 3, 1], draw, theirs, max_new_tokens=11, **ours, **way)


@pytest.mark.parametrize("kind", ["marian", "t5"])
@pytest.mark.parametrize("beams", [1, 3])
def test_forced_first_token_equals_generate(kind, beams):
    same_as_generate(
        kind, [0, 1, 2], 2, {"forced_bos_token_id": 9}, max_new_tokens=8, forced_bos_token_id=9, num_beams=beams
    )


@pytest.mark.parametrize("early", [False, True, "never"])
def test_beam_search_is_independent_of_its_batch(early):
    options = {"num_beams": 3, "num_return_sequences": 3, "early_stopping": early, "max_new_tokens": 12}
    max_tokens, model = [8, 3, 12, 5], hf.gpt2(4)
    together, _ = decoded(model, tasks_for("gpt2", [0, 1, 2, 3], max_tokens=max_tokens, **options)[0])
    for row in range(4):
        ((*alone,),), _ = decoded(model, tasks_for("gpt2", [row], max_tokens=[max_tokens[row]], **options)[0])
        assert [h.ids for h in alone] == [h.ids for h in together[row]]


def test_patience_waits_for_more_hypotheses():
    """Search continues for more complete hypotheses, so the best is never worse, and sometimes better."""
    better = []
    for seed in range(6):
        plain = {"max_new_tokens": 12, "num_beams": 3, "early_stopping": True, "length_penalty": 2.0}
        first, _ = decoded(hf.marian(seed), tasks_for("marian", [0, 1, 2], **plain)[0])
        patient, _ = decoded(hf.marian(seed), tasks_for("marian", [0, 1, 2], **plain, patience=3.0)[0])
        better += [b[0].score - a[0].score for a, b in zip(first, patient, strict=True)]
    assert min(better) >= 0
    assert max(better) > 0


def diverse(model, source, groups, beams, penalty, max_tokens):
    """Diverse beam search (Vijayakumar et al. 2016, algorithm 1) of one prompt without end tokens: at each step
    the groups choose one after the other, tokens chosen by those before made less likely."""
    size = beams // groups
    state = [[([hf.START], 0.0)] for _ in range(groups)]
    for _ in range(max_tokens):
        taken = np.zeros(hf.VOCABULARY)
        for g in range(groups):
            options = []
            for ids, score in state[g]:
                logits = hf.HfRows(model, [source], [ids]).logits()[0].astype(np.float64)
                logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                logprobs[hf.END] = -np.inf
                options += [(score + lp - penalty * taken[t], [*ids, t]) for t, lp in enumerate(logprobs)]
            options.sort(key=lambda o: -o[0])
            state[g] = [(ids, score) for score, ids in options[:size]]
            for ids, _ in state[g]:
                taken[ids[-1]] += 1
    return sorted(((score, ids[1:]) for group in state for ids, score in group), key=lambda o: -o[0])


@pytest.mark.parametrize(("groups", "penalty"), [(2, 0.5), (4, 1.5), (2, 0.0)])
def test_diverse_beam_search_equals_the_published_algorithm(groups, penalty):
    model, max_tokens = hf.marian(3), 5
    options = {
        "num_beams": 4,
        "num_return_sequences": 4,
        "num_beam_groups": groups,
        "max_new_tokens": max_tokens,
        "length_penalty": 0.0,
    }
    tasks, inputs = tasks_for("marian", [0, 2], suppress_tokens=[hf.END], diversity_penalty=penalty, **options)
    for task, source, actual in zip(tasks, inputs, decoded(model, tasks)[0], strict=True):
        expected = diverse(model, source, groups, 4, penalty, max_tokens)
        np.testing.assert_allclose([h.score for h in actual], [score for score, _ in expected], atol=1e-4)
        assert sorted(h.ids for h in actual) == sorted(tuple(ids) for _, ids in expected)
        assert task.error is None


def test_scores_equal_the_sums_of_log_probabilities():
    tasks, _ = tasks_for(
        "marian", [0, 2], max_new_tokens=8, num_beams=4, num_return_sequences=4, length_penalty=0.5, top_logprobs=3
    )
    tasks += tasks_for("marian", [0, 2], max_new_tokens=8, top_logprobs=3)[0]
    for actual in decoded(hf.marian(1), tasks)[0]:
        for h in actual:
            penalty = 0.5 if len(actual) > 1 else 1.0
            assert h.finish == ("end" if h.ids[-1] == hf.END else "length")
            assert len(h.ids) == len(h.logprobs) == len(h.alternatives)
            assert h.score == pytest.approx(sum(h.logprobs) / len(h.ids) ** penalty, abs=1e-5)
            for token, logprob, likely in zip(h.ids, h.logprobs, h.alternatives, strict=True):
                assert len(likely) == 3
                assert [p for _, p in likely] == sorted((p for _, p in likely), reverse=True)
                assert dict(likely).get(token, -np.inf) in (-np.inf, pytest.approx(logprob, abs=1e-5))
                assert likely[0][1] >= logprob - 1e-6


def test_options_that_allow_no_token_are_an_error():
    tasks, _ = tasks_for("gpt2", [0], max_new_tokens=4, suppress_tokens=list(range(hf.VOCABULARY)), num_beams=2)
    scheduler = Scheduler(hf.HfStarter(hf.gpt2(0)))
    scheduler.submit(tasks[0])
    while not scheduler.idle:
        scheduler.step()
    assert "leave no token that may come next" in str(tasks[0].error)


@pytest.mark.parametrize("columns", [6, 255, 640, 641, 1000, 5121, 12000])
def test_best_candidates_equal_a_sort(columns):
    rng = np.random.default_rng(columns)
    scores = rng.standard_normal((3, columns)).astype(np.float32)
    scores[1] = np.round(scores[1])  # many equal scores
    top, picks = best(scores, 5)
    for row in range(3):
        order = np.argsort(-scores[row], kind="stable")[:5]
        np.testing.assert_array_equal(top[row], scores[row][order])
        np.testing.assert_array_equal(picks[row], order)


def test_best_candidates_are_padded_if_there_are_too_few():
    top, picks = best(np.zeros((1, 3), np.float32), 6)
    assert np.isfinite(top[0]).sum() == 3
    assert sorted(picks[0, :3].tolist()) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_hypotheses_take_the_rows_of_their_parents(seed):
    rng = np.random.default_rng(seed)
    present, count = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    parents = rng.integers(0, present, count)
    places, order = place_rows(parents)
    assert sorted(places.tolist()) == list(range(count))
    np.testing.assert_array_equal(order[places], parents)
    assert int((order == np.arange(count)).sum()) == len({p for p in parents.tolist() if p < count})


@hypothesis.given(st.data())
def test_rows_of_a_request_are_adjacent(data):
    size, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    present = data.draw(st.permutations(range(2 * count)))  # some requests have one row yet, and some are finished
    requests = np.concatenate([[r] * data.draw(st.sampled_from([1, size])) for r in present])
    stay = data.draw(st.permutations(range(2 * count)))[:count]
    parents = np.array([data.draw(st.sampled_from(np.flatnonzero(requests == r))) for r in stay for _ in range(size)])
    parents = parents[data.draw(st.permutations(range(len(parents))))]
    places, order = place_rows(parents, requests)
    assert sorted(places.tolist()) == list(range(len(parents)))
    np.testing.assert_array_equal(order[places], parents)
    blocks = requests[order].reshape(count, size)
    assert (blocks == blocks[:, :1]).all()
    if requests[: len(parents)].tolist() == requests[order].tolist():  # all rows stay: only copies move
        assert int((order == np.arange(len(parents))).sum()) == len(set(parents.tolist()))


@pytest.mark.parametrize(("counts", "size"), [([1, 1, 1, 1, 1], 3), ([2, 2, 1, 1], 2), ([4, 4, 1], 4)])
def test_first_beams_leave_their_requests_in_order(counts, size):
    """So the context, which the beams of a request share, need not move."""
    requests = np.repeat(np.arange(len(counts)) + 7, counts)
    parents = np.concatenate([np.resize(np.flatnonzero(requests == r), size) for r in dict.fromkeys(requests.tolist())])
    _, order = place_rows(parents, requests)
    assert requests[order].tolist() == np.repeat(np.arange(len(counts)) + 7, size).tolist()


def test_padded_rows_keep_their_lengths():
    tokens, counts = pad_rows([np.array([1, 2, 3]), np.array([4])])
    assert tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert counts.tolist() == [3, 1]
