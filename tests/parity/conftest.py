"""Fixture `exported`: the exported files of the families, each exported once, when the first test needs it."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.families import BY_NAME, END, MAX_LENGTH, PAD, START, Family
from support.shared_analysis import analyse_once
from support.shared_folder import shared_folder

import tformer_export.build as build
from tformer_export import ExportReport, Quantization, export
from tformer_export.compile import AnalysedModel
from tformer_runtime import Model
from tformer_runtime.engine.engine import Engine


@dataclass
class Exported:
    """An exported file with its source and its report. No other file is in its folder."""

    family: Family
    path: Path
    report: ExportReport
    engine: Engine
    model: Model


Exporter = Callable[..., Exported]
CPU_FORM_NAME = "on_cpu.onnx"  # the gate runs this form of a file in half precision; the CPU cannot run bfloat16 itself


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    """Return a function that returns the exported file of a family for a target, a quantisation and options."""
    exports_by_key: dict[tuple[str, str, str, str], Exported] = {}
    analysed_models: dict[Hashable, AnalysedModel] = {}
    folder_of_run = shared_folder(tmp_path_factory)

    def get(
        name: str, target: str = "cpu", quantization: str | Quantization = "none", **options_of_test: Any
    ) -> Exported:
        key = name, target, repr(quantization), repr(options_of_test)
        if key not in exports_by_key:
            family = BY_NAME[name]
            folder = tmp_path_factory.mktemp(name)
            path = folder / "model.onnx"
            ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
            options: dict[str, Any] = {} if family.hf else {
                "example": {"src": ids, "tgt": ids},
                "step_input": "tgt",
                "special_tokens": {"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": PAD},
            }  # fmt: skip
            options |= {"target": target, "quantization": quantization, "max_length": MAX_LENGTH, **options_of_test}
            # Parallel test processes share one export of a file. Each process copies it to a folder of its own.
            shared_export = folder_of_run / hashlib.sha256(repr(key).encode()).hexdigest()
            with FileLock(f"{shared_export}.lock"):
                if not shared_export.exists():
                    partial_export = shared_export.with_suffix(".part")
                    partial_export.mkdir()
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(
                            build,
                            "analyse",
                            analyse_once((name, repr(options_of_test.get("extra_outputs"))), analysed_models),
                        )
                        patch.setattr(build, "save", _save_with_cpu_form(partial_export))
                        # The tests read the CPU form of a file. On a machine with a GPU the gate would not make it.
                        patch.setattr(build, "find_missing_cuda", lambda: "the tests need the CPU form")
                        report = export(family.module, partial_export / path.name, **options)
                    (partial_export / "report.pickle").write_bytes(pickle.dumps(report))
                    partial_export.rename(shared_export)
            shutil.copytree(shared_export, folder, dirs_exist_ok=True)
            pickled_report = folder / "report.pickle"
            report = pickle.loads(pickled_report.read_bytes())
            pickled_report.unlink()
            engine = Engine(folder / CPU_FORM_NAME if report.precision == "bf16" else path, device="cpu", threads=1)
            exports_by_key[key] = Exported(family, path, report, engine, Model(engine))
        return exports_by_key[key]

    return get


def _save_with_cpu_form(folder: Path) -> Callable[..., Path]:
    """Return a `save` that also copies the CPU form of a file in half precision to `folder`."""
    original = build.save

    def save(model: Any, manifest: Any, path: Path) -> Path:
        saved_path = original(model, manifest, path)
        if path.name == CPU_FORM_NAME:
            shutil.copy(saved_path, folder / CPU_FORM_NAME)
        return saved_path

    return save


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # threads cost more time than they save in tiny products
