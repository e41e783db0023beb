"""Facts about a model file, read from its manifest without loading its weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.dtypes import storage_dtype
from tformer_runtime.format.manifest import AUDIO, IMAGE, MANIFEST_KEY, SERIES, CacheSpec, Manifest
from tformer_runtime.format.model_file import manifest_of, read_manifest, read_metadata
from tformer_runtime.format.open_files import OpenFiles

SMALLEST_SHARE = 0.001  # of weights, in texts: a share of a few weights is not written as none


def file_info(path: Path, manifest: Manifest, num_bytes: int | None = None) -> dict[str, Any]:
    """Return the facts as plain values, fit for JSON.

    num_bytes: of the file and its second file; None to look them up.
    cache_bytes_per_token: of one row. carry_bytes: of one row, at any length.
    """
    m = manifest
    if num_bytes is None:
        num_bytes = OpenFiles(path).num_bytes
    caches = m.decode.caches if m.decode else ()
    slots, carries = ([c for c in caches if c.is_carry == is_carry] for is_carry in (False, True))
    inputs = [*(m.encode.inputs if m.encode else ()), *([m.decode.step] if m.decode else ())]
    return {
        "file": os.fspath(path),
        "bytes": num_bytes,
        "task": m.task,
        "labels": list(m.output_meaning.labels),
        "problem_type": m.output_meaning.problem_type,
        "stages": [name for name, stage in (("encode", m.encode), ("decode", m.decode)) if stage],
        "inputs": {i.name: f"{i.dtype} ({', '.join(map(str, i.shape))})" for i in inputs},
        "max_length": m.max_length or None,  # in tokens; images and audio have none
        "max_length_cause": m.max_length_cause,
        "vocabulary": m.decode.logits.shape[-1] if m.decode and not m.decode.features else None,
        "caches": len(caches),
        "cache_bytes_per_token": sum(map(_fixed_bytes, slots)),
        "carry_bytes": sum(map(_fixed_bytes, carries)),
        "extra_outputs": [extra.name for extra in m.extras],
        "quantization": m.quantization,
        "weight_bits": dict(m.weight_bits),
        "optimized_for": m.optimized_for,
        "kernel_forms": dict(m.kernel_forms),
        "adapters": list(m.adapters),
        "target": m.target,
        "devices": list(m.devices),
        "shortlist": dict(m.decode.shortlist.measured) if m.decode and m.decode.shortlist else None,
        "tokenizers": len(m.tokenizers),
        "chat_template": "yes" if m.chat_template else None,
        "series": _preprocessing_numbers(m, SERIES),
        "images": _preprocessing_numbers(m, IMAGE),
        "audio": _preprocessing_numbers(m, AUDIO),
        "generation_defaults": dict(m.generation_defaults),
        "versions": dict(m.producer),
        "source_digest": m.source_digest,
        "parity": dict(m.parity),
    }


def weight_bits_text(counts: Mapping[str, int]) -> str:
    """Return the share of the weights that has each number of bits, such as "96.0% 8 bits, 4.0% 32 bits"."""
    total = max(1, sum(counts.values()))
    return ", ".join(f"{_percent(counts[bits] / total)} {bits} bits" for bits in sorted(counts, key=int))


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= SMALLEST_SHARE else f"<{SMALLEST_SHARE:.1%}"


def _fixed_bytes(cache: CacheSpec) -> int:
    """Return the bytes of a cache for one row and one slot."""
    return storage_dtype(cache.dtype).itemsize * math.prod(d for d in cache.shape if isinstance(d, int))


def _preprocessing_numbers(manifest: Manifest, kind: str) -> dict[str, Any] | None:
    """Return the numbers of the first input of this kind; None if no input has it."""
    return next((dict(step.numbers) for step in manifest.preprocessing.values() if step.kind == kind), None)


def file_fingerprint(path: Path) -> str:
    """Return a text that differs between model files: the size, and a digest of the manifest.

    The manifest contains a digest of the weights.
    """
    import hashlib  # 4 ms that only the command line needs

    digest = hashlib.sha256(read_metadata(path)[MANIFEST_KEY].encode()).hexdigest()
    return f"{file_info(path, read_manifest(path))['bytes']} bytes, {digest[:16]}"


def verified_digest(path: Path) -> str:
    """Return the digest of a file that is as the exporter wrote it. Raise ModelFileError for any other file."""
    files = OpenFiles(path)
    manifest_of(path, files.metadata)
    digest = files.verify()
    if digest is None:
        raise ModelFileError(
            f"{path} does not end with a digest: another tool has rewritten it, or it was cut short. Export the model "
            "again"
        )
    return digest


def readable_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of `file_info`, and of the machine, in words for `info_lines`."""
    words = dict(info)
    reason = words.pop("no_kernels", None)
    if "kernels" in words:
        words["kernels"] = words["kernels"] or f"none, onnxruntime's operators: {reason}"
    cause = words.pop("max_length_cause")
    words["max_length"] = f"{words['max_length']}, {cause}" if cause else words["max_length"]
    words["weight_bits"] = weight_bits_text(words["weight_bits"])
    return words


def info_lines(info: Mapping[str, Any], indent: str = "", verbatim: bool = False) -> Iterator[str]:
    """Format the result of `file_info` for people: one fact a line, without the empty ones.

    verbatim: the names are of inputs or options, and keep their underscores.
    """
    for name, value in info.items():
        label = f"{indent}{name if verbatim else name.replace('_', ' ')}:"
        if isinstance(value, Mapping):
            if value:
                yield label
                yield from info_lines(value, indent + "  ", name in ("inputs", "generation_defaults"))
        elif value not in (None, "", [], ()):
            yield f"{label} {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
