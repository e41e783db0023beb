"""Token classification, question answering and fill-mask: invalid options and inputs are refused, options before any
input is read.
"""

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
    tasks = {
        "spans": ("states", "token-classification", m.OutputMeaning(("O", "B-A", "I-A", "B-B", "I-B", "I-C"))),
        "answers": ("places", "question-answering", m.OutputMeaning(settings={"first": 1})),
        "masks": ("states", "fill-mask", m.OutputMeaning(settings={"mask": MASK})),
    }
    models = {}
    for name, (output, task, output_meaning) in tasks.items():
        path = write(folder / f"{name}.onnx", output, task=task, output_meaning=output_meaning)
        models[name] = Model.load(path, "cpu", threads=1)
    return models


@pytest.mark.parametrize(
    ("candidate_tokens", "message"),
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
def test_invalid_candidate_tokens_are_refused(files, candidate_tokens, message):
    with pytest.raises(OptionError, match=message):  # the list of texts is empty
        files["masks"].fill([], candidate_tokens=candidate_tokens)


def test_candidate_tokens_are_texts_or_integers(files):
    (expected,) = files["masks"].fill(["bad old"], candidate_tokens=["bad", "good"])
    assert {candidate.id for candidate in expected[0]} == {4, 5}
    for candidate_tokens in ([np.int64(5), 4], np.array([4, 5])):
        assert files["masks"].fill(["bad old"], candidate_tokens=candidate_tokens) == [expected]
    (actual,) = files["masks"].fill(["bad old"], candidate_tokens=np.int32(4))
    assert actual[0] == tuple(candidate for candidate in expected[0] if candidate.id == 4)


@pytest.mark.parametrize("context", ["", "  ", "\n"])
def test_empty_context_is_refused(files, context):
    with pytest.raises(InputError, match=r"^input 2: the context is empty$"):
        files["answers"].answer([("a good", "bad film"), ("a good", context)])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("answers", {"truncate": True}, "this file answers questions from a context: it takes no truncate"),
        ("spans", {"truncate": True, "doc_stride": 2}, "truncate and doc_stride exclude each other"),
        ("spans", {"doc_stride": 10}, "stride must be less than the 10 tokens of text in a window, not 10"),
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
def test_invalid_options_are_refused_before_any_input(files, kind, settings, message):
    with pytest.raises(OptionError, match=message):
        files[kind].predict([], **settings)


def test_ignore_labels_replace_the_default_of_o(files):
    text = "good bad day film a the night old"
    all_spans = files["spans"].entities([text], ignore_labels=())[0]
    labels = {span.label for span in all_spans}
    assert {"O"} < labels
    label = min(labels - {"O"})
    for ignore_labels, ignored in (("O", "O"), (None, "O"), (label, label), ([label], label)):
        (actual,) = files["spans"].entities([text], ignore_labels=ignore_labels)
        assert actual == [span for span in all_spans if span.label != ignored]


def test_windows_with_the_largest_stride_cover_the_text(files):
    text = "bad film the old night " * 4
    (spans,) = files["spans"].entities([text], ignore_labels=(), doc_stride=9)
    assert spans[-1].end == len(text.rstrip())


def test_fill_mask_model_refuses_entities(files):
    with pytest.raises(UnsupportedCallError, match=r"fills in masks: it cannot label spans; call fill\(\) or predict"):
        files["masks"].entities(["a"])
