"""Who may import whom: the runtime nothing of ours and no torch, the compiler no models, the models one file format."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOMES = {
    "tformer_export": ROOT / "tformer_export",
    "tformer_runtime": ROOT / "runtime" / "tformer_runtime",
    "tformer_models": ROOT / "models" / "tformer_models",
}
BANNED = {
    "tformer_runtime": ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "tformer_export", "tformer_models"),
    "tformer_export": ("tformer_models", "lightning"),
    "tformer_models": ("tformer_runtime", "onnx", "onnxruntime", "onnx_ir"),
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", HOMES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    files = list(HOMES[package].rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            assert not any(within(name, banned) for banned in BANNED[package]), f"{path} imports {name}"


def test_the_models_know_only_the_checkpoint_format_of_the_compiler() -> None:
    for path in HOMES["tformer_models"].rglob("*.py"):
        for name in imports(path):
            if within(name, "tformer_export"):
                assert within(name, "tformer_export.common.checkpoint"), f"{path} imports {name}"
    assert not any(within(n, "tformer_export") for n in imports(HOMES["tformer_models"] / "seq2seq.py"))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tformer_runtime", ("torch", "onnx", "tformer_export")),
        ("tformer_runtime.cli.main", ("torch", "onnx", "tformer_export")),
        ("tformer_export", ("torch", "onnx")),
        ("tformer_export.cli", ("torch", "onnx")),
    ],
)
def test_importing_a_package_loads_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([n for n in {absent!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_architecture_is_named_in_the_compiler() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    words = {name.replace("-", "_") for name in CONFIG_MAPPING_NAMES if len(name) > 3}
    words -= {"clip", "encoder_decoder"}  # words of the language
    for path in HOMES["tformer_export"].rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        names |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        named = {name for name in names if name.lower() in words}
        assert not named, f"{path} names {named}"


@pytest.mark.parametrize("package", ["tformer_export", "tformer_runtime"])
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
