"""tformer with kernels for few rows, which take more memory: the choice for single requests."""

from __future__ import annotations

import functools
from pathlib import Path

from versus.engines import only, ours
from versus.shapes import Shape


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    only(precision, "int8", "int4")
    return ours.prepare(folder, shape, precision, Engine.variant)


class Engine(ours.Engine):
    variant = "latency"


file_command = functools.partial(ours.file_command, variant=Engine.variant)
