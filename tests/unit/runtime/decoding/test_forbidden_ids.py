"""Options that only forbid ids give the same results, bit for bit, as rules that change whole rows of scores.

A logits_processor that changes nothing switches to rules on whole rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.rules.logit_rules import make_rules
from tformer_runtime.decoding.sampling import log_normalizer
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.format.manifest import SpecialTokens

VOCABULARY, END, OTHER_END, LIKELY = 1300, 2, 3, range(2, 12)  # so large that the best ids are searched in blocks


class OnDevice(DeviceLogits):
    """Logits on a simulated device. Counts how often they are read."""

    reads = 0

    def __init__(self, logits):
        self._own = logits
        self.tokens = logits.argmax(-1)
        self.logprobs = logits.max(-1) - log_normalizer(logits)

    def copy(self):
        OnDevice.reads += 1
        return self._own.copy()


class Random:
    """Rows whose logits depend on their length and their last id. A few ids are much likelier than others.

    As in the engine, the next step overwrites the logits, and callers must not change them.
    """

    def __init__(self, seed, device=False):
        generator = np.random.default_rng(seed)
        self._of_id, self._of_place = (
            generator.standard_normal((VOCABULARY, VOCABULARY), np.float32) for _ in range(2)
        )
        self._of_id[:, LIKELY] += 4
        self._device = device
        self.ids: list[list[int]] = []
        self._given = self._kept = np.zeros((0, VOCABULARY), np.float32)

    def begin(self, tasks):
        rows = Random.__new__(Random)
        rows.__dict__.update(self.__dict__)
        rows.ids = [task.prompt.tolist() for task in tasks]
        return rows, rows.logits(device=False)

    def begin_unread(self, task):
        return None

    def greedy_steps(self, tokens, make_plan):
        return None

    def bytes_needed(self, running, coming, rows=None):
        return 0

    def step(self, tokens):
        np.testing.assert_array_equal(self._given, self._kept)
        for ids, new in zip(self.ids, tokens.tolist(), strict=True):
            ids += new
        return self.logits(self._device)

    def reorder(self, rows):
        self.ids = [list(self.ids[row]) for row in rows]

    def logits(self, device):
        self._given = np.stack([self._of_id[ids[-1]] + self._of_place[len(ids)] for ids in self.ids])
        self._kept = self._given.copy()
        return OnDevice(self._given) if device else self._given

    def histories(self):
        return None

    guesses = requests = histories

    def release(self):
        pass


WAYS = {
    "greedy": {},
    "greedy with alternatives": {"top_logprobs": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.6},
    "beams with alternatives": {"num_beams": 4, "num_return_sequences": 2, "top_logprobs": 3},
}
FORBIDDING = {
    "least": {"min_new_tokens": 9},
    "suppressed": {"suppress_tokens": [4, 5, 6, 900]},
    "not first": {"begin_suppress_tokens": [END, 4, 5, 6]},
    "bad words": {"bad_words_ids": [[4], [5, 6], [6, 5], [7, 7], [7, 8], [8, 9, 10], [2, 4, 5, 6, 7]]},
    "ngrams": {"no_repeat_ngram_size": 1},
    "first token": {"forced_bos_token_id": 7, "begin_suppress_tokens": [8, 9]},
    "together": {
        "min_new_tokens": 7,
        "suppress_tokens": [4],
        "begin_suppress_tokens": [5, 6],
        "bad_words_ids": [[4], [5, 5], [5, 6]],
        "no_repeat_ngram_size": 2,
    },
}


def decoded(model, options, rules=FORBIDDING):
    """Decode some prompts, each with one of some rules, in one batch; return the results and the errors."""
    tasks = []
    for name in rules:
        settings = Settings.of(GenerationOptions(max_new_tokens=12, **options, **FORBIDDING[name]), {})
        made = make_rules(settings, SpecialTokens((1,), (END, OTHER_END), 0), VOCABULARY)
        for prompt in ([1], [1, 20, 30, 40], [5, 6, 5]):
            tasks.append(SequenceTask(len(tasks), np.array(prompt), 12, settings, (END, OTHER_END), made))
    scheduler = Scheduler(model, rows=200)
    for task in tasks:
        scheduler.submit(task)
    while not scheduler.idle:
        scheduler.step()
    return [task.hypotheses for task in tasks]


@pytest.fixture
def ruled(monkeypatch):
    """Count the rows of scores that rules change."""
    calls, rule = [], SequenceTask.apply_rules
    monkeypatch.setattr(SequenceTask, "apply_rules", lambda task, *args: calls.append(task) or rule(task, *args))
    return calls


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", list(WAYS))
def test_forbidden_ids_give_the_results_of_a_logits_processor(way, seed, ruled):
    model, options = Random(seed), WAYS[way]
    fast = decoded(model, options)
    # A forced first token is a rule on whole rows, at one step. All beams of a batch are ranked in one way.
    assert len(ruled) == (3 * len(FORBIDDING) if "num_beams" in options else 3)
    del ruled[:]
    slow = decoded(model, {**options, "logits_processor": lambda ids, scores: scores})
    assert len(ruled) > 3 * len(FORBIDDING)
    assert fast == slow
    for i, name in enumerate(FORBIDDING):
        for h in (h for found in fast[3 * i : 3 * i + 3] for h in found):
            assert not set(h.ids) & set(FORBIDDING[name].get("suppress_tokens", ()))
            assert len(h.ids) > FORBIDDING[name].get("min_new_tokens", 0)
            assert name != "ngrams" or len(set(h.ids)) == len(h.ids)
            assert name != "first token" or h.ids[0] == 7


@pytest.mark.parametrize("rule", list(FORBIDDING))
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_each_forbidding_option_alone_equals_a_logits_processor(rule, way, ruled):
    model = Random(7)
    fast = decoded(model, WAYS[way], [rule])
    assert len(ruled) == (3 if rule == "first token" else 0)
    assert fast == decoded(model, {**WAYS[way], "logits_processor": lambda ids, scores: scores}, [rule])


@pytest.mark.parametrize("way", list(WAYS))
def test_row_is_read_from_the_device_if_its_best_token_is_forbidden(way):
    host, device = Random(11), Random(11, device=True)
    OnDevice.reads = 0
    for rule in FORBIDDING:
        assert decoded(device, WAYS[way], [rule]) == decoded(host, WAYS[way], [rule])
    if way == "greedy":
        assert 0 < OnDevice.reads < 12 * len(FORBIDDING)
        OnDevice.reads = 0
        decoded(device, {"suppress_tokens": [900]}, ["not first"])  # an id that would not be chosen
        assert OnDevice.reads == 0


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"temperature": 1.0}])
@pytest.mark.parametrize("device", [False, True])
def test_forbidding_every_id_is_an_error(options, device):
    settings = Settings.of(GenerationOptions(suppress_tokens=range(VOCABULARY), max_new_tokens=3, **options), {})
    rules = make_rules(settings, SpecialTokens((1,), (END,), 0), VOCABULARY)
    tasks = [
        SequenceTask(0, np.array([1]), 3, settings, (END,), rules),
        SequenceTask(1, np.array([1]), 3, Settings(), (END,)),
    ]
    scheduler = Scheduler(Random(1, device))
    for task in tasks:
        scheduler.submit(task)
    while not scheduler.idle:
        scheduler.step()
    assert isinstance(tasks[0].error, OptionError)
    assert "leave no token that may come next" in str(tasks[0].error)
    assert tasks[1].hypotheses
