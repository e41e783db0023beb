"""What a file can be made of in several correct forms, and which of them it has.

The first form of each choice is the default: the fastest where it was measured, or as fast, by the figures in the
module that makes it (of sums before norms and biases, in `SessionSettings`). But for threads: how many are the fastest
is a matter of what else runs. `tune` measures them on the machine that it runs on. Every form passes the same parity
gate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import onnx_ir as ir

from tformer_runtime.format.manifest import Manifest, SessionSettings

Forms = Mapping[str, str]  # name of a choice → form


class Compiled(Protocol):
    """What a choice may look at of a compiled model (`compile.Compiled`)."""

    model: ir.Model
    manifest: Manifest
    found: dict[str, int]


@dataclass(frozen=True)
class Choice:
    """name, forms: as reports and manifests have them, the default form first. applies: whether a file in the default
    forms holds anything that the choice is about. rows: batch sizes that it is measured at, if they are its own."""

    name: str
    forms: tuple[str, ...]
    applies: Callable[[Compiled], bool]
    rows: tuple[int, ...] = ()

    @property
    def default(self) -> str:
        return self.forms[0]

    def of(self, forms: Forms) -> str:
        return forms.get(self.name, self.default)


def _found(name: str) -> Callable[[Compiled], bool]:
    return lambda compiled: compiled.found.get(name, 0) > 0


def _holds(operator: str, stage: str = "") -> Callable[[Compiled], bool]:
    """Whether a stage, or any, has an operator."""
    return lambda compiled: any(
        node.op_type == operator and (node.name or "").startswith(stage) for node in compiled.model.graph.all_nodes()
    )


ATTENTION = "MultiHeadAttention"
GIVEN = Choice("attention over given keys", (ATTENTION, "products and softmax"), _holds(ATTENTION, "decode/"))
WHOLE = Choice(  # see operators.whole_attention
    "attention of whole sequences", ("GroupQueryAttention", ATTENTION), _holds("GroupQueryAttention", "encode/")
)
ROTARY = Choice("rotary positions", ("in the attention operator", "written out"), _found("rotary"))
NORMS = Choice("root mean square norms", ("RMSNormalization", "written out"), _found("rms_norm"))
PROJECTIONS = Choice("projections of one value", ("one product", "a product each"), _found("merge_projections"))
RESIDUAL = Choice(
    "sums before norms", ("Add, LayerNormalization", "SkipLayerNormalization"), _holds("LayerNormalization")
)
# Add and Gelu of 8 × 2048 numbers took 30 µs and BiasGelu 38, of 32 × 2048 109 and 153, of 512 × 1536 1200 and 1600.
BIASED = Choice("bias before GELU", ("Add, Gelu", "BiasGelu"), _holds("Gelu"))
THREADS = Choice(
    "threads", ("one per core", "one per core, not spinning", "one"), lambda compiled: (os.cpu_count() or 1) > 1
)
FEW = Choice(  # see quantize/rewrite.py
    "own kernel for few rows",
    ("2 rows, 3 of 4 bits", "none", "1 row", "4 rows", "8 rows"),
    lambda compiled: (
        compiled.manifest.decode is not None
        and compiled.manifest.quantization != "none"
        and compiled.manifest.optimized_for != "throughput"
    ),
    rows=(1, 2, 4, 8),
)
CHOICES = (GIVEN, WHOLE, ROTARY, NORMS, PROJECTIONS, RESIDUAL, BIASED, FEW, THREADS)
DEFAULTS: Forms = MappingProxyType({})


def session_settings(forms: Forms) -> SessionSettings:
    """What the runtime is told."""
    threads = THREADS.of(forms)
    left_out = {"SkipLayerNormFusion": RESIDUAL.of(forms) == RESIDUAL.default}
    left_out["BiasGeluFusion"] = BIASED.of(forms) == BIASED.default
    return SessionSettings(
        threads=1 if threads == "one" else None,
        spinning="not spinning" not in threads,
        disabled_optimizers=tuple(name for name, out in left_out.items() if out),
    )


def few_rows(forms: Forms) -> Mapping[int, int] | None:
    """Bits of a product → rows up to which it has a kernel of its own; None for what is the default."""
    form = FEW.of(forms)
    if form == FEW.default:
        return None
    return {} if form == "none" else dict.fromkeys((4, 8), int(form.split()[0]))
