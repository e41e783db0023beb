"""Chains: native operators that run one after the other become one operator.

onnxruntime takes 0.1 to 0.2 µs for each operator, and a step of a small model has a hundred of them. The library runs
the operators of a chain itself (`runtime/kernels/src/chain_op.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tformer_runtime.format.onnx_graph import Graph, Node, new_node
from tformer_runtime.rewriting.quantized_product import Readers

CHAIN = "Chain"
MAX_CHAIN = 4096  # operators; the library reads a chain in time that is linear in them


class Loop(NamedTuple):
    """The values of a chain that runs several steps, by their names (`runtime/kernels/src/greedy_loop.h`).

    counts: the inputs that grow by 1 at each step.
    caches: inputs and results that share their memory.
    """

    tokens: str
    logits: str
    plan: str
    counts: tuple[str, ...]
    caches: tuple[tuple[str, str], ...]


def make_chains(graph: Graph, domain: str, parts: int = 1) -> int:
    """Replace the native operators of a graph by chains, without its branches. Return the number of chains.

    domain: of the native operators.
    parts: the number of threads that may share the sequences of a batch.

    Operators may be in one chain if no other operator stands on a path between them. So each value gets a wave: the
    greatest number of changes from a native operator to another one on a path to it. The native operators of a wave
    are a chain. It runs after the other operators of its wave, which only read values of earlier chains.
    """
    waves: dict[str, tuple[int, bool]] = {}  # value → its wave, and whether a native operator computes it
    by_wave: dict[int, tuple[list[Node], list[Node]]] = {}  # wave → other operators, native ones
    for node in graph.nodes:
        is_native = node.domain == domain and node.op_type != CHAIN
        read = [waves[name] for name in node.names_read() if name in waves]
        wave = max((wave + (from_native and not is_native) for wave, from_native in read), default=0)
        waves |= dict.fromkeys(filter(None, node.outputs), (wave, is_native))
        by_wave.setdefault(wave, ([], []))[is_native].append(node)
    readers = Readers(graph)
    nodes, count = [], 0
    for _, (others, natives) in sorted(by_wave.items()):
        nodes += others
        for begin in range(0, len(natives), MAX_CHAIN):
            members = natives[begin : begin + MAX_CHAIN]
            if len(members) > 1:
                members, count = [new_chain(members, domain, readers, parts)], count + 1
            nodes += members
    graph.nodes = nodes
    graph.index()
    return count


def new_chain(members: list[Node], domain: str, readers: Readers, parts: int, loop: Loop | None = None) -> Node:
    """Return the operator that runs the members in their order.

    readers: of the graph. domain, parts: as for `make_chains`. loop: of a chain that runs several steps.
    """
    own = {id(node) for node in members}
    computed = [name for node in members for name in node.outputs if name]
    results = [
        name
        for name in computed
        if name in readers.outside or any(id(node) not in own for node in readers.nodes.get(name, ()))
    ]
    computed_names, result_names = set(computed), set(results)
    inputs = [*dict.fromkeys(n for node in members for n in node.inputs if n and n not in computed_names)]
    inputs += [] if loop is None else [loop.plan]
    between = [name for name in computed if name not in result_names]
    numbers = {name: str(i) for i, name in enumerate([*inputs, *results, *between])}
    numbers[""] = "-"

    def places(names: Iterable[str]) -> list[str]:
        return [numbers[name] for name in names]

    lines: list[str] = []
    attributes: dict[str, int | float] = {}
    for i, node in enumerate(members):
        lines.append(" ".join([node.op_type, *places(node.inputs), ">", *places(node.outputs)]))
        attributes |= {f"{i}.{name}": value for name, value in node.number_attributes().items()}
    roles = [] if loop is None else [
        ("tokens", loop.tokens), ("logits", loop.logits), ("plan", loop.plan),
        *(("counts", name) for name in loop.counts), *(("cache", *pair) for pair in loop.caches),
    ]  # fmt: skip
    program: dict[str, int | float | str] = {
        "input_count": len(inputs), "output_count": len(results), "parts": parts, "program": "\n".join(lines),
        "loop": "\n".join(" ".join([role, *places(names)]) for role, *names in roles),
    }  # fmt: skip
    return new_node(CHAIN, domain, inputs, results, {**program, **attributes})
