"""`Predictor`: rows of a batch get the results that `tformer-run --json` writes for them, as columns of Arrow."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from fuzz.models import forecaster
from support.command_lines import run

from tformer_runtime import InputError, OptionError, UnsupportedCallError
from tformer_serve.ray import Predictor

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'tformer[ray]'")
pc = pytest.importorskip("pyarrow.compute")

TEXTS = ["a good day", "bad", "the old film", "good good good", "old old night"]
WORDS = ["abc", "z", "hello", "xyzzy", "q"]
MASKED = [text + " old" for text in TEXTS]  # "old" is the mask
CASES = {  # kind of file, texts, options, the same as flags
    "generation": ("letters", WORDS, {"max_new_tokens": 5}, ["--max-new-tokens", "5"]),
    "hypotheses": (
        "letters",
        WORDS,
        {"num_beams": 3, "num_return_sequences": 1, "max_new_tokens": 5},
        ["--num-beams", "3", "--max-new-tokens", "5"],
    ),
    "vector": ("vector", TEXTS, {}, []),
    "states": ("states", TEXTS, {}, []),
    "outputs": ("places", TEXTS, {}, []),
    "labels": ("scores", TEXTS, {}, []),
    "top labels": ("scores", TEXTS, {"top_k": 2}, ["--top-k", "2"]),
    "spans": ("spans", TEXTS, {"aggregation": "first"}, ["--aggregation", "first"]),
    "answers": ("answers", [f"good day\t{text}" for text in TEXTS], {"top_k": 2}, ["--top-k", "2"]),
    "masks": ("masks", MASKED, {"top_k": 2}, ["--top-k", "2"]),
}


def reference(file, texts, *flags):
    """Return the fields of `tformer-run --json` of each text."""
    result = run(file, "--json", "--device", "cpu", *flags, stdin="".join(f"{text}\n" for text in texts))
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_same(actual, expected):
    """Numbers are equal but for the order of sums next to other rows, and the digits of float32."""
    if isinstance(expected, dict):
        actual = dict(actual)  # a mapping of Arrow is a list of pairs
        assert {name for name, value in actual.items() if value is not None} == set(expected)
        for name, value in expected.items():
            assert_same(actual[name], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-5, abs=2e-6)
    else:
        assert actual == expected


@pytest.mark.parametrize("case", CASES)
def test_columns_are_the_fields_of_the_command(files, case):
    kind, texts, options, flags = CASES[case]
    pairs = "\t" in texts[0]
    columns = dict(zip(("a", "b"), zip(*(text.split("\t") for text in texts), strict=True), strict=False))
    predictor = Predictor(files[kind], ["a", "b"] if pairs else "a", options, device="cpu")
    table = predictor(pa.table(columns))
    assert table.select(list(columns)).to_pydict() == {name: list(values) for name, values in columns.items()}
    for row, fields in zip(
        table.drop_columns(list(columns)).to_pylist(), reference(files[kind], texts, *flags), strict=True
    ):
        assert_same(row, {name: value for name, value in fields.items() if name not in ("index", "rank")})


def test_alternatives_are_a_column(files):
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 5, "top_logprobs": 2}
    (row,) = Predictor(files["letters"], "a", options)(pa.table({"a": ["abc"]})).to_pylist()
    flags = ["--num-beams", "3", "--num-return-sequences", "3", "--max-new-tokens", "5", "--top-logprobs", "2"]
    lines = reference(files["letters"], ["abc"], *flags)
    assert [row["text"], *(other["text"] for other in row["alternatives"])] == [line["text"] for line in lines]
    assert [[[i["id"] for i in position] for position in result["top_logprobs"]] for result in row["alternatives"]] == [
        [[id_ for id_, _ in position] for position in line["top_logprobs"]] for line in lines[1:]
    ]


def test_histories_are_lists_of_numbers():
    history = np.arange(12, dtype=np.float32).reshape(6, 2)
    table = Predictor(forecaster(), "sales")(pa.table({"sales": [history.tolist(), (history * 2).tolist()]}))
    means = history[-3:].mean(0)  # of the last three rows, four times
    np.testing.assert_allclose(table.column("forecast").to_pylist(), [[means] * 4, [means * 2] * 4])


@pytest.mark.parametrize("form", ["mapping", "pandas", "arrow"])
def test_each_batch_format_of_ray_data(files, form):
    columns = {"text": np.array(TEXTS, object), "number": np.arange(len(TEXTS))}
    batch = {"mapping": columns, "arrow": pa.table(columns), "pandas": pa.table(columns).to_pandas()}[form]
    table = Predictor(files["scores"], output_columns={"label": "mood"}, device="cpu")(batch)
    assert table.column_names == ["text", "number", "mood"]
    assert table.column("number").to_pylist() == list(range(len(TEXTS)))
    assert table.column("mood").to_pylist() == [row["label"] for row in reference(files["scores"], TEXTS)]


def test_rows_that_fail_keep_their_errors(files):
    rows = ["abc", "a!b", None, "z", "", "hello"]
    table = Predictor(files["letters"], "a", {"max_new_tokens": 4}, on_error="keep")(pa.table({"a": rows}))
    good = [0, 3, 5]
    expected = [line["text"] for line in reference(files["letters"], [rows[i] for i in good], "--max-new-tokens", "4")]
    assert [table.column("text").to_pylist()[i] for i in good] == expected
    errors = table.column("error").to_pylist()
    assert [i for i, error in enumerate(errors) if error is None] == good
    assert errors[2] == "it has no value"
    assert table.column("text").to_pylist()[1] is None


def test_rows_that_fail_end_the_batch(files):
    with pytest.raises(InputError, match="input 2: ") as caught:
        Predictor(files["letters"], "a")(pa.table({"a": ["abc", "a!b", None]}))
    assert caught.value.input_number == 2


def test_schema_does_not_depend_on_the_rows(files):
    predictor = Predictor(files["spans"], on_error="keep")
    full, empty = predictor(pa.table({"text": TEXTS})), predictor(pa.table({"text": pa.array([], pa.string())}))
    failed = predictor(pa.table({"text": pa.array([None], pa.string())}))
    assert full.schema == empty.schema == failed.schema
    assert empty.num_rows == 0


def test_sampling_is_that_of_the_command(files):
    options = {"temperature": 1.3, "seed": 5, "max_new_tokens": 6}
    table = Predictor(files["letters"], "a", options)(pa.table({"a": WORDS}))
    flags = ["--temperature", "1.3", "--seed", "5", "--max-new-tokens", "6"]
    assert table.column("text").to_pylist() == [line["text"] for line in reference(files["letters"], WORDS, *flags)]


def test_ids_and_texts_of_ids(files):
    ids = [[4, 5, 6], [7, 8]]
    of_lists = Predictor(files["letters"], "a", {"max_new_tokens": 4})(pa.table({"a": ids}))
    texts = [" ".join(map(str, row)) for row in ids]
    of_texts = Predictor(files["letters"], "a", {"max_new_tokens": 4}, ids=True)(pa.table({"a": texts}))
    assert of_lists.column("token_ids") == of_texts.column("token_ids")


def test_named_inputs(files):
    one = Predictor(files["letters"], {"src": "x"}, {"max_new_tokens": 4})(pa.table({"x": WORDS}))
    other = Predictor(files["letters"], "x", {"max_new_tokens": 4})(pa.table({"x": WORDS}))
    assert one.column("text") == other.column("text")


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"on_error": "skip"}, OptionError, "on_error must be one of fail, keep, not 'skip'"),
        ({"options": {"top_q": 1}}, OptionError, "top_q"),
        ({"output_columns": ["label"]}, OptionError, "no column 'label': they have text, token_ids"),
        ({"output_columns": {"text": "a", "score": "a"}}, OptionError, "two results have the column 'a'"),
        ({"input_column": []}, OptionError, "input_column must be the name of a column"),
        ({"input_column": ["a", "b", "c"]}, OptionError, "a pair has two"),
        ({"options": {"cross_attentions": True}}, UnsupportedCallError, "cross"),
        ({"system": "be brief"}, OptionError, "system needs chat"),
    ],
)
def test_wrong_arguments(files, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        Predictor(files["letters"], **{"input_column": "a", **arguments})


def test_columns_that_are_missing_or_taken(files):
    predictor = Predictor(files["letters"], "a")
    with pytest.raises(InputError, match="no column 'a': they have b, c"):
        predictor(pa.table({"b": ["x"], "c": ["y"]}))
    with pytest.raises(OptionError, match="a column 'text' already"):
        predictor(pa.table({"a": ["x"], "text": ["y"]}))


def test_arguments_can_be_pickled_and_no_ray_is_imported(files):
    arguments = pickle.dumps((str(files["letters"]), "a", {"max_new_tokens": 4}))
    code = (
        "import pickle, sys; from tformer_serve.ray import Predictor; import pyarrow\n"
        f"rows = Predictor(*pickle.loads({arguments!r}))(pyarrow.table({{'a': ['abc']}}))\n"
        "print(rows.num_rows, [name for name in ('ray', 'fastapi', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 []"


def test_map_batches_of_ray_data(files, cluster):
    import ray

    rows = [{"number": i, "text": TEXTS[i % len(TEXTS)]} for i in range(40)]
    mapped = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        Predictor,
        fn_constructor_args=[files["scores"]],
        fn_constructor_kwargs={"options": {"top_k": 2}, "output_columns": ["label", "score"]},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=8,
        batch_format="pyarrow",
    )
    found = sorted(mapped.take_all(), key=lambda row: row["number"])
    expected = reference(files["scores"], TEXTS)
    assert [(row["number"], row["label"]) for row in found] == [
        (i, expected[i % len(TEXTS)]["label"]) for i in range(40)
    ]
