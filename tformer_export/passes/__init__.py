"""Rewrites of the ONNX model, one module each.

`PASSES` lists the passes in their order, and `run_passes` runs them. The passes of `half` are for
files in half precision only; `build.py` runs them after the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import onnx_ir as ir

from tformer_export.common.kernel_choices import (
    DEFAULT_FORMS,
    GIVEN_KEYS_ATTENTION,
    NORMS,
    PROJECTIONS,
    KernelChoice,
    KernelForms,
)
from tformer_export.common.packed_weight import PackedWeight
from tformer_export.passes import (
    check_graph,
    decompose_attention,
    drop_reshapes,
    fold_attention_scale,
    full_score_attention,
    gelu,
    keep_packed_weights,
    merge_projections,
    pack_attention_inputs,
    remove_unused,
    rms_norm,
    shared_encoder_context,
    skip_norm,
    strip_debug_info,
    tie_embeddings,
    transposed_matmul,
    unflatten_products,
    unstack_products,
)


@dataclass(frozen=True)
class PassSettings:
    """The properties of a file on which its passes depend.

    max_length: the maximum length of the step input, in tokens.
    forms: the kernel form of each choice.
    target: "cpu", "cuda", "web" or "portable".
    packed: name → a matrix that the source stores in 4-bit integers.
    half: whether the file will compute in half precision.
    """

    max_length: int
    forms: KernelForms
    target: str
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)
    half: bool = False


@dataclass(frozen=True)
class Pass:
    """A rewrite of a model.

    name: the key of its count in the result of `run_passes`.
    rewrite: rewrites a model in place and returns the number of places that it changed. Its docstring defines a place.
    applies: whether a file with these settings gets the pass.
    portable: whether a portable file gets it, because it writes standard operators only.
    web: whether a file for the web gets it, because it writes operators with WebGPU kernels only.
    """

    name: str
    rewrite: Callable[[ir.Model, PassSettings], int]
    applies: Callable[[PassSettings], bool] = lambda settings: True
    portable: bool = False
    web: bool = True

    def run(self, model: ir.Model, settings: PassSettings) -> int:
        """Rewrite the model in place if the pass applies, and return the number of changed places."""
        is_possible = {"portable": self.portable, "web": self.web}.get(settings.target, True)
        return self.rewrite(model, settings) if is_possible and self.applies(settings) else 0


def _without_settings(rewrite: Callable[[ir.Model], int]) -> Callable[[ir.Model, PassSettings], int]:
    return lambda model, settings: rewrite(model)


def _has_default(choice: KernelChoice, settings: PassSettings) -> bool:
    """Return whether a file has the default form of a choice."""
    return choice.form_in(settings.forms) == choice.default


def _can_hold_all_scores(settings: PassSettings) -> bool:
    """Return whether `full_score_attention` changes a file of this maximum length. It chooses between CPU kernels."""
    return settings.target == "cpu" and settings.max_length > full_score_attention.MAX_SHORT_TOKENS


PASSES = (
    Pass("gelu", _without_settings(gelu.run), portable=True),
    Pass("drop_reshapes", _without_settings(drop_reshapes.run), portable=True),
    Pass("remove_unused", _without_settings(remove_unused.run), portable=True),
    # For a GPU one product with a stack takes less time than many products.
    Pass(
        "unstack_products",
        _without_settings(unstack_products.run),
        lambda settings: not settings.half and settings.target != "cuda",
        portable=True,
    ),
    Pass("remove_unused", _without_settings(remove_unused.run), portable=True),
    # After the passes before it: a Gelu, or a reshape to the same rows, may stand between two products. The next passes
    # find more products then.
    Pass("unflatten_products", _without_settings(unflatten_products.run), portable=True),
    # Before the passes that change weights.
    Pass("packed_weights", lambda model, settings: keep_packed_weights.run(model, settings.packed)),
    Pass("drop_reshapes", _without_settings(drop_reshapes.run), portable=True),
    Pass("rms_norm", _without_settings(rms_norm.run), partial(_has_default, NORMS), portable=True, web=False),
    Pass("remove_unused", _without_settings(remove_unused.run), portable=True),
    # Before the passes that pack the inputs of attention: its queries are a value of their own then.
    Pass("fold_attention_scale", _without_settings(fold_attention_scale.run), _can_hold_all_scores),
    Pass("shared_encoder_context", _without_settings(shared_encoder_context.run)),
    Pass(  # after the pass before it, which recognises attention by its operator
        "decompose_attention",
        lambda model, settings: decompose_attention.run(model, "decode/"),
        lambda settings: not _has_default(GIVEN_KEYS_ATTENTION, settings),
    ),
    Pass("tie_embeddings", _without_settings(tie_embeddings.run), portable=True),
    Pass("transposed_matmul", _without_settings(transposed_matmul.run), web=False),
    # Before merge_projections, which adds columns to a projection if another one reads the same value.
    Pass("pack_attention_inputs", _without_settings(pack_attention_inputs.run)),
    Pass(
        "merge_projections", _without_settings(merge_projections.run), partial(_has_default, PROJECTIONS), portable=True
    ),
    Pass("remove_unused", _without_settings(remove_unused.run), portable=True),
    # Before the pass that removes the shapes of results. For a CPU there is no gain.
    Pass("skip_norm", _without_settings(skip_norm.run), lambda settings: settings.target == "cuda"),
    Pass("strip_debug_info", _without_settings(strip_debug_info.run), portable=True),
    Pass(
        "full_score_attention",
        lambda model, settings: full_score_attention.run(model, settings.max_length),
        _can_hold_all_scores,
    ),
)


def run_passes(
    model: ir.Model,
    max_length: int,
    forms: KernelForms = DEFAULT_FORMS,
    target: str = "cpu",
    packed: Mapping[str, PackedWeight] = MappingProxyType({}),
    half: bool = False,
) -> dict[str, int]:
    """Run the passes of a file in their order, and return how many places each of them changed, by its name.

    A pass that does not apply has 0. For the arguments see `PassSettings`. Raises UnsupportedModelError with the name
    of the pass after which the graph is invalid.
    """
    settings = PassSettings(max_length, forms, target, packed, half)
    ports = check_graph.ports_of(model)
    counts: dict[str, int] = {}
    for one_pass in PASSES:
        counts[one_pass.name] = counts.get(one_pass.name, 0) + one_pass.run(model, settings)
        check_graph.check_rewrite(model, one_pass.name, ports)
    return counts
