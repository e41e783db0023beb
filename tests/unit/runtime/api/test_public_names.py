"""Public names of tformer_runtime, and the modules that its import loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.toy_models import Toy

import tformer_runtime
from tformer_runtime.base import errors

NAMES = {
    "Answer", "AsyncModel", "AsyncModelStats", "CachedPrefix", "Chat", "Classification", "DeadlineError", "DeviceError",
    "GenerationOptions", "InputError", "MaskCandidate", "MemoryBudgetError", "MissingExtraError", "Model",
    "ModelChangedError", "ModelFileError", "OptionError", "OutOfMemoryError", "OutputError", "ParityError",
    "Result", "Segment", "SourceError", "Span", "Speculation", "TformerError", "Timing", "Transcription",
    "UnsupportedCallError", "UnsupportedModelError",
    "limit_process_memory",
    "__version__",
}  # fmt: skip


def test_all_lists_the_public_names():
    assert set(tformer_runtime.__all__) == NAMES
    assert {n for n in vars(errors) if n.endswith("Error")} <= NAMES
    assert all(getattr(tformer_runtime, name) is not None for name in NAMES)


IMPORT_PROGRAM = """
import sys, json
from tformer_runtime import Model
import tformer_runtime.cli.main
imported_early = "onnxruntime" in sys.modules
model = Model.load(sys.argv[1])
text = model.generate("hello", num_beams=2, max_new_tokens=5).text
forbidden = ("asyncio", "torch", "onnx", "tformer_export", "tformer_models", "transformers", "onnxscript", "onnx_ir")
print(json.dumps([text != "", imported_early, [name for name in forbidden if name in sys.modules]]))
"""


def test_generation_imports_neither_torch_nor_onnx_nor_the_compiler(tmp_path):
    path = Toy().write(tmp_path / "toy.onnx")
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_PROGRAM, str(path)], capture_output=True, text=True, check=True
    )
    assert json.loads(process.stdout) == [True, False, []]


FIRST_RESULT_PROGRAM = """
import sys, json
from tformer_runtime import Model
model = Model.load(sys.argv[1])
result = model.generate(json.loads(sys.argv[2]), max_new_tokens=5)
forbidden = ["asyncio", "click", "difflib", "jinja2", "llguidance", "matplotlib", "regex", "rich", "secrets"]
forbidden += ["base64", "concurrent.futures", "csv", "hashlib", "tempfile"]
forbidden += [] if model.manifest.tokenizers else ["tokenizers"]
print(json.dumps([len(result.token_ids), [name for name in forbidden if name in sys.modules]]))
"""


@pytest.mark.parametrize(("toy", "given"), [(Toy(), "hello"), (Toy(tokenizer=False), [3, 4, 5])])
def test_first_result_imports_no_optional_modules(tmp_path, toy, given):
    path = toy.write(tmp_path / "toy.onnx")
    process = subprocess.run(
        [sys.executable, "-c", FIRST_RESULT_PROGRAM, str(path), json.dumps(given)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(process.stdout) == [5, []]


def test_no_module_calls_print():
    for source in Path(tformer_runtime.__file__).parent.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call))
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), source.name
