"""Paths of callers: bytes are names of the system, and an empty name or one with a null is an error of the call."""

from __future__ import annotations

import os

import pytest
import torch
from support.toy_models import Toy

from tformer_export import export, load_checkpoint, load_source, save_checkpoint
from tformer_runtime import Model, ModelFileError, OutputError, SourceError

CALLS = {
    "load": (Model.load, ModelFileError),
    "export": (lambda path: export(torch.nn.Linear(2, 2), path, {"input": torch.ones(2, 3, 2)}), OutputError),
    "load a source": (load_source, SourceError),
    "load a checkpoint": (load_checkpoint, SourceError),
    "save a checkpoint": (
        lambda path: save_checkpoint(torch.nn.Linear(2, 2), path, factory="torch.nn:Linear", arguments={}),
        OutputError,
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("path", "says"), [("", "is empty"), (b"", "is empty"), ("a\0b", "null character")])
def test_impossible_name_is_told(name, path, says):
    call, error = CALLS[name]
    with pytest.raises(error, match=rf"^the path of .*{says}"):
        call(path)


@pytest.mark.parametrize("name", CALLS)
def test_value_that_is_not_a_path_is_a_type_error(name):
    with pytest.raises(TypeError, match="int"):
        CALLS[name][0](3)


def test_bytes_are_a_name(tmp_path):
    path = os.fsencode(Toy(seed=27).write(tmp_path / "modèle.onnx"))
    assert Model.load(path, "cpu").generate("a", max_new_tokens=2).token_ids
