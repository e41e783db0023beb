"""What files that label spans, answer questions and fill masks refuse from Python, and before any run where that is
possible."""

from __future__ import annotations

import numpy as np
import pytest
from support.toy_tasks import WIDTH, write

from tformer_runtime import InputError, Model, OptionError, UnsupportedCallError
from tformer_runtime.format import manifest as m

MASK = 11  # "old"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    asked = {
        "spans": ("states", "token-classification", m.OutputMeaning(("O", "B-A", "I-A", "B-B", "I-B", "I-C"))),
        "answers": ("places", "question-answering", m.OutputMeaning(settings={"first": 1})),
        "masks": ("states", "fill-mask", m.OutputMeaning(settings={"mask": MASK})),
    }
    made = {}
    for name, (gives, task, outcome) in asked.items():
        path = write(folder / f"{name}.onnx", gives, task=task, output_meaning=outcome)
        made[name] = Model.load(path, "cpu", threads=1)
    return made


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([-1], f"the candidate token -1 is not in the model's vocabulary, which has {WIDTH} ids"),
        ([WIDTH], f"the candidate token {WIDTH} is not in the model's vocabulary"),
        (["good", "night"], "the candidate token 10 is not in the model's vocabulary"),
        ([1.5], "each of candidate_tokens must be a text or an id, not 1.5"),
        ([None], "each of candidate_tokens must be a text or an id, not None"),
        ([True], "each of candidate_tokens must be a text or an id, not True"),
        (True, "each of candidate_tokens must be a text or an id, not True"),
        (5.5, "candidate_tokens must be tokens, as texts or ids, not 5.5"),
        ([], "candidate_tokens names no token"),
    ],
)
def test_targets_that_are_no_tokens(files, targets, message):
    with pytest.raises(OptionError, match=message):  # though no text is read
        files["masks"].fill([], candidate_tokens=targets)


def test_targets_of_any_whole_number(files):
    (given,) = files["masks"].fill(["bad old"], candidate_tokens=["bad", "good"])
    assert {candidate.id for candidate in given[0]} == {4, 5}
    for targets in ([np.int64(5), 4], np.array([4, 5])):
        assert files["masks"].fill(["bad old"], candidate_tokens=targets) == [given]
    (one,) = files["masks"].fill(["bad old"], candidate_tokens=np.int32(4))
    assert one[0] == tuple(candidate for candidate in given[0] if candidate.id == 4)


@pytest.mark.parametrize("context", ["", "  ", "\n"])
def test_a_context_without_text(files, context):
    with pytest.raises(InputError, match=r"^input 2: the context is empty$"):
        files["answers"].answer([("a good", "bad film"), ("a good", context)])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("answers", {"truncate": True}, "this file answers questions from a context: it takes no truncate"),
        ("spans", {"truncate": True, "doc_stride": 2}, "give truncate or doc_stride, not both"),
        ("spans", {"doc_stride": 10}, "stride must be less than a window has of the text, 10 tokens, not 10"),
        ("spans", {"ignore_labels": 5}, "ignore_labels must be labels, not 5"),
        ("spans", {"ignore_labels": [None]}, r"ignore_labels must be labels, not \[None\]"),
        ("spans", {"ignore_labels": ["A", "LOC"]}, "ignore_labels names 'LOC', and the labels are O, A, B, C"),
        (
            "spans",
            {"ignore_labels": "A", "aggregation": "none"},
            "ignore_labels names 'A', and the labels are O, B-A, I-A, B-B, I-B",
        ),
        ("masks", {"truncate": "no"}, "truncate must be True or False, not 'no'"),
        ("answers", {"allow_no_answer": "no"}, "no_answer must be True or False, not 'no'"),
    ],
)
def test_what_does_not_go_together(files, kind, settings, message):
    with pytest.raises(OptionError, match=message):
        files[kind].predict([], **settings)


def test_which_labels_are_left_out(files):
    """Those that are given, instead of O."""
    text = "good bad day film a the night old"
    every = files["spans"].entities([text], ignore_labels=())[0]
    held = {span.label for span in every}
    assert {"O"} < held
    one = min(held - {"O"})
    for ignore, without in (("O", "O"), (None, "O"), (one, one), ([one], one)):
        (found,) = files["spans"].entities([text], ignore_labels=ignore)
        assert found == [span for span in every if span.label != without]


def test_the_widest_windows_share(files):
    text = "bad film the old night " * 4
    (found,) = files["spans"].entities([text], ignore_labels=(), doc_stride=9)
    assert found[-1].end == len(text.rstrip())


def test_a_task_that_is_not_of_spans_says_so(files):
    with pytest.raises(UnsupportedCallError, match=r"fills in masks: it cannot label spans; call fill\(\) or predict"):
        files["masks"].entities(["a"])
