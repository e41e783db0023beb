"""Each generation option of tformer-run gives the results of the option of that name in Model.generate."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from support.command_lines import failed, run
from support.toy_models import LETTERS, START_ID, Toy

from tformer_runtime import GenerationOptions, Model, OptionError
from tformer_runtime.cli.options import OPTIONS, generation_options, use_flag_names
from tformer_runtime.decoding import drafting
from tformer_runtime.tasks.settings import bytes_of

SHORT = ["--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def model(path):
    return Model.load(path, "cpu")


def test_every_generation_option_has_a_flag():
    names = {field.name for field in dataclasses.fields(GenerationOptions)}
    assert set(OPTIONS) == names - {"logits_processor"}  # a callable has no text form
    text = run("--help").stdout
    assert all(f"  {option.flag} {option.metavar}" in text for option in OPTIONS.values())
    for heading in ("Options", "Beam search", "Sampling", "Constraints (at most one)"):
        assert f"\n{heading}:\n" in text


def test_help_names_options_by_their_flags():
    text = run("--help").stdout
    names = [name for name, option in OPTIONS.items() if "_" in name or name != option.flag.lstrip("-")]
    names.remove("shortlist")  # also a word of the text
    assert not [name for name in names if re.search(rf"\b{name}\b", text)]
    assert "`" not in text


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--min-new-tokens", 7, "--max-new-tokens", 8], {"min_new_tokens": 7, "max_new_tokens": 8}),
        (["--stop-strings", "m", "--stop-strings", "xy"], {"stop_strings": ["m", "xy"]}),
        (["--forced-prefix", "ab"], {"forced_prefix": "ab"}),
        (["--forced-bos-token-id", 9], {"forced_bos_token_id": 9}),
        (["--num-beams", 3, "--num-return-sequences", 2, "--length-penalty", -0.5],
         {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -0.5}),
        (["--num-beams", 2, "--early-stopping", "true"], {"num_beams": 2, "early_stopping": True}),
        (["--num-beams", 2, "--early-stopping", "False"], {"num_beams": 2, "early_stopping": False}),
        (["--num-beams", 2, "--early-stopping", "never", "--patience", 2],
         {"num_beams": 2, "early_stopping": "never", "patience": 2.0}),
        (["--num-beams", 4, "--num-beam-groups", 2, "--diversity-penalty", "0.7"],
         {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7}),
        (["--temperature", 1.5, "--top-k", 20, "--top-p", 0.95, "--min-p", 0.01, "--seed", 3,
          "--num-return-sequences", 3],
         {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "seed": 3, "num_return_sequences": 3}),
        (["--suppress-tokens", "5,6, 7", "--suppress-tokens", 8], {"suppress_tokens": [5, 6, 7, 8]}),
        (["--begin-suppress-tokens", "15,3"], {"begin_suppress_tokens": [15, 3]}),
        (["--bad-words-ids", "15,3", "--bad-words-ids", 4], {"bad_words_ids": [[15, 3], [4]]}),
        (["--logit-bias", "5=2.5", "--logit-bias", "6=-1e1"], {"logit_bias": {5: 2.5, 6: -10}}),
        (["--repetition-penalty", 1.5, "--presence-penalty", "-.5", "--frequency-penalty", 1],
         {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 1}),
        (["--no-repeat-ngram-size", 2], {"no_repeat_ngram_size": 2}),
        (["--top-logprobs", 2], {"top_logprobs": 2}),
        (["--prompt-lookup", "--num-draft-tokens", 3], {"prompt_lookup": True, "num_draft_tokens": 3}),
    ],
)  # fmt: skip
def test_flag_gives_the_results_of_its_option(path, model, arguments, options):
    result = run(path, "hello", "--max-new-tokens", 12, "--json", *arguments)
    assert result.exit_code == 0, result.output
    expected = model.generate("hello", **{"max_new_tokens": 12, **options})
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    for line, hypothesis in zip(lines, (expected, *expected.alternatives), strict=True):
        assert line["text"] == hypothesis.text
        assert tuple(line["token_ids"]) == hypothesis.token_ids
        assert line["score"] == hypothesis.score
        top = tuple(tuple(map(tuple, place)) for place in line.get("top_logprobs", ()))
        assert top == hypothesis.top_logprobs


@pytest.mark.parametrize("form", ["text", "file"])
def test_constraints_are_read_from_text_and_files(path, model, tmp_path, form):
    pytest.importorskip("llguidance")
    grammar, schema = 'start: "a" ("b" | "cd")+ "z"', {"enum": ["ab"]}

    def argument(text):
        if form == "text":
            return text
        (tmp_path / "definition").write_text(text)
        return f"@{tmp_path / 'definition'}"

    text = run(path, "hello", "--grammar", argument(grammar)).stdout.strip()
    assert text == model.generate("hello", grammar=grammar).text
    assert text[0] + text[-1] == "az"
    assert run(path, "hello", "--regex", "(zebra|@x)").stdout == "zebra\n"
    assert run(path, "hello", "--choice", "horse", "--choice", "zebra").stdout.strip() in ("horse", "zebra")
    # A vocabulary of letters cannot spell JSON, so that the schema is refused. This shows that it is used.
    message = failed(run(path, "hello", "--json-schema", argument(json.dumps(schema))))
    with pytest.raises(OptionError) as caught:
        model.generate("hello", json_schema=schema)
    assert message == use_flag_names(str(caught.value))


def test_draft_model_keeps_the_results(path, model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        drafting, "relative_cost", lambda *_: 0.1
    )  # the cost of a draft of the same size is 1, which disables drafting
    words = ["hello", "ab", "transformer"]
    plain = run(path, *words, "--json", "--max-new-tokens", 12)
    for batching in ([], ["--batch-size", 3], ["--batch-size", 1, "--workers", 2]):
        lines = run(
            path, *words, "--draft-model", path, "--json", "--max-new-tokens", 12, *batching
        ).stdout.splitlines()
        for line, other in zip(map(json.loads, lines), map(json.loads, plain.stdout.splitlines()), strict=True):
            speculation = line.pop("speculation")
            assert speculation["guessed"] == speculation["accepted"]
            assert (speculation["guessed"] > 0) == (3 not in batching)
            assert line["token_ids"] == other["token_ids"]
    streamed = run(path, "hello", "--draft-model", path, "--stream")
    assert streamed.stdout == run(path, "hello", "--stream").stdout
    assert "prompt" not in failed(run(path, "hello", "--draft-model", "none.onnx"))
    other = Toy(vocabulary=12, tokenizer=False).write(tmp_path / "other.onnx")
    assert failed(run(path, "hello", "--draft-model", other)).startswith(
        "--draft-model is a model of 12 ids, and this one has 29"
    )


def test_resumed_run_needs_the_same_draft_model(path, tmp_path):
    arguments = ["--draft-model", path, "--temperature", 1.0, "--seed", 3, "--output-file", tmp_path / "out"]
    failed(run(path, "hello", "ab", "é", *arguments))
    resumed = ["hello", "ab", "abc", *arguments, "--resume"]
    other = Toy(seed=27, max_length=63).write(tmp_path / "other.onnx")
    assert failed(run(path, *resumed, "--draft-model", other)).startswith("--draft-model is ")
    assert run(path, *resumed).exit_code == 0
    assert (tmp_path / "out").read_text() == run(path, "hello", "ab", "abc", *arguments[:-2]).stdout


def test_forced_prefix_is_ids_with_ids_flag(path, model):
    ids = [LETTERS.index(c) for c in "ab"]
    words = " ".join(str(LETTERS.index(c)) for c in "hello")
    result = run(path, words, *SHORT, "--ids", "--forced-prefix", " ".join(map(str, ids)))
    assert (
        tuple(map(int, result.stdout.split())) == model.generate("hello", forced_prefix=ids, max_new_tokens=6).token_ids
    )
    assert failed(run(path, words, "--ids", "--forced-prefix", "3 x")) == (
        "--forced-prefix must be a sequence of token ids, not ['3', 'x']"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-beams", "0"], "--num-beams must be a whole number of at least 1, not 0"),
        (["--num-beams", "2.0"], "--num-beams must be a whole number of at least 1, not '2.0'"),
        (["--top-p", "2"], "--top-p must be more than 0 and at most 1, not 2.0"),
        (["--temperature", "nan"], "--temperature must be 0, or a number of at least 1e-6, not nan"),
        (["--early-stopping", "yes"], "--early-stopping must be True, False or \"never\", not 'yes'"),
        (["--stop-strings", ""], "--stop-strings must be strings that are not empty, not ['']"),
        (["--suppress-tokens", "3;4"], "--suppress-tokens must be a sequence of token ids, not '3;4'"),
        (["--bad-words-ids", "3", "--bad-words-ids", "x"], "none of them empty, not '3 x'"),
        (["--logit-bias", "3"], "--logit-bias must be a mapping from token ids to numbers, each id once, not '3'"),
        (["--logit-bias", "3=1", "--logit-bias", "3=2"], "not [(3, 1.0), (3, 2.0)]"),
        (["--json-schema", "{"], "--json-schema must be a JSON schema, as JSON or as a dict, not '{'"),
        (["--grammar", "@none/at/all"], "--grammar: 'none/at/all' cannot be read: No such file or directory"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other: set one"),
        (["--num-return-sequences", "2"], "--num-return-sequences 2 needs a --num-beams of at least 2, or sampling"),
        (["--num-beams", "2", "--top-k", "3"], "--num-beams 2 and sampling (--temperature, --top-k, --top-p, --min-p)"),
        (
            ["--suppress-tokens", "3", "--forced-bos-token-id", "3"],
            "--forced-bos-token-id 3 is one of the ids that --suppress-tokens forbids",
        ),
        (["--suppress-tokens", "99"], "--suppress-tokens names the id 99, and the model's end at 28"),
        (
            ["--prompt-lookup", "--num-beams", "2"],
            "--prompt-lookup guesses tokens for one row, but --num-beams 2 needs more rows: set --num-beams 1",
        ),
        (
            ["--prompt-lookup", "--num-draft-tokens", "0"],
            "--num-draft-tokens must be a whole number of at least 1, not 0",
        ),
        (["--num-draft-tokens", "3"], "--num-draft-tokens 3 needs --prompt-lookup or a --draft-model"),
        (["--max-memory", "2T"], "--max-memory must be a number of bytes of at least 1, or such a number and K, M or"),
    ],
)
def test_invalid_values_are_refused_with_flag_names(path, options, message):
    assert message in failed(run(path, "a", *options))


def test_use_flag_names_replaces_only_option_names():
    for unchanged in (
        "the regex 'num_beams=2' cannot be used: unknown extension",
        "the options leave no token that may come next: suppress less, or allow more beams",
        "the model file's generation defaults: num_beams must be a whole number",
        "the unstoppable beam_sizes",
    ):
        assert use_flag_names(unchanged) == unchanged
    sentence = "a json_schema and 1 byte of max_memory=1,000"
    assert use_flag_names(sentence) == "a --json-schema and 1 byte of --max-memory 1,000"


def test_options_without_a_flag_stay_unset():
    assert generation_options({name: () if o.repeated else None for name, o in OPTIONS.items()}, False).to_dict() == {}


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("10k", 10240), ("1.5M", 3 << 19), (" 2G ", 2 << 30)])
def test_memory_sizes_are_parsed(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "G", "1,000", "0.5", "1e9", "inf"])
def test_invalid_memory_sizes_raise_option_error(text):
    with pytest.raises(OptionError, match="max_memory must be a number of bytes"):
        bytes_of(text)


def test_max_memory_keeps_results_or_refuses_the_request(path):
    unlimited = run(path, "hello", "ab", *SHORT)
    assert run(path, "hello", "ab", *SHORT, "--max-memory", "1M").stdout == unlimited.stdout
    message = failed(run(path, "hello", *SHORT, "--max-memory", 100))
    assert "--max-memory allows 100: allow more" in message


def test_timing_is_written_only_with_timing_flag(path):
    plain = json.loads(run(path, "hello", *SHORT, "--json").stdout)
    timed = json.loads(run(path, "hello", *SHORT, "--json", "--timing").stdout)
    timing = timed.pop("timing")
    assert timed == plain
    assert timing["first_token"] > 0
    assert timing["per_token"] > 0
    assert START_ID not in plain["token_ids"]
