"""Layers: which folder of the runtime and of the compiler may import which, with no circle anywhere.

Every import counts, also those within functions and those for type checkers alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = {
    "base": (),
    "format": ("base",),
    "preprocess": ("base", "format"),
    "backend": ("base", "format"),
    "engine": ("base", "format", "backend"),
    "decoding": ("base", "format", "preprocess", "backend", "engine"),
    "tasks": ("base", "format", "preprocess", "engine", "decoding"),
    "": ("base", "format", "preprocess", "backend", "engine", "decoding", "tasks"),  # the modules of the package itself
    "cli": ("base", "format", "preprocess", "decoding", "tasks", ""),
}
PIPELINE = (
    "common", "sources", "capture", "analysis", "staging", "passes", "lowering", "compile", "options", "verify",
    "calibration", "shortlist", "quantize", "tune", "",
)  # fmt: skip
LAYERS = {
    "tformer_runtime": (ROOT / "runtime" / "tformer_runtime", RUNTIME),
    "tformer_export": (ROOT / "tformer_export", {name: PIPELINE[:i] for i, name in enumerate(PIPELINE)}),
}
MAX_FILES = 20  # beside each other


def imported(path: Path, package: str, modules: dict[str, Path]) -> set[str]:
    """The modules of its own package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == package:
                inner = name.partition(".")[2]
                while inner not in modules:
                    inner = inner.rpartition(".")[0]
                found.add(inner)
    return found


def imports(package: str) -> dict[str, set[str]]:
    """Module → the modules that it imports. "" is the package itself, which only offers what others define."""
    folder, _ = LAYERS[package]
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
        for path in folder.rglob("*.py")
    }
    return {name: imported(path, package, modules) - {name} for name, path in modules.items() if name}


def layer(module: str, package: str) -> str:
    first = module.split(".")[0]
    return first if first in LAYERS[package][1] else ""


@pytest.mark.parametrize("package", LAYERS)
def test_a_layer_imports_only_the_layers_below(package):
    allowed = LAYERS[package][1]
    graph = imports(package)
    assert {layer(module, package) for module in graph} == set(allowed)
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if (ours := layer(module, package)) != (theirs := layer(other, package)) and theirs not in allowed[ours]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", LAYERS)
def test_no_modules_import_each_other_in_a_circle(package):
    """Modules that import none but those that are taken away are taken away, until none are left."""
    graph = imports(package)
    while free := [module for module, others in graph.items() if not others & set(graph)]:
        for module in free:
            del graph[module]
    assert graph == {}


def test_what_the_tests_look_for_is_found(tmp_path):
    """Imports in functions and for type checkers alone count."""
    (tmp_path / "one.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from p.two import a\n"
        "def f():\n    import p.three.four\n"
    )
    modules = dict.fromkeys(("", "two", "three", "three.four"), tmp_path)
    assert imported(tmp_path / "one.py", "p", modules) == {"two", "three.four"}


def test_a_folder_can_be_taken_in_at_a_glance():
    for folder in ("tformer_export", "runtime", "models"):
        for path in (ROOT / folder, *(p for p in (ROOT / folder).rglob("*") if p.is_dir())):
            assert len(list(path.glob("*.py"))) <= MAX_FILES + 1, path  # with __init__.py
