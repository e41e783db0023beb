"""Rewrites of the ONNX model, one per file; `run` of each returns how many places it changed.

`run_passes` runs them in order. `half_precision` and `emulate_half_on_cpu` are for files in half precision, which
`build.py` makes.
"""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.common.kernel_choices import DEFAULTS, GIVEN, NORMS, PROJECTIONS, Forms
from tformer_export.passes import (
    decompose_attention,
    drop_reshapes,
    fold_attention_scale,
    full_score_attention,
    merge_projections,
    remove_unused,
    rms_norm,
    shared_encoder_context,
    strip_debug_info,
    tie_embeddings,
    transposed_matmul,
)

STANDARD = (drop_reshapes, rms_norm, remove_unused, tie_embeddings, merge_projections, remove_unused, strip_debug_info)
PASSES = (
    drop_reshapes,
    rms_norm,
    remove_unused,
    fold_attention_scale,
    shared_encoder_context,
    tie_embeddings,
    transposed_matmul,
    merge_projections,
    remove_unused,
    strip_debug_info,
)


def run_passes(model: ir.Model, longest: int, forms: Forms = DEFAULTS, target: str = "cpu") -> dict[str, int]:
    """Run the passes in order, for a portable file those that make standard operators; returns what each changed, by
    name.

    longest: the maximum length. forms: those that are not the default leave a pass out, or take an operator apart
    again. What chooses among the CPU's kernels is for the CPU, and no CUDA graph holds the branches that it makes.
    """
    left_out = [
        p for choice, p in ((NORMS, rms_norm), (PROJECTIONS, merge_projections)) if choice.of(forms) != choice.default
    ]
    if longest <= full_score_attention.SHORT or target != "cpu":
        left_out.append(fold_attention_scale)
    changed: dict[str, int] = {}
    for p in STANDARD if target == "portable" else PASSES:
        name = p.__name__.rsplit(".", 1)[1]
        changed[name] = changed.get(name, 0) + (p.run(model) if p not in left_out else 0)
        # Not before that pass, which knows the attention by its operator.
        if p is shared_encoder_context and GIVEN.of(forms) != GIVEN.default:
            decompose_attention.run(model, "decode/")
    if target == "cpu":
        changed["full_score_attention"] = full_score_attention.run(model, longest)
    return changed
