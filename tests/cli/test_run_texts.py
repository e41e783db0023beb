"""tformer-run writes labelled spans, answers and filled masks, computed here with NumPy."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from support.command_lines import failed, run
from support.toy_tasks import HEAD, WIDTH, WORDS, states, write

from tformer_runtime.format import manifest as m

TEXTS = ["a good day", "bad film the old night", "good"]
TAGS = ("O", "B-A", "I-A", "B-B", "I-B", "I-C")
MASK = WORDS.index("old")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    files_by_name = {
        "spans": ("states", "token-classification", m.OutputMeaning(TAGS, m.SINGLE_LABEL)),
        "answers": ("places", "question-answering", m.OutputMeaning(settings={"first": 1})),
        "masks": ("states", "fill-mask", m.OutputMeaning(settings={"mask": MASK})),
    }
    return {
        name: write(folder / f"{name}.onnx", kind, task=task, output_meaning=output_meaning)
        for name, (kind, task, output_meaning) in files_by_name.items()
    }


def softmax(z, axis=-1):
    powers = np.exp(z - z.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def numbers(line):
    """Return the fields of a line, with numbers as floats."""
    return [float(field) if field[0].isdigit() else field for field in line.split("\t")]


def test_spans_are_written_between_tabs_and_as_json(files):
    lines = run(files["spans"], *TEXTS, "--aggregation", "none", "--ignore-labels", "").stdout.splitlines()
    json_lines = run(
        files["spans"], *TEXTS, "--aggregation", "none", "--ignore-labels", "", "--json"
    ).stdout.splitlines()
    for index, (line, fields, text) in enumerate(zip(lines, map(json.loads, json_lines), TEXTS, strict=True)):
        scores = softmax(states(text).astype(np.float64))[1:-1]
        expected = [(TAGS[row.argmax()], word, row.max()) for row, word in zip(scores, text.split(), strict=True)]
        assert fields["index"] == index
        assert [(s["label"], s["text"]) for s in fields["spans"]] == [e[:2] for e in expected]
        assert [s["score"] for s in fields["spans"]] == pytest.approx([e[2] for e in expected], abs=1e-6)
        assert [text[s["start"] : s["end"]] for s in fields["spans"]] == text.split()
        flat = [field for e in expected for field in e]
        assert numbers(line)[0::3] == flat[0::3]
        assert numbers(line)[2::3] == pytest.approx(flat[2::3], abs=1e-5)


def test_spans_of_a_long_text_are_read_in_windows(files):
    text = "bad film the old night " * 4
    assert "takes at most 12" in failed(run(files["spans"], text))
    (line,) = run(files["spans"], text, "--doc-stride", 2, "--ignore-labels", "", "--json").stdout.splitlines()
    spans = json.loads(line)["spans"]
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == len(text.rstrip())
    assert all(one["end"] <= other["start"] for one, other in pairwise(spans))


def test_answers_are_written_between_tabs_and_as_json(files):
    question, context = "a good", "bad film the old night"
    places = states((question, context)).astype(np.float64) @ HEAD[:, :2]
    kept_positions = [0, *range(4, 9)]  # [CLS] and the context
    start, end = softmax(places[kept_positions], 0).T[:, 1:]
    scores = np.tril(np.triu(np.outer(start, end)), 14)
    best = sorted(((scores[i, j], i, j) for i in range(5) for j in range(i, 5)), reverse=True)[:2]
    expected = [(" ".join(context.split()[i : j + 1]), score) for score, i, j in best]
    line = run(files["answers"], f"{question}\t{context}", "--top-k", 2).stdout.rstrip("\n")
    assert numbers(line)[0::2] == [text for text, _ in expected]
    assert numbers(line)[1::2] == pytest.approx([score for _, score in expected], abs=1e-5)
    fields = json.loads(run(files["answers"], f"{question}\t{context}", "--top-k", 2, "--json").stdout)
    assert [fields["text"], fields["alternatives"][0]["text"]] == [text for text, _ in expected]
    assert context[fields["start"] : fields["end"]] == fields["text"]
    with_no_answer = run(files["answers"], f"{question}\t{context}", "--top-k", 20, "--allow-no-answer").stdout.rstrip(
        "\n"
    )
    assert "" in with_no_answer.split("\t")
    assert "give a question and the context" in failed(run(files["answers"], "a"))


def test_long_contexts_are_answered_in_windows(files, tmp_path):
    lines = [f"a good\t{'bad film the old night ' * n}" for n in (1, 9, 3)]
    (tmp_path / "in").write_text("\n".join(lines))
    out = tmp_path / "out"
    options = ["--input-file", tmp_path / "in", "--output-file", out, "--json", "--workers", 2, "--batch-size", 2]
    assert run(files["answers"], *options).exit_code == 0
    for line, fields in zip(lines, map(json.loads, out.read_text().splitlines()), strict=True):
        assert line.split("\t")[1][fields["start"] : fields["end"]] == fields["text"]
        assert fields["text"]
    assert failed(run(files["answers"], lines[0], "--max-seq-len", 20)).startswith("--max-seq-len must be at most 12")


def test_filled_masks_are_written_between_tabs_and_as_json(files):
    text = "bad old film"
    scores = softmax(states(text).astype(np.float64))[2]
    order = np.argsort(-scores)
    (line,) = run(files["masks"], text, "--top-k", 3).stdout.splitlines()
    assert numbers(line.replace("[", "x["))[1::2] == pytest.approx(list(scores[order[:3]]), abs=1e-5)
    assert line.split("\t")[0::2] == [WORDS[i] for i in order[:3]]
    fields = json.loads(
        run(files["masks"], f"{text} old", "--candidate-tokens", "good", "--candidate-tokens", "[CLS]", "--json").stdout
    )
    assert len(fields["masks"]) == 2
    assert {c["id"] for c in fields["masks"][0]} == {WORDS.index("good"), WORDS.index("[CLS]")}
    good = next(c for c in fields["masks"][0] if c["token"] == "good")
    assert "bad good film old" in good["text"]
    (two_masks,) = run(files["masks"], f"{text} old", "--top-k", 1).stdout.splitlines()
    assert len(two_masks.split("\t|\t")) == 2
    assert failed(run(files["masks"], "bad film")) == "input 1: the input has no mask: write old where it belongs"
    assert failed(run(files["masks"], "old", "--candidate-tokens", "xyz")).startswith(
        "the candidate token 'xyz' is not one token"
    )
    ids = json.loads(run(files["masks"], "1 5 11 2", "--ids", "--json", "--top-k", WIDTH).stdout)
    assert len(ids["masks"][0]) == WIDTH


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("spans", ["--aggregation", "last"],
         "--aggregation must be one of none, simple, first, average, max, not 'last'"),
        ("spans", ["--doc-stride", "x"], "--doc-stride must be a whole number of at least 0, not 'x'"),
        ("spans", ["--ignore-labels", "LOC"], "--ignore-labels names 'LOC', and the labels are O, A, B, C"),
        ("spans", ["--doc-stride", "11"], "--doc-stride must be less than the 10 tokens of text in a window, not 11"),
        ("spans", ["--top-k", "2"],
         "spans.onnx labels spans of its inputs (token-classification): it takes no --top-k"),
        ("answers", ["--candidate-tokens", "a"],
         "answers.onnx answers questions from a context (question-answering): it takes no --candidate-tokens"),
        ("answers", ["--truncate"],
         "answers.onnx answers questions from a context (question-answering): it takes no --truncate"),
        ("spans", ["--truncate", "--doc-stride", "2"],
         "--truncate and --doc-stride exclude each other: a text that is too long is either cut or read in windows"),
        ("masks", ["--top-k", "0"], "--top-k must be a whole number of at least 1, not 0"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(files, kind, options, message):
    assert failed(run(files[kind], "a", *options)) == message


def test_file_without_a_tokenizer_writes_its_vectors(tmp_path):
    path = write(tmp_path / "x.onnx", "states", task="fill-mask", tokenizers=(), tokenizer_of={})
    (line,) = run(path, "1 5 2", "--ids", "--json").stdout.splitlines()
    assert np.shape(json.loads(line)["vectors"]) == (3, WIDTH)
