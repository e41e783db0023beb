"""Small files of single-pass models, built with onnx.helper, and the same computation in numpy.

The states of a row are x = E[ids] + T[types]. Its vector is the mean of x without padding. Its scores are the vector
times W.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tformer_runtime.format import manifest as m

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "good", "bad", "day", "film", "a", "the", "night", "old"]
WIDTH, LABELS, MAX_INPUT_TOKENS = 6, ("NEGATIVE", "NEUTRAL", "POSITIVE"), 12
_random = np.random.default_rng(4)
EMBEDDING = _random.standard_normal((len(WORDS), WIDTH)).astype(np.float32)
TYPES = _random.standard_normal((2, WIDTH)).astype(np.float32)
HEAD = _random.standard_normal((WIDTH, len(LABELS))).astype(np.float32)
SPANS = m.OutputMeaning(("O", "B-A", "I-A", "B-B", "I-B", "I-C"))
# Task → arguments of `write`
TEXT_TASKS: dict[str, dict[str, Any]] = {
    "vector": {"output": "vector"},
    "states": {"output": "states"},
    "scores": {"output": "scores"},
    "spans": {"output": "states", "task": "token-classification", "output_meaning": SPANS},
    "answers": {
        "output": "places",
        "task": "question-answering",
        "output_meaning": m.OutputMeaning(settings={"first": 1}),
    },
    "masks": {
        "output": "states",
        "task": "fill-mask",
        "output_meaning": m.OutputMeaning(settings={"mask": WORDS.index("old")}),
    },
}


def words() -> Tokenizer:
    """Return a tokenizer of words: [CLS] A [SEP] for a text, [CLS] A [SEP] B [SEP] for a pair, with B of type 1."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def ids_and_types(text: str | tuple[str, str]) -> tuple[list[int], list[int]]:
    """Return the ids and the token types of a text or a pair, computed without the tokenizer."""
    texts = [text] if isinstance(text, str) else list(text)
    parts = [[WORDS.index(w) if w in WORDS else 3 for w in part.split()] for part in texts]
    ids = [1, *(i for part in parts for i in [*part, 2])]
    return ids, [0] * (2 + len(parts[0])) + [1] * (len(ids) - 2 - len(parts[0]))


def vector(text: str | tuple[str, str]) -> np.ndarray:
    """Return the vector of a text or a pair."""
    ids, types = ids_and_types(text)
    return (EMBEDDING[ids] + TYPES[types]).mean(0)


def states(text: str | tuple[str, str]) -> np.ndarray:
    """Return the states of a text or a pair, (time, width)."""
    ids, types = ids_and_types(text)
    return EMBEDDING[ids] + TYPES[types]


def write(path: Path, output: str = "vector", ragged: bool = True, **manifest: Any) -> Path:
    """Write a model file and return its path.

    output: "vector", "states" (of each position), "scores", or "places", two outputs with a number for each position.
    manifest: changed fields of the manifest.
    """
    b, time = m.BATCH_AXIS, "ids_length"
    inputs = (
        m.RequestInput("ids", "int64", (b, time), "ids", max_length=MAX_INPUT_TOKENS, vocabulary=len(WORDS)),
        m.RequestInput("mask", "int64", (b, time), "mask", of="ids"),
        m.RequestInput("types", "int64", (b, time), "types", of="ids"),
    )
    shapes = {"vector": (b, WIDTH), "states": (b, time, WIDTH), "scores": (b, len(LABELS)), "places": (b, time)}
    output_names = ("start", "end") if output == "places" else ("output",)
    outputs = tuple(m.TensorSpec(name, "float32", shapes[output]) for name in output_names)
    weights = {"E": EMBEDDING, "T": TYPES, "W": HEAD, "last": np.array([2]), "axis": np.array([1])}
    weights |= {"0": np.array(0), "1": np.array(1)}
    nodes = [
        h.make_node("Gather", ["E", "ids"], ["e"]),
        h.make_node("Gather", ["T", "types"], ["t"]),
        h.make_node("Add", ["e", "t"], ["output" if output == "states" else "x"]),
    ]
    if output == "places":
        nodes.append(h.make_node("MatMul", ["x", "W"], ["s"]))
        nodes += [h.make_node("Gather", ["s", str(i)], [name], axis=2) for i, name in enumerate(output_names)]
    elif output != "states":
        nodes += [
            h.make_node("Cast", ["mask"], ["keep"], to=T.FLOAT),
            h.make_node("Unsqueeze", ["keep", "last"], ["k"]),
            h.make_node("Mul", ["x", "k"], ["kept"]),
            h.make_node("ReduceSum", ["kept", "axis"], ["sum"], keepdims=0),
            h.make_node("ReduceSum", ["k", "axis"], ["count"], keepdims=0),
            h.make_node("Div", ["sum", "count"], ["output" if output == "vector" else "v"]),
        ]
    if output == "scores":
        nodes.append(h.make_node("MatMul", ["v", "W"], ["output"]))
    used_names = {name for node in nodes for name in node.input}
    graph = h.make_graph(
        nodes,
        "toy",
        [h.make_tensor_value_info(i.name, T.INT64, i.shape) for i in inputs],
        [h.make_tensor_value_info(o.name, T.FLOAT, o.shape) for o in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items() if name in used_names],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
    fields: dict[str, Any] = {
        "task": "text-classification" if output == "scores" else "feature-extraction",
        "output_meaning": m.OutputMeaning(LABELS, m.SINGLE_LABEL) if output == "scores" else m.OutputMeaning(),
        "tokenizers": (words().to_str(),),
        "tokenizer_of": {"ids": 0},
    }
    full_manifest = m.Manifest(
        max_length=0, encode=m.EncodeStage(inputs, outputs, ragged=ragged), decode=None, **{**fields, **manifest}
    )
    h.set_model_props(model, {m.MANIFEST_KEY: full_manifest.to_json()})
    onnx.save(model, path)
    return path
