"""Layers: the folders that each folder of the runtime and of the compiler may import, without circles.

All imports count, including imports within functions and for type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = {
    "base": (),
    "format": ("base",),
    "preprocess": ("base", "format"),
    "rewriting": ("base", "format"),
    "backend": ("base", "format", "rewriting"),
    "engine": ("base", "format", "backend"),
    "decoding": ("base", "format", "preprocess", "backend", "engine"),
    "tasks": ("base", "format", "preprocess", "engine", "decoding"),
    "": ("base", "format", "preprocess", "backend", "engine", "decoding", "tasks"),  # the modules of the package itself
    "distributed": ("base", "format", "preprocess", "decoding", "tasks", ""),
    "cli": ("base", "format", "preprocess", "decoding", "tasks", "", "distributed"),
}
PIPELINE = (
    "common", "sources", "capture", "analysis", "normalise", "soundness", "trace", "staging", "passes", "lowering",
    "compile", "options",
    "verify", "calibration", "shortlist", "quantize", "tune", "",
)  # fmt: skip
SERVER = (
    "capabilities", "errors", "options", "request_context", "logs", "registry", "metrics", "reloads", "middleware",
    "state", "client_inputs", "responses", "generation", "calls", "schemas", "body_route", "routes",
    "app", "connection", "server", "cli", "ray",
)  # fmt: skip
LAYERS = {
    "tformer_runtime": (ROOT / "runtime" / "tformer_runtime", RUNTIME),
    "tformer_export": (ROOT / "tformer_export", {name: PIPELINE[:i] for i, name in enumerate(PIPELINE)}),
    "tformer_serve": (ROOT / "runtime" / "tformer_serve", {name: SERVER[:i] for i, name in enumerate(SERVER)}),
}
MAX_FILES = 20  # modules in one folder


def find_imports(path: Path, package: str, modules: dict[str, Path]) -> set[str]:
    """Return the modules of its own package that a file imports."""
    imported_modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import, which this test does not follow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == package:
                inner = name.partition(".")[2]
                while inner not in modules:
                    inner = inner.rpartition(".")[0]
                imported_modules.add(inner)
    return imported_modules


def import_graph(package: str) -> dict[str, set[str]]:
    """Return module → its imported modules. "" is the package itself, which re-exports names of others."""
    folder, _ = LAYERS[package]
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
        for path in folder.rglob("*.py")
    }
    return {name: find_imports(path, package, modules) - {name} for name, path in modules.items() if name}


def layer(module: str, package: str) -> str:
    first = module.split(".")[0]
    return first if first in LAYERS[package][1] else ""


@pytest.mark.parametrize("package", LAYERS)
def test_layer_imports_only_layers_below(package):
    allowed = LAYERS[package][1]
    graph = import_graph(package)
    assert {layer(module, package) for module in graph} == set(allowed)
    violations = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if (own_layer := layer(module, package)) != (imported_layer := layer(other, package))
        and imported_layer not in allowed[own_layer]
    ]
    assert violations == []


@pytest.mark.parametrize("package", LAYERS)
def test_modules_have_no_circular_imports(package):
    """Modules without remaining imports are removed repeatedly, until none is left."""
    graph = import_graph(package)
    while free := [module for module, others in graph.items() if not others & set(graph)]:
        for module in free:
            del graph[module]
    assert graph == {}


def test_imports_in_functions_and_for_type_checkers_count(tmp_path):
    (tmp_path / "one.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from p.two import a\n"
        "def f():\n    import p.three.four\n"
    )
    modules = dict.fromkeys(("", "two", "three", "three.four"), tmp_path)
    assert find_imports(tmp_path / "one.py", "p", modules) == {"two", "three.four"}


@pytest.mark.parametrize("line", ["from . import two", "from .two import a", "from ..q import b"])
def test_relative_import_is_refused(line, tmp_path):
    (tmp_path / "one.py").write_text(f"def f():\n    {line}\n")
    with pytest.raises(AssertionError, match="line 2: a relative import"):
        find_imports(tmp_path / "one.py", "p", {"": tmp_path})


LISTS_MODULES = (
    *(
        f"tformer_export/{folder}"
        for folder in (
            "analysis",
            "normalise",
            "soundness",
            "trace",
            "lowering",
            "quantize",
            "quantize/rounding",
            "sources",
            "staging",
            "verify",
        )
    ),
    *(f"runtime/tformer_runtime/{folder}" for folder in ("decoding/options", "decoding/rules", "distributed")),
    *(f"runtime/tformer_serve{folder}" for folder in ("", "/middleware", "/ray", "/responses", "/routes", "/schemas")),
)


@pytest.mark.parametrize("folder", LISTS_MODULES)
def test_package_docstring_has_a_line_for_each_module(folder):
    path = ROOT / folder
    lines = (ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or "").splitlines()[2:]
    modules = {p.stem for p in path.glob("*.py")} - {"__init__"} | {
        f"{p.parent.name}/" for p in path.glob("*/__init__.py")
    }
    firsts = {name for line in lines for name in line.split("  ")[0].split(", ")}
    assert firsts <= modules
    assert {name for name in modules if not any(name in line for line in lines)} == set()


def test_folder_has_at_most_max_files():
    for folder in ("tformer_export", "runtime", "models"):
        for path in (ROOT / folder, *(p for p in (ROOT / folder).rglob("*") if p.is_dir())):
            assert len(list(path.glob("*.py"))) <= MAX_FILES + 1, path  # with __init__.py
