"""The operators of attention on cpu, cuda and web, and in portable files, which have standard operators only.

cpu: GroupQueryAttention over the step input's own past (in place, its cost follows the valid length) and over whole
    sequences, and MultiHeadAttention over other keys and values. For the kernels of these operators see
    `passes/fold_attention_scale.py`, `passes/full_score_attention.py` and `quantize/kv_cache_int8.py`.

cuda: GroupQueryAttention in half precision, because it has no float32 kernel on CUDA, and where attention is causal and
    nothing else, because it leaves its fast kernels when it has a bias. Otherwise as in portable files: TensorScatter
    into the cache, and plain matrix products.

web: operators with WebGPU kernels: GroupQueryAttention where positions look back, as on the CPU, and MultiHeadAttention
    over other keys and values. There is no kernel for TensorScatter, nor for GroupQueryAttention that looks ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir
import torch
from torch.fx import GraphModule, Node

from tformer_export.analysis.attention import ATTENTION
from tformer_export.common import onnx_operators
from tformer_export.common.fx_nodes import describe_node, meta
from tformer_export.common.kernel_choices import ROTARY, WHOLE_ATTENTION, KernelForms
from tformer_export.common.option_values import TARGET_NAMES
from tformer_export.lowering.webgpu_operators import operators_without_kernel
from tformer_export.normalise.attention_weights import WEIGHTS
from tformer_export.staging.plan import CachedAttention
from tformer_runtime.base.errors import UnsupportedModelError

CPU, CUDA, WEB = "cpu", "cuda", "web"
MAX_HEAD_SIZE = 256  # of CUDA's flash attention
ROTARY_HEAD_MULTIPLE = 16  # GroupQueryAttention rotates queries and keys whose head size is a multiple of this


@dataclass(frozen=True)
class Target:
    """The target of a file.

    name: as in the option `target`.
    half: whether the file will compute in half precision.
    rotary: whether operators may rotate queries and keys themselves.
    whole: whether attention over whole sequences has an operator of its own.
    """

    name: str
    half: bool = False
    rotary: bool = True
    whole: bool = True

    def in_forms(self, forms: KernelForms) -> Target:
        """Return the target with the operators of these kernel forms."""
        return replace(
            self,
            rotary=ROTARY.form_in(forms) == ROTARY.default,
            whole=WHOLE_ATTENTION.form_in(forms) == WHOLE_ATTENTION.default,
        )

    def fuses(self, attention: CachedAttention) -> bool:
        """Return whether a fused operator updates this attention's caches."""
        if self.name not in (CPU, WEB) and not (self.name == CUDA and self.half):
            return False
        query, key, value = (meta(n) for n in (attention.node.args[0], attention.key, attention.value))
        sizes = {query.shape[3], key.shape[3], value.shape[3]}
        if len(sizes) > 1 or query.dtype != torch.float32:
            return False
        size = int(sizes.pop())
        return size % onnx_operators.HEAD_MULTIPLE == 0 and (self.name in (CPU, WEB) or size <= MAX_HEAD_SIZE)

    @property
    def takes_bias(self) -> bool:
        """Return whether the fused operator is fast with a bias in addition to its own causal mask."""
        return self.name in (CPU, WEB)

    def rotates(self, attention: CachedAttention) -> bool:
        """Return whether the fused operator can rotate queries and keys by their positions."""
        return self.rotary and int(meta(attention.key).shape[3]) % ROTARY_HEAD_MULTIPLE == 0

    def lower(self, module: GraphModule) -> int:
        """Replace the remaining attention nodes and products by group with this target's operators, in place.

        Return the number of products by group.
        """
        operator, grouped = self._attention_operator(), 0
        for node in module.graph.nodes:
            if node.target is ATTENTION:
                node.target = operator
            elif node.target is WEIGHTS:
                node.target = onnx_operators.plain_attention_weights
            elif is_grouped_product(node):
                _split_groups(module, node)
                grouped += 1
        module.graph.eliminate_dead_code()
        module.recompile()
        return grouped

    def check(self, model: ir.Model) -> None:
        """Check the operators of a portable file, which are standard ones, and of a file for the web.

        onnx's own checker reads a portable file too. Raises UnsupportedModelError for other operators.
        """
        if self.name == WEB and (missing := operators_without_kernel(model)):
            raise UnsupportedModelError(
                f"onnxruntime has no WebGPU kernel for {', '.join(missing)}, which the model needs: export it for the "
                "target cpu, which runs in WebAssembly"
            )
        if self.name != "portable":
            return
        foreign = {node.domain for node in model.graph.all_nodes() if node.domain not in ("", "ai.onnx")}
        if foreign:
            raise UnsupportedModelError(f"the model needs operators of {', '.join(foreign)}, which are not portable")
        onnx.checker.check_model(ir.to_proto(model), full_check=False)

    def _attention_operator(self) -> Callable[..., torch.Tensor]:
        """Return the operator of attention over given keys and values."""
        if self.name == WEB:
            return onnx_operators.multi_head_attention
        if self.name == CUDA and self.half and self.whole:
            return onnx_operators.self_attention
        if self.name != CPU:
            return onnx_operators.plain_attention
        return onnx_operators.whole_attention if self.whole else onnx_operators.multi_head_attention


def is_grouped_product(node: Node) -> bool:
    """Return whether a node multiplies groups of rows with a matrix each, by aten's operation or a library's own."""
    return isinstance(node.target, torch._ops.OpOverload) and "grouped_mm" in str(node.target)


def _split_groups(module: GraphModule, node: Node) -> None:
    """Give each group its own weight, so that a step reads only the weights of groups with rows."""
    rows, weights, ends = (*node.args, *node.kwargs.values())[:3]
    if not isinstance(weights, Node) or weights.op != "get_attr":
        raise UnsupportedModelError(
            f"{describe_node(node)} multiplies groups of rows with matrices that are not weights"
        )
    stacked = module.get_buffer(str(weights.target))
    parts = []
    with module.graph.inserting_before(node):
        for i, weight in enumerate(stacked):
            name = f"{weights.target}_{i}"
            if not hasattr(module, name):
                module.register_buffer(name, weight)
            parts.append(module.graph.get_attr(name))
    node.args, node.kwargs = (rows, ends, *parts), {}
    node.target = onnx_operators.grouped_product


TARGETS = {name: Target(name) for name in TARGET_NAMES}
