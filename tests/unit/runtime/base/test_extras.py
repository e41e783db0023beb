"""Versions of optional dependencies: too old ones are named, with the command that mends it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import onnxruntime
import pytest

from tformer_runtime.base.errors import MissingExtraError
from tformer_runtime.base.extras import MIN_ONNXRUNTIME, import_onnxruntime

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


def test_extras_require_the_same_version():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("cpu", "gpu", "cuda"):
        assert extras[name][0].endswith(">=" + ".".join(map(str, MIN_ONNXRUNTIME)))
