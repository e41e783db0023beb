"""The shortlist of a file: it is checked, learned and stored in the metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import onnx_ir as ir
from msgspec.structs import replace

from tformer_export.common.onnx_writer import save
from tformer_export.shortlist.check import check_columns
from tformer_export.shortlist.columns import add_gathered_columns
from tformer_export.shortlist.make import ShortlistMeasurement, make_shortlist
from tformer_export.verify.parity import ParityGate
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.shortlist import SHORTLIST_KEY
from tformer_runtime.format.manifest import Manifest


def with_columns(model: ir.Model, manifest: Manifest) -> Manifest:
    """Let the model compute its projection for gathered columns if there are candidates."""
    assert manifest.decode is not None
    return replace(manifest, decode=replace(manifest.decode, shortlist=add_gathered_columns(model)))


def add_shortlist(
    model: ir.Model, manifest: Manifest, gate: ParityGate, lines: Path, folder: Path
) -> tuple[Manifest, ShortlistMeasurement]:
    """Check that the file gives the same logits for candidates, learn the shortlist, and store it in the metadata.

    model, manifest: results of `with_columns`.
    gate: draws the requests of the check.
    lines: the file to learn from.
    folder: for the candidate file.

    Raises ParityError if logits differ, and the errors of `make_shortlist`.
    """
    engine = Engine(save(model, manifest, folder / "shortlist.onnx"), device="cpu", native_kernels=False)
    error = check_columns(gate, engine)
    learned, measured = make_shortlist(engine, lines)
    model.metadata_props[SHORTLIST_KEY] = learned.to_text()
    figures = {name: value for name, value in asdict(measured).items() if name != "speed"} | {
        "max_relative_error": error
    }
    assert manifest.decode is not None
    assert manifest.decode.shortlist is not None
    spec = replace(manifest.decode.shortlist, common=len(learned.common), each=measured.each, measured=figures)
    return replace(manifest, decode=replace(manifest.decode, shortlist=spec)), measured
