"""Folders and files from strangers: nothing outside of them is read, and nothing that never ends."""

from __future__ import annotations

import json
import os

import pytest
import torch

from tformer_export.sources import load_source
from tformer_export.sources.untrusted_files import inside, read_json
from tformer_runtime import SourceError


@pytest.mark.parametrize(
    "name", ["../secret", "a/../../secret", "/etc/passwd", "C:\\secret", "\\\\server\\share", "a\0b", ".."]
)
def test_name_that_leads_out_of_a_folder_is_refused(tmp_path, name):
    with pytest.raises(SourceError, match="is outside of its folder"):
        inside(tmp_path, name, "modules.json")


@pytest.mark.parametrize("name", ["1_Pooling", "", "./2_Dense", "a..b/c"])
def test_name_within_a_folder_is_kept(tmp_path, name):
    assert inside(tmp_path, name, "modules.json") == tmp_path / name


@pytest.fixture
def folder(tmp_path):
    """Return a folder of a small model in two files of weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model", max_shard_size="8KB")
    return tmp_path / "model"


def test_index_of_weights_outside_of_the_folder_is_refused(folder):
    index = folder / "model.safetensors.index.json"
    assert load_source(folder).name
    content = json.loads(index.read_text())
    file = next(iter(content["weight_map"].values()))
    os.rename(folder / file, folder.parent / file)
    content["weight_map"] |= dict.fromkeys((n for n, f in content["weight_map"].items() if f == file), f"../{file}")
    index.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=rf"index\.json names '\.\./{file}', which is outside of its folder"):
        load_source(folder)
    index.write_text("[]")
    with pytest.raises(SourceError, match="holds no weight_map"):
        load_source(folder)


def test_special_files_in_a_folder_are_refused(folder):
    os.rename(folder / "config.json", folder / "moved.json")
    os.mkfifo(folder / "config.json")
    with pytest.raises(SourceError, match=r"config\.json is a named pipe: a model is read from regular files"):
        load_source(folder)
    os.unlink(folder / "config.json")
    os.symlink("/dev/zero", folder / "config.json")
    with pytest.raises(SourceError, match=r"config\.json is a device"):
        load_source(folder)


def test_json_that_is_nested_too_deeply_or_damaged_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for text, message in (("[" * 200_000, "nested too deeply"), ("{", "cannot be read"), ("\udc80", "cannot be read")):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(SourceError, match=message):
            read_json(path)
    assert read_json(tmp_path / "none.json", missing={}) == {}
    with pytest.raises(SourceError, match="there is no"):
        read_json(tmp_path / "none.json")
