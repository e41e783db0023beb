"""A shortlist for a file whose decode stage can do with candidates: proven, learned, and put into its metadata."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import onnx_ir as ir

from tformer_export.common.onnx_writer import save
from tformer_export.shortlist.check import check_columns
from tformer_export.shortlist.columns import choose_columns
from tformer_export.shortlist.make import Measured, make_shortlist
from tformer_export.verify.parity import Gate
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.shortlist import KEY
from tformer_runtime.format.manifest import Manifest


def with_columns(model: ir.Model, manifest: Manifest) -> Manifest:
    """Let the model's projection be of gathered columns, where there are candidates."""
    assert manifest.decode is not None
    return replace(manifest, decode=replace(manifest.decode, shortlist=choose_columns(model)))


def add_shortlist(
    model: ir.Model, manifest: Manifest, gate: Gate, lines: Path, folder: Path
) -> tuple[Manifest, Measured]:
    """Prove that the file computes the same for candidates, learn which they are, and put them into its metadata.

    model, manifest: as `with_columns` left them. lines: the file to learn from. Errors as of `make_shortlist`.
    """
    engine = Engine(save(model, manifest, folder / "shortlist.onnx"), device="cpu")
    error = check_columns(gate, engine)
    made, measured = make_shortlist(engine, lines)
    model.metadata_props[KEY] = made.to_text()
    held = {name: value for name, value in asdict(measured).items() if name != "speed"} | {"max_relative_error": error}
    assert manifest.decode is not None
    assert manifest.decode.shortlist is not None
    spec = replace(manifest.decode.shortlist, common=len(made.common), each=measured.each, measured=held)
    return replace(manifest, decode=replace(manifest.decode, shortlist=spec)), measured
