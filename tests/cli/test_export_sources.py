"""tformer-export exports each kind of SOURCE, and refuses invalid sources with one sentence."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tformer_export.common.checkpoint import load_weights
from tformer_runtime import Model, SourceError

MODULE = '''
import torch
from torch import nn

from tformer_export import padding

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class Plain(nn.Module):
    """A language model without attention."""

    def __init__(self, width, vocabulary=11, *, scale=1.0):
        super().__init__()
        self.embed, self.out, self.scale = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary), scale

    def forward(self, ids):
        return self.out(self.embed(ids) * self.scale)


class Averaged(Plain):
    """A model of two inputs: each target token is added to the mean of the source without its padding."""

    def forward(self, src, tgt, mask):
        mean = (self.embed(src) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.out(self.embed(tgt) + mean.unsqueeze(1))


class Scorer(Plain):
    """Two scores for each text."""

    def __init__(self, width):
        super().__init__(width)
        self.scores = nn.Linear(width, 2)

    def forward(self, ids):
        return self.scores(self.embed(ids).mean(1))


class Hidden(Plain):
    """A language model whose projection the caller applies."""

    def forward(self, ids):
        return self.embed(ids) * self.scale


def averaged(width):
    options = {"step_input": "tgt", "masks": {"mask": padding("src", dtype=torch.float32)},
        "special_tokens": {"bos_token_id": 1, "eos_token_id": 2}}
    return Averaged(width), {"src": IDS, "tgt": IDS}, options


def classifier():
    from tformer_export import Task

    task = Task("text-classification", labels=["low", "high"])
    return Scorer(8), {"ids": IDS}, {"task": task, "special_tokens": {"pad_token_id": 0}}


def unknown_options():
    return Plain(4), {"ids": IDS}, {"beam": 4}


def options_with_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes)), None, {"chat_template": "{{ messages }}"}
'''


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """Enter a new folder with `mine.py`."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("mine", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


@pytest.fixture
def user_module(user_folder, monkeypatch):
    """Return `mine.py` as a module."""
    monkeypatch.syspath_prepend(user_folder)
    return importlib.import_module("mine")


def plain(width=8, vocabulary=11):
    """Return a state dict of `Plain`, and its forward as a function of ids and scale."""
    torch.manual_seed(0)
    embed, out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
    state = {f"embed.{n}": v for n, v in embed.state_dict().items()}
    return state | {f"out.{n}": v for n, v in out.state_dict().items()}, lambda ids, scale: out(embed(ids) * scale)


def test_state_dict_with_a_class_and_config_decodes_as_its_module(user_folder, run):
    state, forward = plain()
    torch.save(state, "weights.pt")
    Path("config.json").write_text(json.dumps({"width": 8, "scale": -3.0}))
    command = ("weights.pt", "--factory", "mine:Plain", "--config", "config.json", "--step-input", "ids")
    status, err = run(*command, "-o", "out.onnx")
    assert status == 0, err
    ids = [3, 4, 5]
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(forward(torch.tensor([ids]), -3.0)[0, -1].argmax()))
    assert list(Model.load("out.onnx", "cpu").generate([3, 4, 5], max_new_tokens=5).token_ids) == ids[3:]


def test_head_of_the_command_line_is_applied_to_the_output_of_forward(user_folder, run, refused):
    state, forward = plain(width=11)
    torch.save(state, "weights.pt")
    Path("config.json").write_text('{"width": 11}')
    command = ("weights.pt", "--factory", "mine:Hidden", "--config", "config.json", "--step-input", "ids")
    status, err = run(*command, "--head", "out", "-o", "out.onnx")
    assert status == 0, err
    with torch.no_grad():
        expected = int(forward(torch.tensor([[3]]), 1.0)[0, -1].argmax())
    assert list(Model.load("out.onnx", "cpu").generate([3], max_new_tokens=1).token_ids) == [expected]
    assert "no submodule or method 'generator'" in refused(*command, "--head", "generator")
    Path("folder").mkdir()
    assert "--head names a part of a module" in refused("folder", "--head", "out")


def test_masks_of_a_factory_become_inputs(user_folder, run):
    Path("config.json").write_text('{"width": 8}')
    status, err = run("mine:averaged", "--config", "config.json")
    assert status == 0, err
    manifest = Model.load("averaged.onnx", "cpu").manifest
    assert [(i.name, i.role) for i in manifest.encode.inputs] == [("src", "ids"), ("src.keep", "mask")]
    assert (
        manifest.decode.step.name,
        manifest.special_tokens.bos_token_ids,
        manifest.special_tokens.eos_token_ids,
    ) == ("tgt", (1,), (2,))


def test_task_of_a_factory_with_its_labels_is_the_task_of_the_file(user_folder, run):
    status, err = run("mine:classifier")
    assert status == 0, err
    assert Model.load("classifier.onnx", "cpu").classify([[3, 4]])[0].label in ("low", "high")


def test_torch_export_program_decodes_as_its_module(user_module, run, refused):
    torch.manual_seed(0)
    module = user_module.Plain(8)
    dynamic_shapes = {"ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    torch.export.save(torch.export.export(module, (user_module.IDS,), dynamic_shapes=dynamic_shapes), "model.pt2")
    torch.export.save(torch.export.export(module, (user_module.IDS,)), "static.pt2")
    os.remove("mine.py")
    assert run("model.pt2", "--step-input", "ids")[0] == 0
    with torch.no_grad():
        expected = int(module(torch.tensor([[3]]))[0, -1].argmax())
    assert list(Model.load("model.onnx", "cpu").generate([3], max_new_tokens=1).token_ids) == [expected]
    message = refused("static.pt2", "--step-input", "ids", "-o", "out.onnx")
    assert "static.pt2 was exported with a fixed batch of ids, 2" in message
    assert 'dynamic_shapes={"ids": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}' in message
    assert "no input 'tgt'" in refused("model.pt2", "--step-input", "tgt", "-o", "out.onnx")
    assert "makes the module for a state dict" in refused("model.pt2", "--factory", "mine:Plain", "-o", "out.onnx")


def test_folder_with_missing_weights_is_refused(user_folder, refused):
    import transformers
    from safetensors.torch import load_file, save_file

    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained("folder")
    weights = load_file("folder/model.safetensors")
    del weights["transformer.h.0.ln_1.weight"], weights["transformer.h.0.ln_1.bias"]
    save_file(weights, "folder/model.safetensors", metadata={"format": "pt"})
    message = refused("folder", "-o", "out.onnx")
    assert message == (
        "folder's weights do not fit the GPT2LMHeadModel that its config describes: missing: "
        "transformer.h.0.ln_1.bias, transformer.h.0.ln_1.weight"
    )
    os.remove("folder/model.safetensors")
    assert "no file named model.safetensors" in refused("folder", "-o", "out.onnx")


def test_file_of_weights_stands_for_its_folder(user_folder, run, refused):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained("folder")
    shutil.copy("folder/model.safetensors", "alone.safetensors")
    shutil.copy("folder/model.safetensors", "folder/other.safetensors")
    status, err = run("folder/model.safetensors", "-o", "out.onnx")
    assert status == 0, err
    with torch.no_grad():
        logits = transformers.GPT2LMHeadModel.from_pretrained("folder")(torch.tensor([[3, 4]])).logits
    assert Model.load("out.onnx", "cpu").generate([3, 4], max_new_tokens=1).token_ids == (int(logits[0, -1].argmax()),)
    message = refused("alone.safetensors")
    assert message.startswith("alone.safetensors holds weights alone, without the model that computes with them: put")
    assert "name it model.safetensors" in refused("folder/other.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"width": 8', "--config config.json is not JSON: "),
        ("[8]", "--config config.json must hold a JSON object, the factory's keyword arguments by name, not list"),
        (
            "{}",
            "cannot be called with no arguments: it lacks the argument width; its arguments are width",
        ),
        (
            '{"width": 8, "heads": 2}',
            "cannot be called with width, heads: it has no argument heads; its arguments are width",
        ),
        ('{"width": "eight"}', "the factory mine:Plain failed: "),
        (None, "--config config.json cannot be read: "),
    ],
)
def test_invalid_config_is_refused(content, message, user_folder, refused):
    torch.save(plain()[0], "weights.pt")
    if content is not None:
        Path("config.json").write_text(content)
    assert message in refused(
        "weights.pt", "--factory", "mine:Plain", "--config", "config.json", "--step-input", "ids", "-o", "out.onnx"
    )


def test_config_without_a_factory_is_refused(user_folder, refused):
    torch.save(plain()[0], "weights.pt")
    Path("config.json").write_text("{}")
    assert "name one with --factory" in refused("weights.pt", "--config", "config.json", "-o", "out.onnx")


def test_invalid_options_of_a_factory_are_refused(user_folder, refused):
    assert "mine:unknown_options returned the options beam: it may say" in refused("mine:unknown_options")
    message = refused("mine:options_with_transformers")
    assert "returned a transformers model and options: pass the options to the export itself" in message


def test_file_without_weights_is_refused(user_folder, refused):
    torch.save({"args": {"width": 8}, "step": 3}, "weights.pt")
    Path("config.json").write_text('{"width": 8}')
    message = refused("weights.pt", "--factory", "mine:Plain", "--config", "config.json", "-o", "out.onnx")
    assert message == "weights.pt does not hold a state dict: it is a dict of args, step; save model.state_dict()"


def test_all_misfitting_weights_are_listed(user_module):
    state = plain(width=4)[0]
    del state["out.bias"]
    state |= {"more.weight": torch.zeros(1), "more.bias": torch.zeros(1)}
    with pytest.raises(SourceError) as caught:
        load_weights(user_module.Plain(8), state, "weights.pt", "mine:Plain")
    assert str(caught.value) == (
        "weights.pt's weights do not fit the module that mine:Plain makes: missing: out.bias; unexpected: more.weight, "
        "more.bias; misshapen: embed.weight is (11, 4), not (11, 8), out.weight is (11, 4), not (11, 8)"
    )
