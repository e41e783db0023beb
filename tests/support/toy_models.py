"""Small model files that generate, built with onnx.helper, and the same computation in numpy.

A model has layers of self-attention (GroupQueryAttention with a cache in place, or TensorScatter and standard
operators), cross-attention if it has an encoder, and a projection to the vocabulary. A seed determines the weights. An
encoder-decoder is one graph whose stages are the branches of an `If`, as in the files of the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from msgspec.structs import replace
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from tformer_runtime.format import manifest as m

HEADS, SIZE = 2, 8  # the head size of GroupQueryAttention is a multiple of 8
WIDTH = HEADS * SIZE
CARRIED = 0.1  # the weight of a carried sum
PAD, START_ID, END_ID = 0, 1, 2
LETTERS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
ONNX_TYPE = {"int64": T.INT64, "int32": T.INT32, "bool": T.BOOL, "float32": T.FLOAT, "bfloat16": T.BFLOAT16}


def letters() -> Tokenizer:
    """Return a tokenizer of single letters. Its vocabulary has no unknown token."""
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(LETTERS[:3])
    return tokenizer


@dataclass(frozen=True)
class Toy:
    """Options of a model file.

    attention: "gqa" (GroupQueryAttention), "scatter" (TensorScatter with one tensor as past and present) or
        "scatter-pair" (TensorScatter with two tensors).
    vocabulary: the size of the vocabulary of the source and of the target.
    source_max: the maximum length of the source.
    select: the file computes logits of selected positions only.
    stride: cross-attention reads every `stride`-th position of the source.
    shares: several neighbouring rows may share one row of the context.
    half: the caches and the context are bfloat16; the computation is float32, because CPUs have no bfloat16 kernels.
    carries: the first layer reads a sum of the embeddings so far, which each row carries from token to token.
    extras: the file has extra outputs: the mean of the cross-attention weights, the hidden states that the projection
        to the vocabulary reads, and the embeddings of the source.
    """

    encoder: bool = True
    attention: str = "gqa"
    vocabulary: int = len(LETTERS)
    max_length: int = 64
    seed: int = 0
    source_max: int | None = 40
    select: bool = True
    tokenizer: bool = True
    start: tuple[int, ...] = (START_ID,)
    end: tuple[int, ...] = (END_ID,)
    sharpness: float = 3.0
    layers: int = 1
    stride: int = 1
    shares: bool = False
    carries: bool = False
    extras: bool = False
    half: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)

    def weights(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        shapes = {
            "source": (self.vocabulary, WIDTH),
            "target": (self.vocabulary, WIDTH),
            "places": (self.max_length, WIDTH),
        }
        names = ["q", "k", "v", "o", "cq", "co"]
        shapes |= {f"{n}{i}": (WIDTH, WIDTH) for i in range(self.layers) for n in names}
        shapes |= {"ck": (WIDTH, WIDTH), "cv": (WIDTH, WIDTH), "out": (WIDTH, self.vocabulary)}
        weights = {
            n: (rng.standard_normal(s) / np.sqrt(s[0] if n != "target" else 1)).astype(np.float32)
            for n, s in shapes.items()
        }
        weights["source"] *= np.sqrt(self.vocabulary)
        weights["places"] *= np.sqrt(self.max_length)
        weights["out"] *= self.sharpness
        return weights

    def manifest(self) -> m.Manifest:
        encode = decode = None
        cache_dtype = "bfloat16" if self.half else "float32"
        b, s = m.BATCH_AXIS, "source"
        context_length = s if self.stride == 1 else f"(source - 1)//{self.stride} + 1"
        if self.encoder:
            encode = m.EncodeStage(
                (
                    m.RequestInput("src", "int64", (b, s), "ids", pad=PAD, max_length=self.source_max),
                    m.RequestInput("src_mask", "bool", (b, s), "mask", of="src", keep=True),
                ),
                (
                    m.TensorSpec("context.k", cache_dtype, (b, HEADS, context_length, SIZE)),
                    m.TensorSpec("context.v", cache_dtype, (b, HEADS, context_length, SIZE)),
                    m.TensorSpec("context.bias", "float32", (b, 1, 1, context_length)),
                ),
                (m.ExtraOutput("hidden_states.source", "float32", (b, s, WIDTH)),) if self.extras else (),
                derived_lengths={context_length: m.DerivedLength(s, 1, self.stride)} if self.stride > 1 else {},
            )
        extras = [m.ExtraOutput("hidden_states.last", "float32", (b, m.SELECTED_AXIS, WIDTH))]
        if self.encoder:
            extras.append(
                m.ExtraOutput(m.CROSS_ATTENTIONS, "float32", (b, m.SELECTED_AXIS, context_length), m.CROSS_ATTENTIONS)
            )
        gqa = self.attention == "gqa"
        controls = (m.POSITIONS, m.LAST_POSITION, m.TOTAL_SLOTS) if gqa else (m.POSITIONS, m.START_SLOT, m.SLOT_INDICES)
        caches = tuple(
            m.CacheSpec(
                f"past.{n}{i}",
                f"present.{n}{i}",
                cache_dtype,
                (b, HEADS, m.SLOT_AXIS, SIZE),
                self.attention != "scatter-pair",
            )
            for i in range(self.layers)
            for n in "kv"
        )
        if self.carries:
            caches = (m.CacheSpec("past.sum", "present.sum", "float32", (b, 1, WIDTH), False), *caches)
            controls += (m.NEW_COUNTS,)
        decode = m.DecodeStage(
            m.TensorSpec("tgt", "int64", (b, m.NEW_AXIS)),
            controls + ((m.SELECTED_TOKENS,) if self.select else ()),
            caches,
            m.TensorSpec("logits", "float32", (b, m.NEW_AXIS, self.vocabulary)),
            context=tuple("past_" + o.name for o in encode.outputs) if encode else (),
            chunked_prefill=not gqa,
            extras=tuple(extras) if self.extras else (),
            shares_context=self.shares,
        )
        return m.Manifest(
            task="translate" if self.encoder else "continue",
            max_length=self.max_length,
            encode=encode,
            decode=decode,
            special_tokens=m.SpecialTokens(self.start, self.end, PAD),
            tokenizers=(letters().to_str(),) if self.tokenizer else (),
            tokenizer_of=({"src": 0, "tgt": 0} if self.encoder else {"tgt": 0}) if self.tokenizer else {},
            generation_defaults=self.defaults,
            precision="bf16" if self.half else "fp32",
            producer={"tformer": "0"},
            parity={"max_abs_error": 0.0},
        )

    def write(self, path: Path) -> Path:
        model = build(self)
        onnx.save(model, path)
        return path

    def logits(self, target: np.ndarray, source: np.ndarray | None = None) -> np.ndarray:
        """Return the logits (time, vocabulary) of one row, computed for the whole sequence."""
        return self.compute(target, source)["last"] @ self.weights()["out"]

    def compute(self, target: np.ndarray, source: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the extra outputs of one row, computed for the whole sequence: cross_attentions, last and source."""
        w, alignments = self.weights(), []
        x = w["target"][target] + w["places"][: len(target)]
        if self.carries:
            x = x + CARRIED * x.cumsum(0)
        causal = np.where(np.tri(len(target), dtype=bool), 0, -np.inf)
        for i in range(self.layers):
            x = x + _attend(x @ w[f"q{i}"], x @ w[f"k{i}"], x @ w[f"v{i}"], causal)[0] @ w[f"o{i}"]
            if source is not None:
                y = w["source"][source][:: self.stride]
                mixed, weights = _attend(x @ w[f"cq{i}"], y @ w["ck"], y @ w["cv"], np.zeros((1, 1)))
                x = x + mixed @ w[f"co{i}"]
                alignments.append(weights.mean(0))
        if source is None:
            return {"last": x}
        return {"last": x, "cross_attentions": np.mean(alignments, 0), "source": w["source"][source]}


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention output (time, width) and the attention weights (heads, time, source)."""
    q, k, v = (a.reshape(len(a), HEADS, SIZE).transpose(1, 0, 2) for a in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(SIZE) + bias
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    weights = scores / scores.sum(-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(q.shape[1], WIDTH), weights


class Graph:
    """The nodes of an ONNX graph. Methods add nodes and return the name of the output."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.prefix, self.count = prefix, 0

    def op(
        self, kind: str, inputs: list[str], outputs: list[str] | None = None, domain: str = "", **attributes: Any
    ) -> str:
        self.count += 1
        outputs = outputs or [f"{self.prefix}{self.count}"]
        self.nodes.append(h.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        return self.op("Constant", [], value=numpy_helper.from_array(np.asarray(value, dtype)))

    def wide(self, x: str, half: bool = True) -> str:
        return self.op("Cast", [x], to=T.FLOAT) if half else x

    def heads(self, x: str) -> str:
        """Reshape (batch, time, width) to (batch, heads, time, size)."""
        return self.op("Transpose", [self.op("Reshape", [x, self.constant([0, 0, HEADS, SIZE])])], perm=[0, 2, 1, 3])

    def attend(self, q: str, k: str, v: str, bias: str) -> tuple[str, str]:
        """Add an attention of a query (batch, time, width) to keys and values with heads.

        Return the output (batch, time, width) and the attention weights.
        """
        scores = self.op("MatMul", [self.heads(q), self.op("Transpose", [k], perm=[0, 1, 3, 2])])
        scores = self.op("Mul", [scores, self.constant(1 / np.sqrt(SIZE), np.float32)])
        weights = self.op("Softmax", [self.op("Add", [scores, bias])], axis=-1)
        mixed = self.op("Transpose", [self.op("MatMul", [weights, v])], perm=[0, 2, 1, 3])
        return self.op("Reshape", [mixed, self.constant([0, 0, WIDTH])]), weights


def _encode(g: Graph, prefix: str, extras: bool = False, stride: int = 1, half: bool = False) -> None:
    x, mask = g.op("Gather", ["source", "src"]), "src_mask"
    if extras:
        g.op("Identity", [x], [f"{prefix}hidden_states.source"])
    if stride > 1:
        slice_inputs = [g.constant(n) for n in ([0], [2**31], [1], [stride])]
        x, mask = (g.op("Slice", [value, *slice_inputs]) for value in (x, mask))
    for n in "kv":
        projected, dtype = g.heads(g.op("MatMul", [x, f"c{n}"])), T.BFLOAT16 if half else T.FLOAT
        g.op("Cast", [projected], [f"{prefix}context.{n}"], to=dtype)
    bias = g.op("Where", [mask, g.constant(0, np.float32), g.constant(-1e9, np.float32)])
    g.op("Unsqueeze", [bias, g.constant([1, 2])], [f"{prefix}context.bias"])


def _decode(g: Graph, toy: Toy, prefix: str) -> None:
    alignments = []
    x = g.op("Add", [g.op("Gather", ["target", "tgt"]), g.op("Gather", ["places", m.POSITIONS])])
    if toy.carries:
        # Row n of `sums` is the sum after n new tokens.
        sums = g.op("CumSum", [g.op("Concat", ["past.sum", x], axis=1), g.constant(1)])
        count = g.op("Unsqueeze", [m.NEW_COUNTS, g.constant([1, 2])])
        g.op("GatherND", [sums, count], [f"{prefix}present.sum"], batch_dims=1)
        latest = g.op("Slice", [sums, g.constant([1]), g.constant([2**31]), g.constant([1])])
        x = g.op("Add", [x, g.op("Mul", [latest, g.constant(CARRIED, np.float32)])])
    for i in range(toy.layers):
        q, k, v = (g.op("MatMul", [x, f"{n}{i}"]) for n in "qkv")
        presents = [f"{prefix}present.{n}{i}" for n in "kv"]
        if toy.attention == "gqa":
            attended = f"{g.prefix}attention{i}"
            float_presents = [f"{present}.wide" for present in presents] if toy.half else presents
            g.op(
                "GroupQueryAttention",
                [q, k, v, *(g.wide(f"past.{n}{i}", toy.half) for n in "kv"), m.LAST_POSITION, m.TOTAL_SLOTS],
                [attended, *float_presents],
                "com.microsoft",
                num_heads=HEADS,
                kv_num_heads=HEADS,
            )
            for wide, present in zip(float_presents, presents, strict=True) if toy.half else ():
                g.op("Cast", [wide], [present], to=T.BFLOAT16)
        else:
            if toy.half:
                k, v = (g.op("Cast", [new], to=T.BFLOAT16) for new in (k, v))
            keys, values = (
                g.op(
                    "Gather",
                    [g.op("TensorScatter", [f"past.{n}{i}", g.heads(new), m.START_SLOT], [p], axis=2), m.SLOT_INDICES],
                    axis=2,
                )
                for n, new, p in zip("kv", (k, v), presents, strict=True)
            )
            keys, values = (g.wide(x, toy.half) for x in (keys, values))
            visible = g.op("LessOrEqual", [m.SLOT_INDICES, g.op("Unsqueeze", [m.POSITIONS, g.constant([1, 3])])])
            bias = g.op("Where", [visible, g.constant(0, np.float32), g.constant(-1e9, np.float32)])
            attended, _ = g.attend(q, keys, values, bias)
        x = g.op("Add", [x, g.op("MatMul", [attended, f"o{i}"])])
        if toy.encoder:
            query = g.op("MatMul", [x, f"cq{i}"])
            size = g.op("Shape", [query])
            if toy.shares:  # one row of the context has the positions of several rows
                rows = g.op("Shape", ["past_context.k"], start=0, end=1)
                query = g.op("Reshape", [query, g.op("Concat", [rows, g.constant([-1, WIDTH])], axis=0)])
            keys, values = (g.wide(f"past_context.{n}", toy.half) for n in "kv")
            cross, weights = g.attend(query, keys, values, "past_context.bias")
            cross = g.op("Reshape", [cross, size])
            alignments.append(g.op("ReduceMean", [weights, g.constant([1])], keepdims=0))
            x = g.op("Add", [x, g.op("MatMul", [cross, f"co{i}"])])
    results = {"last": x} | ({"cross_attentions": g.op("Mean", alignments)} if alignments else {})
    if toy.select:
        select = g.op("Unsqueeze", [m.SELECTED_TOKENS, g.constant([2])])
        results = {name: g.op("GatherND", [value, select], batch_dims=1) for name, value in results.items()}
    x = results["last"]
    if toy.extras:
        g.op("Identity", [x], [f"{prefix}hidden_states.last"])
        if alignments:
            g.op("Identity", [results["cross_attentions"]], [f"{prefix}cross_attentions"])
    g.op("MatMul", [x, "out"], [f"{prefix}logits"])


def _branch_output(g: Graph, output: onnx.ValueInfoProto, is_computed: bool) -> onnx.ValueInfoProto:
    """Return an output of a branch of the `If`. An output of the other stage is an empty tensor."""
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(output)
    copy.name = g.prefix + output.name
    if not is_computed:
        sizes = [0] * len(output.type.tensor_type.shape.dim)
        empty = h.make_tensor("empty", output.type.tensor_type.elem_type, sizes, [])
        g.nodes.append(h.make_node("Constant", [], [copy.name], value=empty))
    del copy.type.tensor_type.shape.dim[:]
    copy.type.tensor_type.ClearField("shape")
    return copy


def build(toy: Toy) -> onnx.ModelProto:
    """Return the ONNX model of a toy."""
    manifest = toy.manifest()
    encode, decode = manifest.encode, manifest.decode
    assert decode is not None

    def info(name: str, dtype: str, shape: Any) -> onnx.ValueInfoProto:
        return h.make_tensor_value_info(name, ONNX_TYPE[dtype], shape)

    shapes = {
        m.POSITIONS: [m.BATCH_AXIS, m.NEW_AXIS],
        m.LAST_POSITION: [m.BATCH_AXIS],
        m.TOTAL_SLOTS: [],
        m.START_SLOT: [m.BATCH_AXIS],
        m.SLOT_INDICES: ["total"],
        m.NEW_COUNTS: [m.BATCH_AXIS],
    }
    inputs = [info(decode.step.name, "int64", decode.step.shape)]
    inputs += [
        info(
            c,
            "int32" if c in (m.LAST_POSITION, m.TOTAL_SLOTS) else "int64",
            shapes.get(c, [m.BATCH_AXIS, m.SELECTED_AXIS]),
        )
        for c in decode.controls
    ]
    inputs += [info(c.past, c.dtype, c.shape) for c in decode.caches]
    outputs = [info("logits", "float32", [m.BATCH_AXIS, m.SELECTED_AXIS, toy.vocabulary])]
    outputs += [info(c.present, c.dtype, c.shape) for c in decode.caches]
    outputs += [info(e.name, e.dtype, e.shape) for e in decode.extras]
    weights = toy.weights()
    body = Graph("n")
    if encode:
        inputs = [info(m.STAGE_INPUT, "bool", []), *(info(i.name, i.dtype, i.shape) for i in encode.inputs), *inputs]
        inputs += [info("past_" + o.name, o.dtype, o.shape) for o in encode.outputs]
        contexts = [info(o.name, o.dtype, o.shape) for o in (*encode.outputs, *encode.extras)]
        stages = []
        for prefix, stage_outputs in (("then.", outputs), ("else.", contexts)):
            g = Graph(prefix)
            _decode(g, toy, prefix) if stage_outputs is outputs else _encode(
                g, prefix, toy.extras, toy.stride, toy.half
            )
            branch_outputs = [_branch_output(g, o, any(o is x for x in stage_outputs)) for o in [*contexts, *outputs]]
            stages.append(h.make_graph(g.nodes, prefix, [], branch_outputs))
        outputs = [*contexts, *outputs]
        names = [o.name for o in outputs]
        body.nodes.append(h.make_node("If", [m.STAGE_INPUT], names, then_branch=stages[0], else_branch=stages[1]))
    else:
        _decode(body, toy, "")
        weights = {n: w for n, w in weights.items() if not n.startswith(("c", "source"))}
    graph = h.make_graph(
        body.nodes, "toy", inputs, outputs, [numpy_helper.from_array(w, n) for n, w in weights.items()]
    )
    opset = 21 if toy.attention == "gqa" else 24
    model = h.make_model(
        graph, opset_imports=[h.make_opsetid("", opset), h.make_opsetid("com.microsoft", 1)], ir_version=10
    )
    h.set_model_props(model, {m.MANIFEST_KEY: manifest.to_json()})
    return model


def write_encoder(path: Path) -> Path:
    """Write a file with an encoder only, a single-pass model, and return its path."""
    toy = Toy()
    encode, g = toy.manifest().encode, Graph("n")
    assert encode is not None
    _encode(g, "")
    ports = [
        [h.make_tensor_value_info(x.name, ONNX_TYPE[x.dtype], x.shape) for x in side]
        for side in (encode.inputs, encode.outputs)
    ]
    weights = [numpy_helper.from_array(toy.weights()[n], n) for n in ("source", "ck", "cv")]
    graph = h.make_graph(g.nodes, "encoder", *ports, weights)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
    of_encode = {name: index for name, index in toy.manifest().tokenizer_of.items() if name == "src"}
    manifest = replace(toy.manifest(), decode=None, task="embed", tokenizer_of=of_encode)
    h.set_model_props(model, {m.MANIFEST_KEY: manifest.to_json()})
    onnx.save(model, path)
    return path


def with_manifest(source: Path, copy: Path, **changes: Any) -> Path:
    """Write a copy of a file with changed fields of its manifest, and return the path of the copy."""
    model = onnx.load(source)
    text = next(p.value for p in model.metadata_props if p.key == m.MANIFEST_KEY)
    h.set_model_props(model, {m.MANIFEST_KEY: replace(m.Manifest.from_json(text), **changes).to_json()})
    onnx.save(model, copy)
    return copy


def assert_alike(result: Any, expected: Any) -> None:
    """Assert equal ids and texts, and equal scores up to rounding, which depends on the other rows of the batch."""
    results, expected_results = ((r, *r.alternatives) for r in (result, expected))
    for one, other in zip(results, expected_results, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        np.testing.assert_allclose([one.score, *one.token_logprobs], [other.score, *other.token_logprobs], atol=1e-4)
