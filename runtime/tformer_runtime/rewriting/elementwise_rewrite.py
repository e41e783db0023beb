"""Recognition of what a layer computes between products, where native kernels compute it with fewer passes over memory.

    activation of a product's result                     → an attribute of the product
    Split of it in halves, activation of one half, Mul   → Gate
    Add of a product's result and another value, norm    → Norm, whose second result is the sum
    LayerNormalization, RMSNormalization                 → Norm

Activations are Relu, Gelu, QuickGelu, and x · Sigmoid(x) or x · Sigmoid(alpha · x) written out.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from msgspec import Struct

from tformer_runtime.format.onnx_graph import Graph, Node, new_node, tensor_array
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.float_product import find_constant
from tformer_runtime.rewriting.quantized_product import CONTRIB, Readers
from tformer_runtime.rewriting.stored_weights import is_operator

NATIVE_NORM, NATIVE_GATE = "Norm", "Gate"
ROOT_MEAN_SQUARE_NORMS = ("RMSNormalization", "SimplifiedLayerNormalization")
NORMS = ("LayerNormalization", *ROOT_MEAN_SQUARE_NORMS)
DEFAULT_EPSILON = 1e-5  # of the standard operators
DEFAULT_ALPHA = 1.702  # of QuickGelu
COLUMNS = "columns"  # attribute of products, for this module: the numbers of a row of the result


class ActivationKind(IntEnum):
    """The numbers that the kernels give to activations."""

    NONE = 0
    RELU = 1
    GELU = 2
    GELU_TANH = 3
    SWISH = 4


class Activation(Struct, frozen=True):
    """An activation. alpha: of SWISH, x · sigmoid(alpha · x)."""

    kind: ActivationKind = ActivationKind.NONE
    alpha: float = 1.0

    def attributes(self) -> dict[str, int | float]:
        """Return the attributes of an operator that applies the activation."""
        return {"activation": int(self.kind), "alpha": self.alpha}


class Activated(Struct, frozen=True):
    """A value's activation. result: its name. nodes: those that compute it."""

    activation: Activation
    result: str
    nodes: tuple[Node, ...]


class ElementwiseRewriting(Struct, frozen=True):
    """The replacement of activations, gates and norms of one graph, without its branches.

    inputs: names of the inputs of the model, whose values a caller gives.
    has_scans: whether the model has a Scan in any of its graphs.
    domain: of the kernels' operators. products: the names of those that have an attribute for an activation.
    path: the place of the kernels' path in the library.
    """

    graph: Graph
    files: WeightFiles
    inputs: set[str]
    has_scans: bool
    domain: str
    products: tuple[str, ...]
    path: int

    def replace_all(self) -> int:
        """Replace all of them and return their number."""
        return self.fold_activations() + self.replace_gates() + self.replace_norms()

    def _is_product(self, node: Node) -> bool:
        return node.domain == self.domain and node.op_type in self.products

    def _replace(self, new_nodes: dict[int, Node | None]) -> int:
        """Replace nodes as `Graph.replace_nodes` does, and return the number of new ones."""
        self.graph.replace_nodes(new_nodes)
        return sum(new is not None for new in new_nodes.values())

    def _activated(self, name: str, readers: Readers) -> Activated | None:
        """Return the activation that alone reads a value; None if there is none."""
        nodes = readers.nodes.get(name, [])
        if len(nodes) == 2:
            return self._swish(name, nodes, readers)
        node = readers.only_reader(name)
        activation = None
        if node is None:
            return None
        if is_operator(node, "Relu", 1):
            activation = Activation(ActivationKind.RELU)
        elif is_operator(node, "Gelu", 1) and not node.attribute_names():
            activation = Activation(ActivationKind.GELU)
        elif is_operator(node, "Gelu", 1) and node.attribute_names() == ["approximate"]:
            kinds = {"none": ActivationKind.GELU, "tanh": ActivationKind.GELU_TANH}
            kind = kinds.get(node.text_attribute("approximate"))
            activation = None if kind is None else Activation(kind)
        elif node.op_type == "QuickGelu" and node.domain == CONTRIB and len(node.inputs) == len(node.outputs) == 1:
            alpha = node.attributes().get("alpha", DEFAULT_ALPHA)
            activation = Activation(ActivationKind.SWISH, alpha) if isinstance(alpha, float) else None
        return None if activation is None else Activated(activation, node.outputs[0], (node,))

    def _swish(self, name: str, nodes: list[Node], readers: Readers) -> Activated | None:
        """Return the activation x · Sigmoid(alpha · x) of a value that two nodes read."""
        for inner, product in (nodes, nodes[::-1]):
            alpha, before = 1.0, list[Node]()
            sigmoid: Node | None = inner
            if is_operator(inner, "Mul", 2):
                factor = self._number(inner.inputs[1] if inner.inputs[0] == name else inner.inputs[0])
                if factor is None:
                    continue
                alpha, before, sigmoid = factor, [inner], readers.only_reader(inner.outputs[0])
            if sigmoid is None or not is_operator(sigmoid, "Sigmoid", 1) or not is_operator(product, "Mul", 2):
                continue
            if name not in readers.outside and readers.only_reader(sigmoid.outputs[0]) is product:
                activation = Activation(ActivationKind.SWISH, alpha)
                return Activated(activation, product.outputs[0], (*before, sigmoid, product))
        return None

    def _number(self, name: str) -> float | None:
        """Return a constant of one number."""
        tensor = find_constant(self.graph, name, np.float32, self.inputs)
        if tensor is None or tensor.shape not in ((), (1,)):
            return None
        array = tensor_array(tensor, self.files.read)
        return None if array is None else float(array.item())

    def fold_activations(self) -> int:
        """Let products apply the activation that alone reads their result."""
        readers = Readers(self.graph)
        new_nodes: dict[int, Node | None] = {}
        for node in self.graph.nodes:
            found = self._activated(node.outputs[0], readers) if self._is_product(node) else None
            if found is not None:
                attributes = {**node.number_attributes(), **found.activation.attributes()}
                new_nodes |= dict.fromkeys(map(id, found.nodes))
                new_nodes[id(node)] = new_node(node.op_type, self.domain, node.inputs, [found.result], attributes)
        return self._replace(new_nodes)

    def replace_gates(self) -> int:
        """Replace the products of an activated half with the other half."""
        readers = Readers(self.graph)
        new_nodes: dict[int, Node | None] = {}
        for split in self.graph.nodes:
            if not self._splits_in_halves(split):
                continue
            for place, half in enumerate(split.outputs):
                found = self._activated(half, readers)
                product = readers.only_reader(split.outputs[1 - place])
                if found is None or product is None or not is_operator(product, "Mul", 2):
                    continue
                is_gate = sorted(product.inputs) == sorted([found.result, split.outputs[1 - place]])
                if is_gate and readers.only_reader(found.result) is product:
                    attributes = {"path": self.path, "first": int(place == 0), **found.activation.attributes()}
                    gate = new_node(NATIVE_GATE, self.domain, split.inputs[:1], product.outputs, attributes)
                    new_nodes |= {**dict.fromkeys(map(id, (*found.nodes, product))), id(split): gate}
                    break
        return self._replace(new_nodes)

    def _splits_in_halves(self, node: Node) -> bool:
        """Return whether a node splits the result of a product in halves."""
        if node.op_type != "Split" or node.domain or len(node.outputs) != 2 or not all(node.outputs):
            return False
        attributes, product = node.attributes(), self._product_of(node.inputs[0])
        if attributes.get("axis") != -1 or not _has_only(node, {"axis", "num_outputs"}) or product is None:
            return False
        columns = product.attributes()[COLUMNS]
        assert isinstance(columns, int)
        if len(node.inputs) == 1 or not node.inputs[1]:
            return attributes.get("num_outputs") == 2 and columns % 2 == 0
        tensor = find_constant(self.graph, node.inputs[1], np.int64, self.inputs)
        sizes = tensor_array(tensor, self.files.read) if tensor is not None and tensor.shape == (2,) else None
        return sizes is not None and sizes.tolist() == [columns / 2] * 2

    def replace_norms(self) -> int:
        """Replace norms, with the sums before them.

        onnxruntime must know the shapes that a Scan computes with, and infers none behind operators of kernels. So with
        a Scan in the model, only those norms are replaced whose shape a product hides already.
        """
        readers = Readers(self.graph)
        new_nodes: dict[int, Node | None] = {}
        for norm in self.graph.nodes:
            attributes = self._norm_attributes(norm)
            if attributes is None:
                continue
            value, weight, bias = [*norm.inputs, ""][:3]
            adder = self.graph.producers.get(value)
            inputs, outputs, replaced = [value, "", weight, bias], norm.outputs[:1], norm
            is_sum = adder is not None and self._is_residual_sum(adder)
            if not is_sum and self._product_of(value) is None and self.has_scans:
                continue
            if adder is not None and is_sum and id(adder) not in new_nodes:
                inputs, replaced = [*adder.inputs, weight, bias], adder
                if readers.only_reader(value) is None:
                    outputs = [*outputs, value]
                new_nodes[id(norm)] = None
            new_nodes[id(replaced)] = new_node(NATIVE_NORM, self.domain, inputs, outputs, attributes)
        return self._replace(new_nodes)

    def _is_residual_sum(self, node: Node) -> bool:
        """Return whether a node adds a product's result and another value, which have the same shape as a rule."""
        if not is_operator(node, "Add", 2):
            return False
        return any(self._product_of(name) is not None for name in node.inputs)

    def _product_of(self, name: str) -> Node | None:
        """Return the product whose result a value is, which is of float32 then; None for other values."""
        producer = self.graph.producers.get(name)
        return producer if producer is not None and self._is_product(producer) else None

    def _norm_attributes(self, node: Node) -> dict[str, int | float] | None:
        """Return the attributes of the native operator of a norm; None for other nodes."""
        is_root_mean_square = node.op_type in ROOT_MEAN_SQUARE_NORMS
        most = 2 if is_root_mean_square else 3
        if node.op_type not in NORMS or node.domain or not 2 <= len(node.inputs) <= most or any(node.outputs[1:]):
            return None
        given = node.attributes()
        epsilon, known = given.get("epsilon", DEFAULT_EPSILON), {"axis", "epsilon", "stash_type"}
        if given.get("axis", -1) != -1 or given.get("stash_type", 1) != 1 or not _has_only(node, known):
            return None
        if not isinstance(epsilon, float) or not all(self._is_row(name) for name in node.inputs[1:] if name):
            return None
        return {"path": self.path, "epsilon": epsilon, "root_mean_square": int(is_root_mean_square)}

    def _is_row(self, name: str) -> bool:
        """Return whether a value is a weight of one axis, which a norm needs before it is computed.

        One number stands for a whole row with onnxruntime, and not with the kernels.
        """
        tensor = find_constant(self.graph, name, np.float32, self.inputs)
        return tensor is not None and len(tensor.shape) == 1 and tensor.shape[0] > 1


def _has_only(node: Node, known: set[str]) -> bool:
    """Return whether a node has no attributes but these, and each once."""
    names = node.attribute_names()
    return set(names) <= known and len(set(names)) == len(names)
