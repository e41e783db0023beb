"""tformer-export writes a file that decodes as its source module, and a report, or fails with one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tformer_export import save_checkpoint
from tformer_export.quantize import Degradation
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import Model
from tformer_runtime.format.manifest import SpecialTokens
from tformer_runtime.format.model_file import read_manifest

ARGUMENTS = {
    "source_vocabulary": 12, "target_vocabulary": 12, "width": 16, "heads": 2, "encoder_layers": 1,
    "decoder_layers": 1, "feedforward": 64, "max_length": 20, "dropout": 0.0,
}  # fmt: skip
LETTERS = {letter: i for i, letter in enumerate("-<>abcdefghi")}
FACTORIES = '''
import torch
from torch import nn

from tformer_models.seq2seq import Seq2SeqTransformer

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class Plain(nn.Module):
    """A language model without attention, quick to export. `open`: whether it subtracts the mean of all positions."""

    def __init__(self, open=False):
        super().__init__()
        self.embed, self.places, self.out, self.open = nn.Embedding(12, 8), nn.Embedding(20, 8), nn.Linear(8, 12), open

    def forward(self, tgt):
        x = self.embed(tgt) + self.places(torch.arange(tgt.shape[1]))
        return self.out(x - x.mean(1, keepdim=True) if self.open else x)


def plain():
    torch.manual_seed(0)
    return Plain(False), {"tgt": IDS}


def looks_ahead():
    return Plain(True), {"tgt": IDS}


def seq2seq():
    return Seq2SeqTransformer(**ARGUMENTS), {"src": IDS, "tgt": IDS}


def nothing():
    return None


def broken():
    raise ValueError("no such weights")


def typo():
    return Plain(False), {"target": IDS}


ARGUMENTS = %r
'''


def tokenizer(vocabulary=LETTERS):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="-"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer.to_str()


def seq2seq(seed=5):
    torch.manual_seed(seed)
    return Seq2SeqTransformer(**ARGUMENTS).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "letters.pt"
    save_checkpoint(
        seq2seq(), path, factory="tformer_models.seq2seq:Seq2SeqTransformer", arguments=ARGUMENTS,
        tokenizer=tokenizer(), special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
        generation_defaults={"max_new_tokens": 7},
        max_length=20,
    )  # fmt: skip
    return path


@pytest.fixture
def plain(folder):
    """Save a checkpoint of `Plain` in the current folder and return the arguments that name it."""
    import factories

    save_checkpoint(
        factories.plain()[0], "plain.pt", factory="factories:Plain", arguments={}, tokenizer=tokenizer(),
        special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0}, max_length=20,
    )  # fmt: skip
    return "plain.pt", "--trust", "factories"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Enter a new folder, with `factories.py` and a package of the same content on the import path."""
    monkeypatch.chdir(tmp_path)
    imports = tmp_path.parent / f"{tmp_path.name}-imports"
    (imports / "packaged").mkdir(parents=True)
    for place in (imports / "factories.py", imports / "packaged" / "factories.py"):
        place.write_text(FACTORIES % ARGUMENTS)
    monkeypatch.syspath_prepend(imports)
    yield tmp_path
    for name in ("factories", "packaged", "packaged.factories"):
        sys.modules.pop(name, None)


def test_checkpoint_decodes_as_its_module_and_report_describes_the_file(checkpoint, folder, run):
    status, err = run(checkpoint, "-o", "out.onnx", "--report", "report.json")
    assert status == 0
    assert sorted(os.listdir()) == ["out.onnx", "report.json"]
    for text in ("letters.pt", "out.onnx", "2 tensors a step", "parity", "greedy tokens", "seconds"):
        assert text in err
    report = json.loads(Path("report.json").read_text())
    assert report["source"] == "letters.pt"
    assert report["path"] == "out.onnx"
    assert report["size"] == Path("out.onnx").stat().st_size
    assert report["max_length"] == 20
    assert report["parameters"] == sum(p.numel() for p in seq2seq().parameters())
    assert report["parity"]["tokens"] == report["parity"]["tokens_equal"] > 0
    assert report["quantization"] == "none"
    model = Model.load("out.onnx", "cpu")
    tokens, module, source = [1], seq2seq(), torch.tensor([[LETTERS[c] for c in "face"]])
    with torch.no_grad():
        while len(tokens) < 8 and tokens[-1] != 2:
            tokens.append(int(module(source, torch.tensor([tokens]))[0, -1].argmax()))
    result = model.generate("face")
    assert list(result.token_ids) == tokens[1:]
    assert result.text.split() == [list(LETTERS)[t] for t in tokens[1:] if t != 2]


def test_options_are_recorded_in_manifest_and_report(plain, run):
    Path("letters.json").write_text(tokenizer(dict(reversed(LETTERS.items()))))
    arguments = ("--quantize", "int8", "--target", "portable", "--max-length", 15, "--task", "spelling")
    status, err = run(*plain, "-o", "out.onnx", *arguments, "--tokenizer", "letters.json", "--report", "r.json")
    assert status == 0
    assert "int8" in err
    report = json.loads(Path("r.json").read_text())
    assert report["quantization"] == "int8"
    assert report["target"] == "portable"
    assert 0 <= report["degradation"]["token_agreement"] <= 1
    manifest = Model.load("out.onnx", "cpu").manifest
    assert (manifest.max_length, manifest.task, manifest.quantization) == (15, "spelling", "int8")
    assert manifest.target == "portable"
    assert manifest.tokenizers == (Path("letters.json").read_text(),)


def test_factory_module_decodes_as_in_pytorch(folder, run):
    assert run("factories:plain", "--step-input", "tgt")[0] == 0
    assert os.listdir() == ["plain.onnx"]
    import factories

    module = factories.plain()[0]
    model = Model.load("plain.onnx", "cpu")
    ids = [3, 4, 5]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    assert list(model.generate([3, 4, 5], max_new_tokens=6).token_ids) == ids[3:]


def test_factory_in_a_package_is_exported(folder, run):
    status, err = run("packaged.factories:plain", "--step-input", "tgt", "-o", "out.onnx")
    assert status == 0, err
    assert os.listdir() == ["out.onnx"]


def test_state_dict_with_a_factory_scores_as_its_module(folder, run):
    import factories

    torch.manual_seed(9)
    module = factories.Plain()
    torch.save(module.state_dict(), "weights.pt")
    assert run("weights.pt", "--factory", "factories:plain", "--step-input", "tgt", "--pad-id", "0")[0] == 0
    assert sorted(os.listdir()) == ["weights.onnx", "weights.pt"]
    scores = Model.load("weights.onnx", "cpu").score([3, 4, 5], [6, 7, 8])
    with torch.no_grad():
        logits = module(torch.tensor([[3, 4, 5, 6, 7]]))
    expected = logits.log_softmax(-1)[0, [2, 3, 4], [6, 7, 8]].numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_pickled_module_needs_trust_pickle(folder, run, refused):
    import factories

    torch.save(factories.Plain(), "pickle.pt")
    message = refused("pickle.pt", "-o", "out.onnx")
    assert "unpickling runs code" in message
    assert "--trust-pickle" in message
    special = ("--bos-id", "1", "--eos-id", "2", "--pad-id", "0")
    assert run("pickle.pt", "-o", "out.onnx", "--trust-pickle", "--step-input", "tgt", *special)[0] == 0
    assert read_manifest("out.onnx").special_tokens == SpecialTokens((1,), (2,), 0)
    assert sorted(os.listdir()) == ["out.onnx", "pickle.pt"]


def test_existing_output_is_overwritten_only_with_force_and_success(plain, run, refused):
    Path("out.onnx").write_text("old")
    assert "exists: give --force" in refused(*plain, "-o", "out.onnx")
    assert Path("out.onnx").read_text() == "old"
    refused("factories:looks_ahead", "--step-input", "tgt", "-o", "out.onnx", "--force")
    assert Path("out.onnx").read_text() == "old"
    assert run(*plain, "-o", "out.onnx", "--force")[0] == 0
    assert Model.load("out.onnx", "cpu").generate("face").token_ids


def test_output_in_a_missing_folder_is_refused(checkpoint, folder, refused):
    assert refused(checkpoint, "-o", "none/out.onnx") == "none/out.onnx cannot be written: there is no folder none"


def test_output_that_is_a_folder_is_refused(checkpoint, folder, refused):
    Path("out.onnx").mkdir()
    assert "it is a folder" in refused(checkpoint, "-o", "out.onnx", "--force")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_in_a_read_only_folder_is_refused(checkpoint, folder, refused):
    Path("closed").mkdir(mode=0o555)
    assert "permission denied" in refused(checkpoint, "-o", "closed/out.onnx")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_output_on_a_file_system_without_new_files_is_refused(checkpoint, folder, refused):
    assert "/proc/out.onnx cannot be written" in refused(checkpoint, "-o", "/proc/out.onnx")


def test_refusal_is_written_to_the_report(folder, run):
    status, err = run("factories:looks_ahead", "--step-input", "tgt", "-o", "out.onnx", "--report", "report.json")
    assert status == 1
    assert sorted(path for path in os.listdir() if path.endswith((".onnx", ".json"))) == ["report.json"]
    report = json.loads(Path("report.json").read_text())
    assert report["kind"] == "UnsupportedModelError"
    assert report["source"] == "factories:looks_ahead"
    assert f"tformer-export: {report['refused']}\n" == err
    assert "factories.py:19: return self.out(x - x.mean(1, keepdim=True) if self.open else x)" in report["refused"]


def test_unexpected_error_is_one_sentence_and_its_traceback_is_in_the_report(folder, run, monkeypatch):
    def fail(*_arguments):
        raise ZeroDivisionError("an error of a library")

    monkeypatch.setattr("tformer_export.compile.analyse_model", fail)
    status, err = run("factories:plain", "--step-input", "tgt", "-o", "out.onnx", "--report", "report.json")
    assert status == 1
    assert err.startswith("tformer-export: the export failed in its phase 'analysis', at ")
    assert "ZeroDivisionError: an error of a library. This model was not foreseen" in err
    assert len(err.splitlines()) == 1
    report = json.loads(Path("report.json").read_text())
    assert report["traceback"].startswith("Traceback (most recent call last):")
    assert report["traceback"].endswith("ZeroDivisionError: an error of a library\n")


@pytest.mark.parametrize("place", ["compile.analyse_model", "sources.factory.finish"])
def test_missing_memory_is_one_sentence(place, folder, run, monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.")

    monkeypatch.setattr(f"tformer_export.{place}", fail)
    status, err = run("factories:plain", "--step-input", "tgt", "-o", "out.onnx")
    assert status == 1
    assert err.startswith("tformer-export: there is not enough memory (4 GiB more were asked for): an export needs ")
    assert len(err.splitlines()) == 1


def test_report_in_a_missing_folder_is_refused(checkpoint, folder, refused):
    assert "none/report.json cannot be written" in refused(checkpoint, "-o", "out.onnx", "--report", "none/report.json")


@pytest.mark.parametrize("source", ["none.pt", "folder/none", "none"])
def test_missing_source_is_refused(source, folder, refused):
    assert f"there is no file or folder {source}" in refused(source, "-o", "out.onnx")


def test_folder_without_a_model_is_refused(folder, refused):
    Path("empty").mkdir()
    assert "empty is not a Hugging Face folder" in refused("empty", "-o", "out.onnx")


@pytest.mark.parametrize("share", [0, 0.5, 0.95])
def test_truncated_checkpoint_is_refused(share, checkpoint, folder, refused):
    content = checkpoint.read_bytes()
    Path("cut.pt").write_bytes(content[: int(len(content) * share)])
    assert refused("cut.pt", "-o", "out.onnx") == "cut.pt is not a PyTorch checkpoint, or is damaged"


def test_pickle_of_another_type_is_refused(folder, refused):
    torch.save({"weights": Path("x")}, "pickle.pt")
    assert "holds a dict, not a module" in refused("pickle.pt", "-o", "out.onnx", "--trust-pickle")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("factories:none", "the module factories has no none"),
        ("missing_module:make", "there is no module missing_module"),
        ("packaged.missing:make", "there is no module packaged.missing"),
        ("factories:nothing", "factories:nothing returned NoneType"),
        ("factories:broken", "no such weights"),
        ("factories:typo", "forward has no parameter 'target'"),
        ("factories:IDS", "factories:IDS is not callable"),
    ],
)
def test_failing_factory_is_refused(spec, message, folder, refused):
    assert message in refused(spec, "--step-input", "tgt", "-o", "out.onnx")


def test_missing_factory_for_weights_is_refused(folder, refused):
    torch.save(seq2seq().state_dict(), "weights.pt")
    for spec in ("factories:none", "missing_module:make", "no path"):
        assert spec.rsplit(":", 1)[0] in refused("weights.pt", "--factory", spec, "-o", "out.onnx")


def test_weights_of_other_shapes_are_refused(folder, refused):
    torch.save(Seq2SeqTransformer(**{**ARGUMENTS, "width": 32}).state_dict(), "weights.pt")
    message = refused("weights.pt", "--factory", "factories:seq2seq", "--step-input", "tgt", "-o", "out.onnx")
    assert "do not fit" in message
    assert "(12, 32), not (12, 16)" in message


def test_unknown_step_input_is_refused(checkpoint, folder, refused):
    assert "target" in refused(checkpoint, "-o", "out.onnx", "--step-input", "target")


def test_max_length_beyond_the_position_table_is_refused(plain, refused):
    message = refused(*plain, "-o", "out.onnx", "--max-length", 21)
    assert message.startswith("the model cannot run at a length of 21")


def test_invalid_tokenizer_file_is_refused(checkpoint, folder, refused):
    Path("tokenizer.json").write_text("once upon a time")
    message = refused(checkpoint, "-o", "out.onnx", "--tokenizer", "tokenizer.json")
    assert message.startswith("--tokenizer tokenizer.json is not in tokenizers' JSON format")
    assert "cannot be read" in refused(checkpoint, "-o", "out.onnx", "--tokenizer", "none.json")


def test_invalid_chat_template_is_refused(checkpoint, folder, refused):
    message = refused(checkpoint, "-o", "out.onnx", "--chat-template", "none.jinja")
    assert message.startswith("--chat-template none.jinja cannot be read: No such file")
    Path("chat.jinja").write_bytes(b"\xff")
    assert refused(checkpoint, "-o", "out.onnx", "--chat-template", "chat.jinja").endswith("is not UTF-8")
    Path("chat.jinja").write_text("{{ messages[0].content }}")
    assert "but this model reads src and tgt" in refused(checkpoint, "-o", "out.onnx", "--chat-template", "chat.jinja")


def test_model_that_looks_ahead_is_refused_with_its_source_line(folder, refused):
    message = refused("factories:looks_ahead", "--step-input", "tgt", "-o", "out.onnx")
    assert "`mean`" in message
    line = next(i for i, text in enumerate(FACTORIES.splitlines(), 1) if "x.mean" in text)
    assert f"factories.py:{line}: return self.out(x - x.mean(1, keepdim=True)" in message
    assert "looks ahead" in message


def test_optimize_for_is_recorded_in_manifest_and_report(plain, run):
    arguments = ("--quantize", "int4", "--optimize-for", "latency", "--report", "r.json")
    status, err = run(*plain, "-o", "out.onnx", *arguments)
    assert status == 0
    assert "int4 for latency" in err
    report = json.loads(Path("r.json").read_text())
    assert report["optimized_for"] == "latency"
    assert report["products"] == {}  # all products are too small to gain speed
    manifest = Model.load("out.onnx", "cpu").manifest
    assert (manifest.quantization, manifest.optimized_for) == ("int4", "latency")


def test_optimize_for_without_a_choice_of_kernels_is_refused(plain, refused):
    message = refused(*plain, "-o", "out.onnx", "--optimize-for", "latency")
    assert "latency chooses among kernels of quantised products" in message
    message = refused(
        *plain, "-o", "out.onnx", "--optimize-for", "latency", "--quantize", "int8", "--target", "portable"
    )
    assert "leave out either it or the target portable" in message


def test_loss_beyond_max_degradation_is_refused(plain, refused, monkeypatch):
    """The measured loss is replaced, because the loss of these weights may be below the limit."""
    measured_loss = Degradation(
        token_agreement=0.9, perplexity=3.0, perplexity_before=2.0, speed=1.0, row_difference=0.0
    )
    monkeypatch.setattr("tformer_export.quantize.apply.measure", lambda *_, **__: measured_loss)
    message = refused(*plain, "-o", "out.onnx", "--quantize", "int8", "--max-degradation", "0.09")
    assert "quantisation changes 10.0% of the tokens and 9.0% is allowed" in message


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["model.pt", "--quantize", "int5"],
        ["model.pt", "--target", "tpu"],
        ["model.pt", "--max-length", "1"],
        ["model.pt", "--max-degradation", "2"],
        ["model.pt", "--nonsense"],
        ["model.pt", "another.pt"],
    ],
)
def test_invalid_usage_exits_with_status_2(arguments, folder, run):
    status, err = run(*arguments)
    assert status == 2
    assert "Usage: " in err
    assert os.listdir() == []


def test_installed_command_reports_a_missing_source(folder):
    program = Path(sys.executable).with_name("tformer-export")
    result = subprocess.run([program, "none.pt"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "tformer-export: there is no file or folder none.pt: name a checkpoint, a Hugging Face folder or its hub's "
        "org/name, or module:factory"
    ]


def test_golden_file_is_written_with_the_model(plain, folder, run):
    arguments = (*plain, "-o", "out.onnx", "--golden", "out.golden.json", "--quiet")
    assert run(*arguments) == (0, "")
    assert sorted(os.listdir()) == ["out.golden.json", "out.onnx", "plain.pt"]
    golden = json.loads(Path("out.golden.json").read_text())
    assert golden["format"] == "tformer-golden"
    assert golden["file"]["sha256"] == hashlib.sha256(Path("out.onnx").read_bytes()).hexdigest()
    before = Path("out.onnx").read_bytes()
    Path("out.onnx").rename("first.onnx")
    status, err = run(*arguments)
    assert (status, err.count("\n")) == (1, 1)
    assert "out.golden.json exists: give --force" in err
    assert not Path("out.onnx").exists()
    assert run(*arguments, "--force") == (0, "")
    assert Path("out.onnx").read_bytes() == before
