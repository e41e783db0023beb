"""Golden files: they hold the source's own numbers, the runtime gives their results, and a changed model does not."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import re

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper
from support.served_tasks import write_tasks
from support.toy_models import Toy, with_manifest

from tformer_export import export
from tformer_export.golden_cli import command
from tformer_export.verify.golden.record import golden_bytes, make_golden, write_golden
from tformer_export.verify.golden.replay import differences, read_golden
from tformer_export.verify.golden.values import array_difference, decode_array, encode_array, pattern, sample
from tformer_models.language_model import LanguageModel
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import InputError, OutputError

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOYS = {
    "encoder-decoder": Toy(),
    "decoder-only": Toy(encoder=False, attention="scatter"),
    "carries": Toy(encoder=False, carries=True),
    "extra outputs": Toy(extras=True, stride=2),
    "short": Toy(encoder=False, max_length=4),
    "shortest": Toy(encoder=False, max_length=2),
    "no tokenizer": Toy(tokenizer=False),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    return {**{name: toy.write(folder / f"{name}.onnx") for name, toy in TOYS.items()}, **write_tasks(folder)}


def golden_of(path, folder):
    """Return the golden file of a model, as it is read from the disk."""
    write_golden(make_golden(path), folder / "golden.json")
    return read_golden(folder / "golden.json")


TASK_NAMES = ("vector", "states", "scores", "spans", "answers", "masks", "relevance", "images", "audio", "series")


@pytest.mark.parametrize("name", [*TOYS, *TASK_NAMES])
def test_runtime_gives_the_results_and_a_changed_model_does_not(files, name, tmp_path):
    golden = golden_of(files[name], tmp_path)
    assert len(golden["decode" if name in TOYS else "outputs"]) >= 2
    assert golden["generation" if name in TOYS else "results"]
    assert list(differences(golden, files[name])) == []
    model = onnx.load(files[name])
    _change(model.graph)
    onnx.save(model, tmp_path / "changed.onnx")
    assert list(differences(golden, tmp_path / "changed.onnx"))


def _change(graph):
    """Change the largest float weight of a graph; the sign of its first output, if it has no such weight."""
    weights = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    if weights:
        weight = max(weights, key=lambda tensor: np.prod(tensor.dims))
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[..., ::-1].copy() * 1.5, weight.name))
        return
    name = graph.output[0].name
    for node in graph.node:
        node.output[:] = ["before" if output == name else output for output in node.output]
    graph.node.append(onnx.helper.make_node("Neg", ["before"], [name]))


def test_model_without_a_first_token_has_steps_alone(tmp_path):
    path = Toy(start=()).write(tmp_path / "model.onnx")
    golden = golden_of(path, tmp_path)
    assert golden["decode"]
    assert "generation" not in golden
    assert list(differences(golden, path)) == []


def test_numbers_are_those_of_the_source(tmp_path):
    """Logits, greedy tokens and log-probabilities of an encoder-decoder are computed again in PyTorch."""
    torch.manual_seed(3)
    module = Seq2SeqTransformer(
        source_vocabulary=40, target_vocabulary=300, width=32, heads=2, encoder_layers=1, decoder_layers=1,
        feedforward=64, max_length=30, dropout=0.0,
    ).eval()  # fmt: skip
    path, place = tmp_path / "model.onnx", tmp_path / "golden.json"
    export(module, path, {"src": IDS, "tgt": IDS}, "tgt", special_tokens=TOKENS, golden=place)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["golden.json", "model.onnx"]
    golden = read_golden(place)
    assert list(differences(golden, path)) == []

    def logits(source, target):
        with torch.no_grad():
            return module(torch.tensor(source)[None], torch.tensor(target)[None])[0].numpy()

    assert {case["name"] for case in golden["decode"]} >= {"one row", "ragged rows", "a long prompt"}
    for case in golden["decode"]:
        for row, expected in zip(case["rows"], case["expected"], strict=True):
            stored = expected["logits"]
            ours = logits(decode_array(row["inputs"]["src"]), decode_array(row["tokens"]))[stored["positions"]]
            np.testing.assert_allclose(decode_array(stored["values"]), ours[:, stored["columns"]], atol=1e-4)
            assert [ids[0] for ids in stored["top_ids"]] == ours.argmax(-1).tolist()
            np.testing.assert_allclose(decode_array(stored["maximum"]), ours.max(-1), atol=1e-4)
            np.testing.assert_allclose(decode_array(stored["minimum"]), ours.min(-1), atol=1e-4)
    for case in golden["generation"]:
        (first, *others) = case["expected"]["sequences"]
        ids = first["token_ids"]
        logprobs = logits(decode_array(case["inputs"]["src"]), [1, *ids[:-1]])
        logprobs = logprobs - np.log(np.exp(logprobs).sum(-1, keepdims=True))
        np.testing.assert_allclose(decode_array(first["token_logprobs"]), logprobs[np.arange(len(ids)), ids], atol=1e-4)
        if case["options"]["num_beams"] == 1:
            assert not others
            assert (
                logprobs.argmax(-1).tolist()[: case["expected"]["decided_tokens"][0]]
                == (ids[: case["expected"]["decided_tokens"][0]])
            )
            best = np.sort(logprobs, -1)
            np.testing.assert_allclose(first["margins"], best[:, -1] - best[:, -2], atol=1e-4)
        else:
            scores = [sequence["score"] for sequence in (first, *others)]
            assert scores == sorted(scores, reverse=True)
            assert len(scores) == 4


def test_tokens_of_equal_logits_are_undecided(tmp_path):
    """Neighbouring ids have the same logits, so that each token has another one that is as likely."""
    path = Toy(seed=2).write(tmp_path / "model.onnx")
    assert any(case["expected"]["all_decided"] for case in make_golden(path)["generation"])
    model = onnx.load(path)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "out")
    columns = numpy_helper.to_array(weight).copy()
    columns[:, 2::2] = columns[:, 1::2]
    weight.CopyFrom(numpy_helper.from_array(columns, "out"))
    onnx.save(model, path)
    cases = make_golden(path)["generation"]
    assert not any(case["expected"]["all_decided"] for case in cases)
    for case in cases:
        (ids, *_), (count, *_) = (
            [s["token_ids"] for s in case["expected"]["sequences"]],
            case["expected"]["decided_tokens"],
        )
        if case["options"]["num_beams"] == 1:
            assert not any(ids[:count])  # 0 alone has no neighbour


@pytest.mark.parametrize("forged", [{"all_decided": False}, {"all_decided": False, "decided_tokens": [0]}])
def test_golden_file_that_calls_decided_tokens_undecided_is_compared_all_the_same(files, forged):
    """Its sequences are those of no model."""
    golden = make_golden(files["encoder-decoder"])
    case = next(
        case for case in golden["generation"] if case["expected"]["all_decided"] and case["options"]["num_beams"] == 1
    )
    case["expected"].update(forged)
    assert list(differences(golden, files["encoder-decoder"])) == []
    (sequence,) = case["expected"]["sequences"]
    sequence["token_ids"] = [token + 1 for token in sequence["token_ids"]]
    (found,) = differences(golden, files["encoder-decoder"])
    assert "token_ids is" in found


def test_stream_that_a_golden_file_calls_undecided_is_compared_all_the_same(files):
    golden = make_golden(files["encoder-decoder"])
    case = next(case for case in golden["streams"] if case["expected"]["decided"] and case["expected"]["pieces"])
    case["expected"] = {"pieces": ["forged"], "decided": False}
    (found,) = differences(golden, files["encoder-decoder"])
    assert "the pieces are" in found


def test_a_large_vocabulary_stays_below_two_megabytes(tmp_path):
    path = Toy(vocabulary=32000, tokenizer=False, encoder=False).write(tmp_path / "model.onnx")
    golden = golden_of(path, tmp_path)
    assert len(golden_bytes(golden)) < 2e6
    assert list(differences(golden, path)) == []


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-3),
        ({"precision": "fp16"}, 1e-2),
        ({"quantization": "int4"}, 5e-2),
        ({"quantization": "int4", "target": "web", "devices": ("webgpu",)}, 1e-3),
    ],
)
def test_tolerance_is_wider_for_files_that_round(files, tmp_path, changes, tolerance):
    path = with_manifest(files["encoder-decoder"], tmp_path / "model.onnx", **changes)
    assert make_golden(path)["tolerance"] == tolerance


def test_golden_of_one_seed_is_always_the_same(files):
    first, second = (golden_bytes(make_golden(files["encoder-decoder"])) for _ in range(2))
    assert first == second
    assert golden_bytes(make_golden(files["encoder-decoder"], seed=1)) != first


def test_pattern_is_the_documented_formula():
    def number(i, seed):
        h = (i + seed) * 0x9E3779B1 % 2**32
        h = (h ^ (h >> 15)) * 0x85EBCA6B % 2**32
        return (h ^ (h >> 13)) / 2**31 - 1

    expected = [number(i, 2**31 - 5) for i in range(12)]
    np.testing.assert_array_equal(pattern(2**31 - 5, (3, 4)).ravel(), np.array(expected, np.float32))
    many = pattern(7, (100_000,))
    assert abs(many.mean()) < 0.01
    assert abs(many.std() - 3**-0.5) < 0.01  # uniform


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1.5, -np.inf], [np.float32(0.1), 3]], np.float32),
        np.array(3),
        np.zeros((0, 4), np.int64),
        np.array([True, False]),
        np.array([1, 2], np.float16),
    ],
)
def test_arrays_round_trip(array):
    read = decode_array(json.loads(json.dumps(encode_array(array))))
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("count", [25, 2500])
def test_numbers_next_to_an_infinity_are_compared(count):
    array = np.linspace(-1, 1, count, dtype=np.float32)
    array[3] = -np.inf
    stored = sample(array, np.random.default_rng(0))
    assert "Infinity" not in json.dumps(stored)  # which is not JSON
    assert array_difference(stored, array, 1e-3) is None
    assert array_difference(stored, array + np.float32(0.5), 1e-3)
    finite = np.where(np.isfinite(array), array, 0)
    assert (array_difference(stored, finite, 1e-3) is None) == (3 not in stored.get("places", [3]))


def test_places_are_refused_before_the_export(tmp_path):
    module = LanguageModel(vocabulary=20, width=16, heads=2, layers=1, feedforward=32, max_length=20).eval()
    (tmp_path / "there.json").write_text("{}")
    for place, message in (
        (tmp_path / "model.onnx", "is the model's own place"),
        (tmp_path / "there.json", "exists: give --force"),
        (tmp_path / "none" / "golden.json", "there is no folder"),
    ):
        with pytest.raises(OutputError, match=message):
            export(module, tmp_path / "model.onnx", {"ids": IDS}, "ids", golden=place)
    assert [file.name for file in tmp_path.iterdir()] == ["there.json"]


def test_neither_file_is_written_if_the_disk_is_full(tmp_path, monkeypatch):
    sync, place = os.fsync, tmp_path / "golden.json"

    def full(descriptor):
        if os.path.samestat(os.fstat(descriptor), os.stat(place.with_name(".golden.json.part"))):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    module = LanguageModel(vocabulary=20, width=16, heads=2, layers=1, feedforward=32, max_length=20).eval()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"golden\.json cannot be written: No space left"):
        export(module, tmp_path / "model.onnx", {"ids": IDS}, "ids", special_tokens=TOKENS, golden=place)
    assert list(tmp_path.iterdir()) == []


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_command_writes_and_checks(files, tmp_path):
    place = tmp_path / "golden.json"
    assert run(files["scores"], "-o", place).exit_code == 0
    again = run(files["scores"], "-o", place)
    assert (again.exit_code, "exists: give --force" in again.stderr) == (1, True)
    assert run(files["scores"], "--check", place).exit_code == 0
    other = Toy(seed=5).write(tmp_path / "other.onnx")
    assert run(files["encoder-decoder"], "-o", place, "--force").exit_code == 0
    differing = run(other, "--check", place)
    assert differing.exit_code == 1
    assert "differs from" in differing.stderr
    assert "decode 0 (one row): row 0: position 0" in differing.stdout
    wrong_kind = run(files["scores"], "--check", place)
    assert wrong_kind.exit_code == 1
    assert len(wrong_kind.stderr.splitlines()) == 1


def test_command_never_replaces_the_model(files, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(files["scores"].read_bytes())
    (tmp_path / "link.json").symlink_to(path)
    for place in (path, tmp_path / "link.json", tmp_path / "model.onnx.data"):
        refused = run(path, "-o", place, "--force")
        assert (refused.exit_code, "is the model's own place" in refused.stderr) == (1, True)
    assert path.read_bytes() == files["scores"].read_bytes()


def test_command_refuses_places_and_options_before_the_work(files, tmp_path):
    for model, arguments, message in (
        (".", [], ". is not a file: give a model file"),
        (tmp_path / "none.onnx", [], "none.onnx does not exist"),
        (files["scores"], ["-o", tmp_path, "--force"], "it is a folder"),
        (files["scores"], ["-o", tmp_path / "none" / "golden.json"], "there is no folder"),
    ):
        refused = run(model, *arguments)
        assert refused.exit_code == 1
        assert message in refused.stderr
    for option in (["--force"], ["--seed", 0], ["-o", tmp_path / "golden.json"]):
        assert run(files["scores"], "--check", tmp_path / "golden.json", *option).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_golden_file_of_another_kind_of_model_is_refused(files):
    for one, other in (("scores", "decoder-only"), ("decoder-only", "scores")):
        with pytest.raises(InputError, match="belongs to a model of another kind"):
            list(differences(make_golden(files[one]), files[other]))


def cut(golden, kind, count):
    golden[kind] = golden[kind][:count]


def without(golden, kind):
    del golden[kind]


def tolerate(golden, tolerance):
    golden["tolerance"] = tolerance


def state(golden, name, value):
    golden["file"][name] = value


def first_logits(golden):
    return golden["decode"][0]["expected"][0]["logits"]


def keep_last_position(golden):
    stored = first_logits(golden)
    keep = {
        name: encode_array(decode_array(stored[name])[-1:]) for name in ("values", "minimum", "maximum", "top_values")
    }
    stored |= {"positions": stored["positions"][-1:], "top_ids": stored["top_ids"][-1:], **keep}


def keep_one_column(golden):
    stored = first_logits(golden)
    stored |= {"columns": stored["columns"][:1], "values": encode_array(decode_array(stored["values"])[:, :1])}


def scale_score(sequence):
    sequence["score"] *= 1.01


def cut_logprobs(sequence):
    sequence["token_logprobs"] = encode_array(decode_array(sequence["token_logprobs"])[:1])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("decoder-only", lambda golden: cut(golden, "decode", 3), "it lacks 1 of the 4 cases of decode"),
        ("decoder-only", lambda golden: cut(golden, "generation", 4), "it lacks 6 of the 10 cases of generation"),
        ("decoder-only", lambda golden: cut(golden, "generation", 0), "it lacks 10 of the 10 cases of generation"),
        ("decoder-only", lambda golden: without(golden, "streams"), "it lacks 5 of the 5 cases of streams"),
        ("scores", lambda golden: cut(golden, "outputs", 1), "it lacks 1 of the 2 cases of outputs"),
        ("scores", lambda golden: cut(golden, "results", 1), "it lacks .* cases of results"),
        ("decoder-only", lambda golden: golden["decode"][1].update(rows=[]), "it lacks 1 of the 4 cases of decode"),
        (
            "decoder-only",
            lambda golden: tolerate(golden, 1e300),
            r"its tolerance is 1e\+300, and that of its model 0.001",
        ),
        ("decoder-only", lambda golden: tolerate(golden, 5e-2), "its tolerance is 0.05, and that of its model 0.001"),
        ("decoder-only", lambda golden: tolerate(golden, "1e-3"), "its tolerance is 1e-3"),
        (
            "decoder-only",
            lambda golden: (state(golden, "quantization", "int8"), tolerate(golden, 5e-2)),
            "its quantization is 'int8', and that of its model 'none'",
        ),
        ("decoder-only", keep_last_position, "positions are stored in part"),
        ("decoder-only", keep_one_column, "positions are stored in part"),
    ],
)
def test_golden_file_that_demands_less_than_the_format_is_refused(files, name, change, message):
    golden = make_golden(files[name])
    change(golden)
    with pytest.raises(InputError, match=message):
        list(differences(golden, files[name]))


def test_golden_file_of_another_form_keeps_its_tolerance(files, tmp_path):
    """The tolerance follows from the form of the golden file, and not from that of the compared one."""
    half = with_manifest(files["decoder-only"], tmp_path / "half.onnx", precision="fp16")
    assert list(differences(make_golden(half), files["decoder-only"])) == []
    assert list(differences(make_golden(files["decoder-only"]), half)) == []


def test_score_follows_from_its_logprobs(files):
    golden = make_golden(files["decoder-only"])
    cases = [case["expected"] for case in golden["generation"] if case["expected"]["all_decided"]]
    assert cases
    for change, message in (
        (scale_score, "score is .* by its token_logprobs"),
        (cut_logprobs, "token_logprobs: the shape"),
    ):
        changed = copy.deepcopy(golden)
        for case in changed["generation"]:
            for sequence in case["expected"]["sequences"]:
                change(sequence)
        found = list(differences(changed, files["decoder-only"]))
        assert len(found) == sum(len(case["sequences"]) for case in cases)
        assert all(re.search(message, difference) for difference in found)


def test_range_of_logits_cannot_be_widened(files):
    """The range decides how far logits may differ."""
    golden = make_golden(files["decoder-only"])
    minimum = decode_array(first_logits(golden)["minimum"]) - np.float32(1e30)
    first_logits(golden)["minimum"] = encode_array(minimum)
    (found,) = differences(golden, files["decoder-only"])
    assert "its range" in found


HUGE = {"dtype": "int64", "shape": [10**9], "pattern": 1}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["tolerance"], math.inf),
        (["tolerance"], -1),
        (["tolerance"], math.nan),
        (["decode"], []),
        (["decode", 0, "rows", 0, "tokens"], HUGE),
        (["decode", 0, "rows", 0, "tokens"], {**HUGE, "shape": [-1]}),
        (["decode", 0, "rows", 0, "tokens", "dtype"], "V1000000000"),
        (["decode", 0, "rows", 0, "tokens", "dtype"], []),
        (["decode", 0, "steps", 0], 10**9),
        (["decode", 0, "steps", 0], 0),
        (["decode", 0, "prompts", 0], -1),
        (["decode", 0, "expected", 0, "logits", "maximum"], {**HUGE, "dtype": "float32"}),
    ],
)
def test_changed_golden_file_is_refused(files, place, value):
    golden = make_golden(files["decoder-only"])
    *path, last = place
    inner = golden
    for key in path:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(InputError, match=r"is damaged|does not have the prompt and the steps"):
        list(differences(golden, files["decoder-only"]))


def test_missing_outputs_are_a_difference(files):
    golden = make_golden(files["scores"])
    golden["outputs"][0]["expected"][0] = {}
    (difference,) = differences(golden, files["scores"])
    assert difference.startswith("outputs 0 (one row): row 0: the outputs are ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "tformer-golden", "version": 2, "tolerance": 0.001}', "is damaged"),
        ("{", "is not a golden file"),
        ("[]", "is not a golden file"),
        ('{"format": "tformer-golden", "version": 99}', "is of version 99"),
        ('{"format": "tformer-golden", "version": 2}', "is damaged"),
        ('{"format": "tformer-golden", "version": 2, "tolerance": 1, "decode": [{}]}', "is damaged"),
    ],
)
def test_damaged_golden_file_is_refused(files, tmp_path, text, message):
    (tmp_path / "golden.json").write_text(text)
    with pytest.raises(InputError, match=message):
        list(differences(read_golden(tmp_path / "golden.json"), files["encoder-decoder"]))
