"""Which operator computes an attention, on cpu, on cuda, and where only standard operators may be used.

cpu: GroupQueryAttention over the step input's own past (in place, its cost follows the valid length) and over sequences
that are read whole, MultiHeadAttention over other keys and values that are given. Which kernels these operators have is
told by `passes/fold_attention_scale.py`, `passes/full_score_attention.py` and, of caches in fewer bits,
`quantize/kv_cache_int8.py`.

cuda: GroupQueryAttention too, in half precision alone, for on CUDA it has no float32 kernel, and where it is causal and
nothing else, for with a bias it leaves its fast kernels. Else what portable takes: TensorScatter into the cache and
plain matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir
import torch
from torch.fx import GraphModule, Node

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.attention_weights import WEIGHTS
from tformer_export.common import onnx_operators
from tformer_export.common.fx_nodes import meta
from tformer_export.common.kernel_choices import ROTARY, WHOLE, Forms
from tformer_export.staging.plan import CachedAttention
from tformer_runtime.base.errors import UnsupportedModelError

LARGEST_HEAD = 256  # beyond, CUDA's flash attention has no kernel
TURNED_MULTIPLE = 16  # of head sizes, for GroupQueryAttention to turn queries and keys, of this


@dataclass(frozen=True)
class Target:
    """name: what the user asks for. half: whether the file will compute in half precision. rotary: whether operators
    may turn queries and keys themselves. whole: whether sequences that are read whole have an operator of their own."""

    name: str
    half: bool = False
    rotary: bool = True
    whole: bool = True

    def in_forms(self, forms: Forms) -> Target:
        """The same with those of the forms that are of its operators."""
        return replace(self, rotary=ROTARY.of(forms) == ROTARY.default, whole=WHOLE.of(forms) == WHOLE.default)

    def fuses(self, attention: CachedAttention) -> bool:
        """Whether a fused operator keeps this attention's cache."""
        if self.name != "cpu" and not (self.name == "cuda" and self.half):
            return False
        query, key, value = (meta(n) for n in (attention.node.args[0], attention.key, attention.value))
        sizes = {query.shape[3], key.shape[3], value.shape[3]}
        if len(sizes) > 1 or query.dtype != torch.float32:
            return False
        size = int(sizes.pop())
        return size % onnx_operators.HEAD_MULTIPLE == 0 and (self.name == "cpu" or size <= LARGEST_HEAD)

    @property
    def takes_bias(self) -> bool:
        """Whether that operator is fast with a bias beside its own causal mask."""
        return self.name == "cpu"

    def turns(self, attention: CachedAttention) -> bool:
        """Whether that operator can turn queries and keys by their positions."""
        return self.rotary and int(meta(attention.key).shape[3]) % TURNED_MULTIPLE == 0

    def lower(self, module: GraphModule) -> int:
        """Replace the attention nodes that are left, and products by group, in place, by this target's operators;
        returns how many products by group there were."""
        operator, grouped = self._given_attention(), 0
        for node in module.graph.nodes:
            if node.target is ATTENTION:
                node.target = operator
            elif node.target is WEIGHTS:
                node.target = onnx_operators.attention_weights
            elif is_grouped_product(node):
                _split_groups(module, node)
                grouped += 1
        module.graph.eliminate_dead_code()
        module.recompile()
        return grouped

    def check(self, model: ir.Model) -> None:
        """For a portable file: that onnx's own checker accepts it and that every operator is a standard one."""
        if self.name != "portable":
            return
        foreign = {node.domain for node in model.graph.all_nodes() if node.domain not in ("", "ai.onnx")}
        if foreign:
            raise UnsupportedModelError(f"the model needs operators of {', '.join(foreign)}, which are not portable")
        onnx.checker.check_model(ir.to_proto(model), full_check=False)

    def _given_attention(self) -> Callable[..., torch.Tensor]:
        if self.name != "cpu":
            return onnx_operators.plain_attention
        return onnx_operators.whole_attention if self.whole else onnx_operators.multi_head_attention


def is_grouped_product(node: Node) -> bool:
    """Whether a node multiplies groups of rows with a matrix each: aten's operation, or a library's stand-in for it."""
    return isinstance(node.target, torch._ops.OpOverload) and "grouped_mm" in str(node.target)


def _split_groups(module: GraphModule, node: Node) -> None:
    """Give each group a weight of its own, so that a step reads those of the groups that have rows."""
    rows, weights, ends = (*node.args, *node.kwargs.values())[:3]
    if not isinstance(weights, Node) or weights.op != "get_attr":
        raise UnsupportedModelError(f"`{node.target}` multiplies groups of rows with matrices that are not weights")
    held = module.get_buffer(str(weights.target))
    parts = []
    with module.graph.inserting_before(node):
        for i, weight in enumerate(held):
            name = f"{weights.target}_{i}"
            if not hasattr(module, name):
                module.register_buffer(name, weight)
            parts.append(module.graph.get_attr(name))
    node.args, node.kwargs = (rows, ends, *parts), {}
    node.target = onnx_operators.grouped_product


TARGETS = {name: Target(name) for name in ("cpu", "cuda", "portable")}
