"""The shipped g2p model as files that the test processes share, because an export of it takes ten seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
from filelock import FileLock
from support.shared_analysis import shared_analysis
from support.shared_folder import shared_folder

from tformer_export import Quantization, export
from tformer_export.compile import AnalysedModel
from tformer_export.sources import load_source

CHECKPOINT = Path(__file__).parents[4] / "models" / "g2p" / "model.pt"

ExportG2p = Callable[[Quantization, str], Path]


@pytest.fixture(scope="session")
def g2p_file(tmp_path_factory: pytest.TempPathFactory) -> ExportG2p:
    """Return a function that returns the exported file for a quantisation and a goal. Tests only read it."""
    folder = shared_folder(tmp_path_factory)
    analysed: dict[Hashable, AnalysedModel] = {}

    def get(quantization: Quantization, optimize_for: str) -> Path:
        key = hashlib.sha256(repr((quantization, optimize_for)).encode()).hexdigest()
        path = folder / f"g2p-{key[:16]}.onnx"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                with shared_analysis("g2p", analysed):
                    export(load_source(CHECKPOINT), path, quantization=quantization, optimize_for=optimize_for)
        return path

    return get
