"""tformer with activations on fixed scales, learnt from random ids: of such are the requests that are measured."""

from __future__ import annotations

from pathlib import Path

from versus.engines import only, ours
from versus.shapes import Shape


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    only(precision, "int8")
    return ours.prepare(folder, shape, precision, Engine.variant)


class Engine(ours.Engine):
    variant = "fixed"
