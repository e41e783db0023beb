"""An onnxruntime without its module, as is left if one of two wheels is removed, is named, and how to mend it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(onnxruntime.__file__).parents[1]
MEND = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'tformer[cpu]' or 'tformer[cuda]'"
CALL = "import sys; from {module} import main; main()"
EXPORT = (
    "import torch; from tformer_export import export; "
    "export(torch.nn.Linear(2, 2), 'out.onnx', {'input': torch.ones(2, 3, 2)})"
)


@pytest.fixture
def python(tmp_path):
    """Return a function that runs Python code where every package is installed, and onnxruntime in part."""
    site = tmp_path / "site"
    (site / "onnxruntime" / "capi").mkdir(parents=True)
    for entry in SITE.iterdir():
        if not entry.name.startswith("onnxruntime"):
            (site / entry.name).symlink_to(entry)

    def run(code, *arguments):
        paths = [site, ROOT, ROOT / "runtime", ROOT / "models"]
        code = f"import sys; sys.path[:] = [p for p in sys.path if not p.endswith('-packages')]; {code}"
        return subprocess.run(
            [sys.executable, "-S", "-c", code, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}, cwd=tmp_path, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("command", ["tformer-run", "tformer-export"])
def test_command_says_how_to_mend_the_installation(command, python, path):
    module = {"tformer-run": "tformer_runtime.cli.main", "tformer-export": "tformer_export.cli"}[command]
    arguments = [path, "abc"] if command == "tformer-run" else ["factories:none", "-o", "out.onnx"]
    result = python(CALL.format(module=module), *arguments)
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{command}: onnxruntime is installed in part")
    assert MEND in line


def test_export_in_python_says_how_to_mend_the_installation_before_it_begins(python):
    result = python(EXPORT)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("tformer_runtime.base.errors.MissingExtraError: onnxruntime is")
