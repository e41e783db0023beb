"""Versions of optional dependencies: too old ones are named, with the command that mends it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import onnxruntime
import pytest

from tformer_runtime.base.errors import MissingExtraError
from tformer_runtime.base.extras import MIN_ONNXRUNTIME, import_onnxruntime, import_optional, install_command

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("version", ["1.29.1", "1.9.0", "0.5.0", "1.29.0rc1"])
def test_old_onnxruntime_is_named(version, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with pytest.raises(MissingExtraError, match=rf"onnxruntime {version} is installed.*pip install --upgrade"):
        import_onnxruntime()


@pytest.mark.parametrize(
    "version", [onnxruntime.__version__, "1.30.0", "1.130.0.dev20261101", "2.0.0", "2.0", "1.30rc1", "unknown", ""]
)
def test_later_onnxruntime_is_taken(version, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", version)
    assert import_onnxruntime() is onnxruntime


@pytest.mark.parametrize(
    ("installed", "extra", "command"),
    [
        ([], "export", "pip install 'tformer[export,cpu]'"),
        (["onnxruntime"], "export", "pip install 'tformer[export]'"),
        (["onnxruntime-gpu"], "export", "pip install 'tformer[export]'"),
        (["onnxruntime-openvino"], "export", "pip install 'tformer[export]'"),
        ([], "cpu", "pip install 'tformer[cpu]'"),
        (["onnxruntime-gpu"], "cpu", "pip install 'tformer[gpu]'"),
        (["onnxruntime-openvino"], "cpu", "pip uninstall -y onnxruntime-openvino, then pip install 'tformer[cpu]'"),
        (["onnxruntime"], "cuda", "pip uninstall -y onnxruntime, then pip install 'tformer[cuda]'"),
        (["onnxruntime-gpu"], "cuda", "pip install 'tformer[cuda]'"),
        (["onnxruntime"], "hf", "pip install 'tformer[hf]'"),
    ],
)
def test_advice_never_puts_two_onnxruntimes_beside_each_other(installed, extra, command, monkeypatch):
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"onnxruntime": installed * 2})
    assert install_command(extra) == command


def test_damaged_onnxruntime_is_installed_again_by_its_own_extra(monkeypatch):
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"onnxruntime": ["onnxruntime-gpu"]})

    def broken(name):
        raise ImportError("libstdc++.so.6: no version information")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(MissingExtraError, match=r"again, pip install --force-reinstall 'tformer\[gpu\]'$"):
        import_optional("onnxruntime", "running a file needs onnxruntime", "cpu")


def test_every_advice_comes_from_one_function():
    """A command that is written by hand does not know which onnxruntime is installed."""
    packages = (ROOT / "tformer_export", ROOT / "runtime/tformer_runtime", ROOT / "runtime/tformer_serve")
    modules = [path for package in packages for path in package.rglob("*.py") if path.name != "extras.py"]
    assert [path for path in modules if "pip install 'tformer[" in path.read_text()] == []


def test_extras_require_the_same_version():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("cpu", "gpu", "cuda"):
        assert extras[name][0].endswith(">=" + ".".join(map(str, MIN_ONNXRUNTIME)))
