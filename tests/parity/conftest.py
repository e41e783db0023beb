"""Each model is exported once for each target, when the first test asks for it."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.families import BY_NAME, END, MAX_LENGTH, PAD, START, Family

import tformer_export.build as make
from tformer_export import ExportReport, Quantization, export
from tformer_export.compile import AnalysedModel
from tformer_export.sources import Source
from tformer_runtime import Model
from tformer_runtime.engine.engine import Engine


@dataclass
class Exported:
    """A file and what made it. It has its folder for itself."""

    family: Family
    path: Path
    report: ExportReport
    engine: Engine
    model: Model


Exporter = Callable[..., Exported]
ON_CPU = "on_cpu.onnx"  # what the gate runs of a file in half precision; of bfloat16 the CPU can run nothing else


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    made: dict[tuple[str, str, str, str], Exported] = {}
    held: dict[tuple[object, ...], AnalysedModel] = {}
    own = tmp_path_factory.getbasetemp()
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def get(name: str, target: str = "cpu", quantization: str | Quantization = "none", **extras: Any) -> Exported:
        key = name, target, repr(quantization), repr(extras)
        if key not in made:
            family = BY_NAME[name]
            folder = tmp_path_factory.mktemp(name)
            path = folder / "model.onnx"
            ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
            given: dict[str, Any] = {} if family.hf else {
                "example": {"src": ids, "tgt": ids},
                "step_input": "tgt",
                "special_tokens": {"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": PAD},
            }  # fmt: skip
            given |= {"target": target, "quantization": quantization, "max_length": MAX_LENGTH, **extras}
            # Tests that run side by side share what one of them exports; each has a copy in a folder for itself.
            shared = base / hashlib.sha256(repr(key).encode()).hexdigest()
            with FileLock(f"{shared}.lock"):
                if not shared.exists():
                    begun = shared.with_suffix(".part")
                    begun.mkdir()
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(make, "analyse", _analysed(name, repr(extras.get("extra_outputs")), held))
                        patch.setattr(make, "save", _keeping(begun))
                        report = export(family.module, begun / path.name, **given)
                    (begun / "report.pickle").write_bytes(pickle.dumps(report))
                    begun.rename(shared)
            shutil.copytree(shared, folder, dirs_exist_ok=True)
            pickled = folder / "report.pickle"
            report = pickle.loads(pickled.read_bytes())
            pickled.unlink()
            engine = Engine(folder / ON_CPU if report.precision == "bf16" else path, device="cpu", threads=1)
            made[key] = Exported(family, path, report, engine, Model(engine))
        return made[key]

    return get


def _keeping(folder: Path) -> Callable[..., Path]:
    """What the gate runs in the place of a file in half precision is kept beside the file."""
    real = make.save

    def save(model: Any, manifest: Any, path: Path) -> Path:
        written = real(model, manifest, path)
        if path.name == ON_CPU:
            shutil.copy(written, folder / ON_CPU)
        return written

    return save


def _analysed(
    name: str, extra_outputs: str, held: dict[tuple[object, ...], AnalysedModel]
) -> Callable[..., AnalysedModel]:
    """A family's graph is captured once, however many files are made of it."""
    real = make.analyse

    def analyse(
        source: Source, target: str, length: int, phase: Any, wanted: Any, hidden: Any, half: bool, attention: bool
    ) -> AnalysedModel:
        key = name, length, extra_outputs, repr(hidden), attention
        if key not in held:
            held[key] = real(source, target, length, phase, wanted, hidden, half, attention)
        return replace(held[key], target=target, half=half)

    return analyse


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
