"""Kernel choices: the parts of a file that have several correct forms, and the form that a file has of each.

The first form of each choice is the default. It was the fastest, or as fast as the others, in the measurements of
docs/design/kernels.md. The exception is the number of threads, because the fastest number depends on the load of the
machine. `tune` measures the forms on the machine on which it runs. Every form passes the same parity gate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import onnx_ir as ir
from msgspec.structs import replace

from tformer_runtime.format.manifest import Manifest, SessionSettings

KernelForms = Mapping[str, str]  # name of a choice → form


class CompiledFields(Protocol):
    """The fields of a compiled model (`compile.CompiledModel`) that a choice may read."""

    model: ir.Model
    manifest: Manifest
    counts: dict[str, int]


@dataclass(frozen=True)
class KernelChoice:
    """One choice among kernel forms.

    name: the name in reports and manifests.
    forms: the names of the forms there, the default first.
    applies: whether a compiled model in the default forms has a part that the choice affects.
    rows: batch sizes at which the choice is measured; empty for the batch sizes of `tune`.
    """

    name: str
    forms: tuple[str, ...]
    applies: Callable[[CompiledFields], bool]
    rows: tuple[int, ...] = ()

    @property
    def default(self) -> str:
        return self.forms[0]

    def form_in(self, forms: KernelForms) -> str:
        return forms.get(self.name, self.default)


def _recognised(name: str) -> Callable[[CompiledFields], bool]:
    return lambda compiled: compiled.counts.get(name, 0) > 0


def _holds(operator: str, stage: str = "") -> Callable[[CompiledFields], bool]:
    """Return a test for an operator in a stage, given as the prefix of its nodes' names; "" stands for both stages."""
    return lambda compiled: any(
        node.op_type == operator and (node.name or "").startswith(stage) for node in compiled.model.graph.all_nodes()
    )


MULTI_HEAD_ATTENTION = "MultiHeadAttention"
GIVEN_KEYS_ATTENTION = KernelChoice(
    "attention over given keys", (MULTI_HEAD_ATTENTION, "products and softmax"), _holds(MULTI_HEAD_ATTENTION, "decode/")
)
WHOLE_ATTENTION = KernelChoice(  # see onnx_operators.whole_attention
    "attention of whole sequences",
    ("GroupQueryAttention", MULTI_HEAD_ATTENTION),
    _holds("GroupQueryAttention", "encode/"),
)
ROTARY = KernelChoice("rotary positions", ("in the attention operator", "written out"), _recognised("rotary"))
NORMS = KernelChoice("root mean square norms", ("RMSNormalization", "written out"), _recognised("rms_norm"))
PROJECTIONS = KernelChoice(
    "projections of one value", ("one product", "a product each"), _recognised("merge_projections")
)
SUM_BEFORE_NORM = KernelChoice(
    "sums before norms", ("Add, LayerNormalization", "SkipLayerNormalization"), _holds("LayerNormalization")
)
# Add and Gelu were faster than BiasGelu at all measured sizes: docs/design/kernels.md#norms-and-sums.
BIAS_BEFORE_GELU = KernelChoice("bias before GELU", ("Add, Gelu", "BiasGelu"), _holds("Gelu"))
THREADS = KernelChoice(
    "threads", ("one per core", "one per core, not spinning", "one"), lambda compiled: (os.cpu_count() or 1) > 1
)
FEW_ROWS_KERNEL = KernelChoice(  # see quantize/rewrite.py
    "own kernel for few rows",
    ("2 rows, 3 of 4 bits", "none", "1 row", "4 rows", "8 rows"),
    lambda compiled: (
        compiled.manifest.decode is not None
        and compiled.manifest.quantization != "none"
        and compiled.manifest.optimized_for != "throughput"
    ),
    rows=(1, 2, 4, 8),
)
CHOICES = (
    GIVEN_KEYS_ATTENTION,
    WHOLE_ATTENTION,
    ROTARY,
    NORMS,
    PROJECTIONS,
    SUM_BEFORE_NORM,
    BIAS_BEFORE_GELU,
    FEW_ROWS_KERNEL,
    THREADS,
)
DEFAULT_FORMS: KernelForms = MappingProxyType({})


def with_forms(manifest: Manifest, forms: KernelForms, optimized_for: str) -> Manifest:
    """Return the manifest of a file in these kernel forms."""
    return replace(manifest, optimized_for=optimized_for, kernel_forms=forms, session=session_settings(forms))


def session_settings(forms: KernelForms) -> SessionSettings:
    """Return the settings of onnxruntime sessions that these forms need."""
    threads = THREADS.form_in(forms)
    left_out = {"SkipLayerNormFusion": SUM_BEFORE_NORM.form_in(forms) == SUM_BEFORE_NORM.default}
    left_out["BiasGeluFusion"] = BIAS_BEFORE_GELU.form_in(forms) == BIAS_BEFORE_GELU.default
    return SessionSettings(
        threads=1 if threads == "one" else None,
        spinning="not spinning" not in threads,
        disabled_optimizers=tuple(name for name, out in left_out.items() if out),
    )


def few_rows_limits(forms: KernelForms) -> Mapping[int, int] | None:
    """Return bits of a product → the rows up to which it has a separate kernel; None for the default."""
    form = FEW_ROWS_KERNEL.form_in(forms)
    if form == FEW_ROWS_KERNEL.default:
        return None
    return {} if form == "none" else dict.fromkeys((4, 6, 8), int(form.split()[0]))
