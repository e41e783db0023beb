"""Toy models in files as the exporter writes them: with a digest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from support.toy_models import Toy
from tformer_export.common import onnx_writer


def write_digested(path: Path, **toy: Any) -> Path:
    """Write a file with a digest. toy: options of `Toy`."""
    plain = Toy(**toy).write(path.with_suffix(".plain.onnx"))
    onnx_writer.write(ir.from_proto(onnx.load(plain)), path)
    plain.unlink()
    return path


def write_in_place(path: Path, content: bytes) -> None:
    """Replace the bytes of a file as cp does, but with the times of before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def with_changed_byte(path: Path) -> bytes:
    """Return the content of a file with another byte in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    return bytes(content)
