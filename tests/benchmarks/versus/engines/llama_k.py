"""llama.cpp with Q4_K_M, its usual form of four bits: blocks of 256, scales of six bits, some layers in Q6_K."""

from __future__ import annotations

from pathlib import Path

from versus.engines import llama, only
from versus.shapes import Shape


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    only(precision, "int4")
    return llama.prepare(folder, shape, precision, Engine.type)


class Engine(llama.Engine):
    type = "Q4_K_M"
