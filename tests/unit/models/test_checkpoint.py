"""Checkpoints: a round trip keeps all fields, invalid files are refused, and no code of a file is executed."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from tformer_export.common.checkpoint import import_callable, load_checkpoint, save_checkpoint
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime.base.errors import OptionError, OutputError, SourceError

FACTORY = "tformer_models.seq2seq:Seq2SeqTransformer"
SIZES = {"width": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feedforward": 8}
ARGUMENTS = {"source_vocabulary": 7, "target_vocabulary": 9, **SIZES}


def tiny():
    torch.manual_seed(0)
    return Seq2SeqTransformer(**ARGUMENTS).eval()


@pytest.fixture
def saved(tmp_path):
    """Return the path of a valid checkpoint."""
    path = tmp_path / "model.pt"
    save_checkpoint(tiny(), path, factory=FACTORY, arguments=ARGUMENTS)
    return path


def change(path, **values):
    """Overwrite entries of a checkpoint's dictionary; the value ... removes an entry."""
    content = torch.load(path, weights_only=True) | values
    torch.save({name: value for name, value in content.items() if value is not ...}, path)


def refusal(path):
    """Return the message of the refusal of a file, which names the path and is one line."""
    with pytest.raises(SourceError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_checkpoint_round_trip(tmp_path):
    model, path = tiny(), tmp_path / "model.pt"
    save_checkpoint(
        model,
        path,
        factory=FACTORY,
        arguments=ARGUMENTS,
        tokenizer={"src": "{}", "tgt": "[]"},
        task="text2text-generation",
        step_input="tgt",
        special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
        generation_defaults={"num_beams": 4},
        max_length=64,
    )
    loaded = load_checkpoint(path)
    assert loaded.arguments == ARGUMENTS
    assert loaded.tokenizers == {"src": "{}", "tgt": "[]"}
    assert (loaded.task, loaded.step_input, loaded.max_length) == ("text2text-generation", "tgt", 64)
    assert loaded.special_tokens == {"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0}
    assert loaded.generation_defaults == {"num_beams": 4}
    rebuilt = loaded.build()
    assert not rebuilt.training
    assert rebuilt.output.weight is rebuilt.target.tokens.weight
    src, tgt = torch.randint(1, 7, (2, 5)), torch.randint(1, 9, (2, 4))
    assert torch.equal(rebuilt(src, tgt), model(src, tgt))


def test_single_tokenizer_applies_to_every_input(tmp_path):
    save_checkpoint(tiny(), tmp_path / "m.pt", factory=FACTORY, arguments=ARGUMENTS, tokenizer="{}")
    assert load_checkpoint(tmp_path / "m.pt").tokenizers == {"*": "{}"}


def test_arguments_must_be_json(tmp_path):
    with pytest.raises(OptionError, match="arguments"):
        save_checkpoint(tiny(), tmp_path / "m.pt", factory=FACTORY, arguments={"dtype": torch.float32})
    assert list(tmp_path.iterdir()) == []


class Trap(nn.Module):
    """A module whose unpickling creates a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("new_format", [True, False])
def test_pickled_module_is_refused_and_not_run(tmp_path, new_format):
    path, side_effect = tmp_path / "model.pt", tmp_path / "side-effect"
    torch.save(Trap(str(side_effect)), path, _use_new_zipfile_serialization=new_format)
    message = refusal(path)
    assert "runs code" in message
    assert "--trust-pickle" in message
    assert not side_effect.exists()


def test_saved_module_is_refused(tmp_path):
    torch.save(tiny(), tmp_path / "model.pt")
    assert "runs code" in refusal(tmp_path / "model.pt")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.99])
def test_truncated_file_is_reported_as_damaged(saved, fraction):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * fraction)])
    assert "damaged" in refusal(saved)


@pytest.mark.parametrize(
    "content", [b"\x00" * 100, b"contents:\nnothing\n", b"\x80\x02garbage", b"PK\x03\x04" + b"x" * 50]
)
def test_other_file_format_is_refused(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert "not a PyTorch checkpoint" in refusal(path)


def test_error_names_a_missing_file_and_a_folder(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.pt")
    assert "directory" in refusal(tmp_path)


def test_error_for_a_bare_state_dict_names_save_checkpoint(tmp_path):
    torch.save(tiny().state_dict(), tmp_path / "model.pt")
    assert "save_checkpoint()" in refusal(tmp_path / "model.pt")


def test_error_for_a_newer_version_asks_for_an_upgrade(saved):
    change(saved, version=3)
    message = refusal(saved)
    assert "version 3" in message
    assert "upgrade" in message


def test_error_for_an_older_version_names_save_checkpoint(saved):
    change(saved, version=1)
    message = refusal(saved)
    assert "version 1" in message
    assert "save_checkpoint()" in message


def test_error_names_all_missing_keys(saved):
    change(saved, arguments=..., special_tokens=...)
    message = refusal(saved)
    assert "arguments" in message
    assert "special_tokens" in message


@pytest.mark.parametrize(
    "invalid", [{"state_dict": [1]}, {"state_dict": {"a": 1}}, {"arguments": "x"}, {"step_input": 3}]
)
def test_error_names_values_of_the_wrong_type(saved, invalid):
    change(saved, **invalid)
    assert next(iter(invalid)) in refusal(saved)


def test_error_lists_all_mismatched_weights(saved):
    weights = torch.load(saved, weights_only=True)["state_dict"]
    del weights["output.bias"], weights["encoder.0.self_attention.query.bias"]
    weights["encoder.0.self_attention.key.bias"] = torch.zeros(3)
    weights["extra"] = torch.zeros(1)
    change(saved, state_dict=weights)
    with pytest.raises(SourceError) as caught:
        load_checkpoint(saved).build()
    for name in ("output.bias", "query.bias", "key.bias is (3,), not (8,)", "unexpected: extra"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_such_package.models:make", "no_such_package"),
        ("tformer_models.seq2seq:NoSuchModel", "NoSuchModel"),
        ("tformer_models.seq2seq:POSITIONS", "not callable"),
        ("tformer_models.seq2seq", "package.module:callable"),
        (":make", "package.module:callable"),
    ],
)
def test_error_names_a_missing_factory(saved, factory, message):
    change(saved, factory=factory)
    with pytest.raises(SourceError, match=message):
        load_checkpoint(saved).build()


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Return the name of an importable module that writes a file when it is imported, and the file."""
    trace = tmp_path / "trace"
    (tmp_path / "stranger.py").write_text(
        f"import os, subprocess, torch\nopen({str(trace)!r}, 'a').close()\n"
        "class Model(torch.nn.Module):\n    pass\n"
        "def make():\n    return Model()\ndef ends():\n    raise SystemExit(3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield trace
    sys.modules.pop("stranger", None)


@pytest.mark.parametrize(
    ("factory", "arguments", "trust"),
    [
        ("subprocess:check_output", {"args": ["touch", "TRACE"]}, []),
        ("os:system", {"command": "touch TRACE"}, []),
        ("os:abort", {}, []),
        ("stranger:Model", {}, []),
        ("stranger.Model:make", {}, []),
        ("stranger:make", {}, ["strange", "stranger.models", "tformer_models"]),
        ("tformer_models.cli:main", {}, []),
        ("tformer_models.curves:io.open", {"file": "TRACE", "mode": "w"}, []),
        ("tformer_models.recipe:Path.write_text", {"self": "TRACE", "data": ""}, []),
        ("torch.nn:Module.__class__", {"x": 1}, []),
        ("torch:load", {"f": "TRACE"}, []),
        ("torch.nn.functional:linear", {}, []),
    ],
)
def test_factory_that_nobody_trusts_is_not_called(saved, stranger, factory, arguments, trust):
    arguments = {name: eval(repr(value).replace("TRACE", str(stranger))) for name, value in arguments.items()}
    change(saved, factory=factory, arguments=arguments)
    with pytest.raises(
        SourceError, match=rf"names the factory {re.escape(factory)}.*: if you trust it, say so, --trust"
    ):
        load_checkpoint(saved).build(trust)
    assert not stranger.exists()


def test_trusted_factory_is_called(saved, stranger):
    change(saved, factory="stranger:make", arguments={}, state_dict={})
    assert type(load_checkpoint(saved).build(["stranger"])).__name__ == "Model"
    assert stranger.exists()
    change(saved, factory="stranger:subprocess.check_output", arguments={"args": ["true"]})
    with pytest.raises(SourceError, match="--trust subprocess"):
        load_checkpoint(saved).build(["stranger"])
    change(saved, factory="stranger:ends", arguments={})
    with pytest.raises(SourceError, match="the factory stranger:ends failed with the arguments in the checkpoint: 3"):
        load_checkpoint(saved).build(["stranger"])


def test_error_names_a_failing_factory_and_its_reason(saved):
    change(saved, arguments=ARGUMENTS | {"heads": 3})
    with pytest.raises(SourceError, match=r"Seq2SeqTransformer failed.* 3 heads"):
        load_checkpoint(saved).build()


def test_error_names_a_module_that_fails_on_import(tmp_path, monkeypatch):
    (tmp_path / "broken_factory.py").write_text("import no_such_dependency\n")
    (tmp_path / "raising_factory.py").write_text("raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SourceError, match=r"no_such_dependency .imported by broken_factory"):
        import_callable("broken_factory:make")
    with pytest.raises(SourceError, match="raising_factory failed: RuntimeError: boom"):
        import_callable("raising_factory:make")


def test_missing_output_folder_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match="cannot be written"):
        save_checkpoint(tiny(), tmp_path / "none" / "m.pt", factory=FACTORY, arguments=ARGUMENTS)


def test_interrupted_write_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def fail_after_first_bytes(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail_after_first_bytes)
    with pytest.raises(OutputError, match="No space left"):
        save_checkpoint(tiny(), saved, factory=FACTORY, arguments=ARGUMENTS)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_checkpoint_module_imports_without_torch():
    code = "import sys, tformer_export.common.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
