"""What a model file is, told from its manifest alone, without loading its weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tformer_runtime.format.dtypes import held_as
from tformer_runtime.format.manifest import AUDIO, IMAGE, KEY, SERIES, Manifest
from tformer_runtime.format.model_file import read_manifest, read_metadata


def file_info(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Plain values, fit for JSON. cache_bytes_per_token: of one row."""
    m, data = manifest, path.with_name(path.name + ".data")
    caches = m.decode.caches if m.decode else ()
    slot = [held_as(c.dtype).itemsize * np.prod([d for d in c.shape if isinstance(d, int)]) for c in caches]
    inputs = [*(m.encode.inputs if m.encode else ()), *([m.decode.step] if m.decode else ())]
    return {
        "file": os.fspath(path),
        "bytes": path.stat().st_size + (data.stat().st_size if data.exists() else 0),
        "task": m.task,
        "labels": list(m.outcome.labels),
        "problem": m.outcome.problem,
        "stages": [name for name, stage in (("encode", m.encode), ("decode", m.decode)) if stage],
        "inputs": {i.name: f"{i.dtype} ({', '.join(map(str, i.shape))})" for i in inputs},
        "max_length": m.max_length or None,  # of ids; pictures and sounds have none
        "vocabulary": m.decode.logits.shape[-1] if m.decode and not m.decode.features else None,
        "caches": len(caches),
        "cache_bytes_per_token": int(sum(slot)),
        "extras": [extra.name for extra in m.extras],
        "quantization": m.quantization,
        "optimized_for": m.optimized_for,
        "forms": dict(m.forms),
        "target": m.target,
        "shortlist": dict(m.decode.shortlist.measured) if m.decode and m.decode.shortlist else None,
        "tokenizers": len(m.tokenizers),
        "chat_template": "yes" if m.chat_template else None,
        "series": next((dict(how.numbers) for how in m.preparation.values() if how.kind == SERIES), None),
        "images": next((dict(how.numbers) for how in m.preparation.values() if how.kind == IMAGE), None),
        "audio": next((dict(how.numbers) for how in m.preparation.values() if how.kind == AUDIO), None),
        "defaults": dict(m.defaults),
        "versions": dict(m.producer),
        "source_digest": m.source_digest,
        "parity": dict(m.parity),
    }


def identity(path: Path) -> str:
    """What tells a file from others: its size, and a digest of its manifest, which has that of the weights."""
    digest = hashlib.sha256(read_metadata(path)[KEY].encode()).hexdigest()
    return f"{file_info(path, read_manifest(path))['bytes']} bytes, {digest[:16]}"


def info_lines(info: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """`file_info` for people: one fact a line, what is empty left out."""
    for name, value in info.items():
        label = f"{indent}{name.replace('_', ' ')}:"
        if isinstance(value, Mapping):
            if value:
                yield label
                yield from info_lines(value, indent + "  ")
        elif value not in (None, "", [], ()):
            yield f"{label} {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
