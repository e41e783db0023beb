"""tformer-run writes classes, vectors and similarities of single-pass models, computed here with NumPy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.command_lines import failed, run
from support.toy_tasks import HEAD, LABELS, WIDTH, vector, write

TEXTS = ["a good day", "bad film", "the old night", "good"]
PAIRS = [("a good day", "bad"), ("film", "the old film")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return {kind: write(folder / f"{kind}.onnx", kind) for kind in ("vector", "states", "scores")}


def class_probabilities(text):
    powers = np.exp(vector(text).astype(np.float64) @ HEAD)
    return powers / powers.sum()


def cosine(first, other):
    return first @ other / np.linalg.norm(first) / np.linalg.norm(other)


def test_labels_and_probabilities_are_separated_by_tabs(files):
    result = run(files["scores"], *TEXTS, "\t".join(PAIRS[0]))
    assert result.exit_code == 0
    assert result.stderr == "device: cpu\n"
    for line, text in zip(result.stdout.splitlines(), [*TEXTS, PAIRS[0]], strict=True):
        label, number = line.split("\t")
        expected = class_probabilities(text)
        assert label == LABELS[expected.argmax()]
        assert float(number) == pytest.approx(expected.max(), abs=1e-5)


def test_top_k_writes_the_best_labels(files):
    (line,) = run(files["scores"], TEXTS[0], "--top-k", 2).stdout.splitlines()
    best, best_score, other, other_score = line.split("\t")
    expected = class_probabilities(TEXTS[0])
    assert [best, other] == [LABELS[i] for i in np.argsort(-expected)[:2]]
    assert [float(best_score), float(other_score)] == pytest.approx(sorted(expected)[:0:-1], abs=1e-5)
    assert failed(run(files["scores"], "a", "--top-k", "x")) == (
        "--top-k must be a whole number of at least 1, not 'x'"
    )


def test_json_contains_all_scores_and_the_top_k(files):
    lines = run(files["scores"], *TEXTS, "--json", "--top-k", 3).stdout.splitlines()
    for index, (line, text) in enumerate(zip(map(json.loads, lines), TEXTS, strict=True)):
        assert line["index"] == index
        assert list(line["scores"]) == list(LABELS)
        assert list(line["scores"].values()) == pytest.approx(list(class_probabilities(text)), abs=1e-6)
        assert line["top"][0] == {"label": line["label"], "score": line["score"]}
        assert len(line["top"]) == 3


def test_vectors_are_lines_of_json(files):
    lines = run(files["vector"], *TEXTS).stdout.splitlines()
    np.testing.assert_allclose([json.loads(line) for line in lines], [vector(t) for t in TEXTS], atol=1e-6)
    lines = run(files["vector"], *TEXTS, "--json").stdout.splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2, 3]
    np.testing.assert_allclose(json.loads(lines[2])["vector"], vector(TEXTS[2]), atol=1e-6)
    (line,) = run(files["states"], "a good day", "--json").stdout.splitlines()
    assert np.shape(json.loads(line)["vectors"]) == (5, WIDTH)


def test_vectors_are_written_as_one_array(files, tmp_path):
    out = tmp_path / "out.npy"
    assert run(files["vector"], *TEXTS, "--output-file", out).stdout == ""
    actual = np.load(out)
    assert (actual.dtype, actual.shape) == (np.float32, (4, WIDTH))
    np.testing.assert_allclose(actual, [vector(text) for text in TEXTS], atol=1e-6)
    lines = [json.loads(line) for line in run(files["vector"], *TEXTS).stdout.splitlines()]
    assert np.array_equal(np.array(lines, np.float32), actual)  # the decimal text is exact
    assert failed(run(files["vector"], "a", "--output-file", out)).startswith(f"{out} exists already")
    assert run(files["vector"], "--input-file", "-", "--output-file", out, "--force", stdin="").exit_code == 0
    assert np.load(out).shape == (0, WIDTH)


def test_run_with_an_array_is_resumed(files, tmp_path):
    out, whole = tmp_path / "out.npy", tmp_path / "whole.npy"
    lines = [*TEXTS, "good\tbad\tday", *TEXTS]
    message = failed(run(files["vector"], "--output-file", out, stdin="\n".join(lines)))
    assert message == (
        "line 5: 'good\\tbad\\tday' holds 2 tabs: a pair is two texts with one tab between them; --resume "
        "goes on after input 4"
    )
    lines[4] = "good\tbad"
    assert run(files["vector"], "--output-file", out, "--resume", stdin="\n".join(lines)).exit_code == 0
    assert run(files["vector"], "--output-file", whole, stdin="\n".join(lines)).exit_code == 0
    assert out.read_bytes() == whole.read_bytes()
    assert np.load(out).shape == (9, WIDTH)


@pytest.mark.parametrize("options", [[], ["--workers", 2, "--batch-size", 3]])
def test_many_lines_keep_their_order(files, tmp_path, options):
    (tmp_path / "in").write_text("\n".join(TEXTS * 40))
    lines = run(files["scores"], "--input-file", tmp_path / "in", *options).stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == [
        LABELS[class_probabilities(text).argmax()] for text in TEXTS
    ] * 40


def test_similarity_writes_cosines_of_all_inputs(files):
    rows = run(files["vector"], *TEXTS, "--similarity").stdout.splitlines()
    actual = [[float(number) for number in row.split("\t")] for row in rows]
    expected = [[cosine(vector(first), vector(other)) for other in TEXTS] for first in TEXTS]
    np.testing.assert_allclose(actual, expected, atol=6e-5)
    (first, *_) = run(files["vector"], *TEXTS, "--similarity", "--json").stdout.splitlines()
    assert json.loads(first)["cosines"] == pytest.approx(expected[0], abs=1e-5)


def test_similarity_writes_cosines_of_pairs(files, tmp_path):
    lines = ["\t".join(pair) for pair in PAIRS * 3]
    expected = [cosine(*map(vector, pair)) for pair in PAIRS * 3]
    actual = run(files["vector"], "--similarity", "--batch-size", 2, stdin="\n".join(lines)).stdout.splitlines()
    assert [float(line) for line in actual] == pytest.approx(expected, abs=6e-5)
    assert json.loads(run(files["vector"], lines[0], "--similarity", "--json").stdout)["cosine"] == pytest.approx(
        expected[0], abs=1e-5
    )
    out = tmp_path / "out"
    message = failed(run(files["vector"], "--similarity", "--output-file", out, stdin="\n".join([*lines, "good"])))
    assert message == (
        "line 7: it is a single input, but the inputs before it are pairs: give inputs of one kind; --resume goes on "
        "after input 6"
    )
    resumed = run(
        files["vector"], "--similarity", "--output-file", out, "--resume", stdin="\n".join([*lines, lines[0]])
    )
    assert resumed.exit_code == 0
    assert len(out.read_text().splitlines()) == 7


def test_long_input_is_cut_only_with_truncate(files):
    text = "good " * 30
    assert failed(run(files["vector"], "a", text), before=1).startswith("input 2: the input is 32 tokens long")
    assert run(files["vector"], "a", text, "--truncate").exit_code == 0


def test_ids_are_read_with_ids_flag(files):
    (line,) = run(files["vector"], "1 4 2", "--ids").stdout.splitlines()
    np.testing.assert_allclose(json.loads(line), vector("good"), atol=1e-6)
    assert failed(run(files["vector"], "1 x", "--ids")) == "input 1: '1 x' is not a list of ids"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("scores", ["--num-beams", "4", "--stream"],
         "scores.onnx classifies its inputs (text-classification): it takes no --num-beams, --stream"),
        ("vector", ["--top-k", "2"],
         "vector.onnx turns each input into numbers (feature-extraction): it takes no --top-k"),
        ("scores", ["--similarity"],
         "scores.onnx classifies its inputs (text-classification): it takes no --similarity"),
        ("vector", ["--output-file", "x.npy", "--json"],
         "x.npy is written as one array of vectors: leave out --json and --similarity, or choose another file name"),
    ],
)  # fmt: skip
def test_options_of_other_tasks_are_refused(files, kind, options, message):
    assert failed(run(files[kind], "a", *options)) == message


def test_array_output_of_lines_is_refused(files, path, tmp_path):
    out = tmp_path / "x.npy"
    for file in (files["scores"], path):
        message = failed(run(file, "a", "--output-file", out))
        assert (
            message == f"{out} is the name of a numpy array, but the results are lines of text: choose another ending"
        )
    assert not list(tmp_path.iterdir())


def test_generative_file_refuses_options_of_single_pass_tasks(path):
    assert failed(run(path, "a", "--similarity", "--truncate")) == (
        "toy.onnx generates text (translate): it takes no --truncate, --similarity"
    )


def test_array_and_similarity_of_vectors_per_position_are_refused(files, tmp_path):
    for options in (["--output-file", tmp_path / "x.npy"], ["--similarity"]):
        assert "gives numbers for each position of an input" in failed(run(files["states"], "a", *options))


def test_info_names_task_and_labels(files):
    lines = run(files["scores"], "--info").stdout.splitlines()
    assert "task: text-classification" in lines
    assert f"labels: {', '.join(LABELS)}" in lines


def test_resume_with_another_top_k_is_refused(files, tmp_path):
    out = tmp_path / "out"
    failed(run(files["scores"], "--output-file", out, stdin="a\nb\tc\td\n"))
    assert failed(run(files["scores"], "--output-file", out, "--resume", "--top-k", 2, stdin="a\nb\n")) == (
        f"--top-k is 2, but was not given in the run that wrote {out}.part: give the same, or start over with --force"
    )
