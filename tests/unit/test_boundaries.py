"""Boundaries of the packages: the runtime and its server import no torch, the compiler no models, and the models only
the format of model.pt with its factory, the errors and the writing of whole files."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE_FOLDERS = {
    "tformer_export": ROOT / "tformer_export",
    "tformer_runtime": ROOT / "runtime" / "tformer_runtime",
    "tformer_serve": ROOT / "runtime" / "tformer_serve",
    "tformer_models": ROOT / "models" / "tformer_models",
}
BANNED = {
    "tformer_runtime": (
        "torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "tformer_export", "tformer_models",
        "tformer_serve",
    ),
    "tformer_serve": (
        "torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "tformer_export", "tformer_models",
    ),
    "tformer_export": ("tformer_models", "tformer_serve", "lightning", "onnxruntime"),
    "tformer_models": ("onnx", "onnxruntime", "onnx_ir", "tformer_serve"),
}  # fmt: skip
ALLOWED_IN_MODELS = (
    "tformer_export.common.checkpoint",
    "tformer_runtime.base.factory_arguments",
    "tformer_export.common.task",
    "tformer_runtime.base.errors",
    "tformer_runtime.base.whole_files",
    "tformer_runtime.cli.errors",
)
DIRECT_IMPORT = re.compile(
    r"""^\s*(import\s+([\w.]+,\s*)*onnxruntime|from\s+onnxruntime)\b|(import_module|import_optional)\(\s*["']onnxruntime""",
    re.M,
)


def imports(path: Path) -> set[str]:
    imported_names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported_names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import, which this test does not follow"
            imported_names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return imported_names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", PACKAGE_FOLDERS)
def test_package_does_not_import_banned_packages(package: str) -> None:
    files = list(PACKAGE_FOLDERS[package].rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            assert not any(within(name, banned) for banned in BANNED[package]), f"{path} imports {name}"


def test_models_import_only_checkpoint_format_and_errors() -> None:
    others = ("tformer_export", "tformer_runtime")
    for path in PACKAGE_FOLDERS["tformer_models"].rglob("*.py"):
        for name in imports(path):
            if any(within(name, other) for other in others):
                assert any(within(name, allowed) for allowed in ALLOWED_IN_MODELS), f"{path} imports {name}"
    seq2seq = imports(PACKAGE_FOLDERS["tformer_models"] / "seq2seq.py")
    assert not any(within(name, other) for name in seq2seq for other in others)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tformer_runtime", ("torch", "onnx", "tformer_export")),
        ("tformer_runtime.cli.main", ("torch", "onnx", "tformer_export", "ray", "pyarrow")),
        ("tformer_serve.ray", ("torch", "onnx", "ray", "pyarrow", "fastapi")),
        ("tformer_serve.app", ("torch", "onnx", "tformer_export", "onnxruntime")),
        ("tformer_serve.cli", ("torch", "onnx", "tformer_export", "fastapi", "asyncio")),
        ("tformer_export", ("torch", "onnx")),
        ("tformer_export.cli", ("torch", "onnx")),
    ],
)
def test_import_does_not_load_heavy_packages(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([n for n in {absent!r} if n in sys.modules])"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


def test_onnxruntime_is_imported_in_one_place_which_turns_its_telemetry_off() -> None:
    """Tests import it after `tests/conftest.py`. Engines of the benchmark get the variable from `versus.client`."""
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in (
            "tformer_export",
            "runtime",
            "models",
            "docs",
            "tests/benchmarks",
            "tests/fuzz",
            "tests/wild_packages",
        )
        for path in (ROOT / folder).rglob("*.py")
        if "node_modules" not in path.parts and DIRECT_IMPORT.search(path.read_text(encoding="utf-8"))
    }
    engines = {name for name in files if name.startswith("tests/benchmarks/versus/engines/")}
    assert files - engines == {
        "runtime/tformer_runtime/base/extras.py",
        "runtime/web/bench/export_peer.py",  # of an environment without tformer: it sets the variable itself
        "tests/benchmarks/opening.py",  # programs of a child process, whose environment has the variable
        "tests/benchmarks/stand_in/avx2.py",  # the same
    }


@pytest.mark.parametrize("package", ["tformer_export", "tformer_runtime"])
def test_all_public_names_exist(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
