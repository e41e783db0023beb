"""`tformer-export BASE --adapters A B`, and `tformer-run --adapter NAME`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import peft
import pytest
from support import command_lines
from support.hf_models import gpt2
from support.peft_adapters import greedy, make_adapter

PROMPT = [1, 5, 7, 9]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory with a base model and two adapters. Return PEFT's models by name."""
    monkeypatch.chdir(tmp_path)
    gpt2().save_pretrained("model")
    models = {"base": gpt2()}
    for seed, name in enumerate(("formal", "short")):
        config = peft.LoraConfig(r=2 + seed, target_modules=["c_attn"], task_type="CAUSAL_LM")
        models[name] = make_adapter(gpt2(), config, tmp_path / name, "../model", seed=seed)
    return models


def test_command_line_switches_adapters(work, run):
    status, err = run("model", "--adapters", "formal", "brief=short", "-o", "m.onnx", "--report", "r.json")
    assert status == 0, err
    assert re.search(r"^adapters +formal, brief$", err, re.MULTILINE)
    assert json.loads(Path("r.json").read_text())["adapters"] == ["formal", "brief"]
    text = " ".join(map(str, PROMPT))
    for flag, name in (([], "base"), (["--adapter", "formal"], "formal"), (["--adapter", "brief"], "short")):
        result = command_lines.run("m.onnx", text, "--ids", "--max-new-tokens", "6", *flag)
        assert result.stdout.split() == [str(i) for i in greedy(work[name], PROMPT, 6)[0]]
    info = json.loads(command_lines.run("m.onnx", "--info", "--json").stdout)
    assert info["adapters"] == ["formal", "brief"]
    message = command_lines.failed(command_lines.run("m.onnx", text, "--ids", "--adapter", "shrt"))
    assert message == "--adapter must be one of base, formal, brief, not 'shrt'"


def test_merged_adapter_from_the_command_line(work, run):
    assert run("formal", "-o", "m.onnx")[0] == 0
    result = command_lines.run("m.onnx", " ".join(map(str, PROMPT)), "--ids", "--max-new-tokens", "6")
    assert result.stdout.split() == [str(i) for i in greedy(work["formal"], PROMPT, 6)[0]]


def test_adapters_that_do_not_go_with_other_options_are_refused(work, refused):
    Path("lines.txt").write_text("1 2\t3", encoding="utf-8")
    assert "leave out either of them" in refused("model", "--adapters", "formal", "--shortlist", "lines.txt")
    assert refused("model", "--adapters", "formal", "nothing", "-o", "m.onnx") == (
        "nothing is not a folder of an adapter: it holds no adapter_config.json"
    )
