"""Attention by native kernels: results of onnxruntime's operators but for last bits, and rows on their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.native_attention import SINK_OF_NOTHING, Attention, open_attention
from support.native_products import PATHS, requires_kernels

from tformer_runtime.backend import native_kernels
from tformer_runtime.backend.native_kernels import ATTENTION_PATHS, PRODUCTS_ALONE, LoadingProducts, load_kernels
from tformer_runtime.format.onnx_graph import parse_model
from tformer_runtime.rewriting.attention_rewrite import NATIVE_ATTENTION, NATIVE_CONTEXT_ATTENTION
from tformer_runtime.rewriting.product_rewrite import Rewritten, replace_products

pytestmark = requires_kernels

PATH = 0  # the place of any path
STEPS = 2.0**-24  # float32's relative rounding


def tolerance(case: Attention, feeds: dict[str, np.ndarray]) -> float:
    """Return how far two orders of summing may be apart, for values of a magnitude of at most 5.

    A score is a sum of D products, off by D roundings of their magnitudes; a weight is off by twice that, and by the
    roundings of e^x and of the sum of weights. A result is a sum of the positions' values with these weights.
    """
    positions = int(max(case.totals, default=1)) + case.new
    magnitude = float(
        np.abs(feeds["q"]).max() * max(np.abs(feeds.get("k", feeds["q"])).max(), 5) * case.size * case.scale
    )
    return float(2 * STEPS * 5 * (2 * case.size * magnitude + 2 * positions + 8))


def results(case: Attention, path: str | None, slots: int = 0, threads: int = 1) -> list[np.ndarray]:
    session = open_attention(case.model(), path, threads)
    outputs: list[np.ndarray] = session.run(None, case.feeds(slots))
    return outputs


def valid(case: Attention, outputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return the results of each row without those of its padding, and the written slots of its caches."""
    counts = case.lengths or [case.new] * case.batch
    parts = [outputs[0][b, :count] for b, count in enumerate(counts)]
    return parts + [cache[b, :, :total] for cache in outputs[1:] for b, total in enumerate(case.totals)]


@st.composite
def attentions(draw) -> Attention:
    kind = draw(st.sampled_from(["step", "prompt", "chunk", "itself", "context"]))
    groups, share = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5]))
    size = draw(st.sampled_from([16, 32, 48, 64]))
    case = Attention(
        heads=groups * share, groups=groups, size=size, seed=draw(st.integers(0, 100)),
        has_bias=draw(st.booleans()), has_sink=draw(st.booleans()), packed=draw(st.booleans()),
        interleaved=draw(st.booleans()), rotated=draw(st.sampled_from([0, size, 16])),
    )  # fmt: skip
    rows, new = draw(st.integers(1, 4)), draw(st.integers(2, 70))
    if kind == "step":
        past = draw(st.lists(st.integers(0, 100), min_size=rows, max_size=rows))
        return replace(case, past=tuple(past) if max(past) else (1,) * rows)
    if kind == "prompt":
        lengths = draw(st.lists(st.integers(1, new), min_size=rows - 1, max_size=rows - 1))
        return replace(case, past=(0,) * rows, new=new, lengths=(new, *lengths))
    if kind == "chunk":  # of one row: onnxruntime takes no more
        return replace(case, past=(draw(st.integers(1, 100)),), new=new)
    case = replace(case, past=None, rows=rows, new=new, rotated=0, causal=draw(st.booleans()))
    if kind == "itself":
        return case
    sizes = st.sampled_from([1, 5, 20, 32, 72])
    return replace(
        case, groups=case.heads, packed=False, has_sink=False, causal=False, size=draw(sizes),
        new=draw(st.integers(1, 40)), context=draw(st.integers(1, 150)), by_head=draw(st.booleans()),
    )  # fmt: skip


# -- results ----------------------------------------------------------------------------------------------------------


@given(attentions())
def test_results_are_near_those_of_onnxruntime_and_the_same_on_all_paths(case):
    expected = valid(case, results(case, None))
    by_path = [valid(case, results(case, path)) for path in PATHS]
    for actual, peer in zip(by_path[0], expected, strict=True):
        np.testing.assert_allclose(actual, peer, rtol=0, atol=tolerance(case, case.feeds()))
    for others in by_path[1:]:
        for actual, first in zip(others, by_path[0], strict=True):
            np.testing.assert_array_equal(actual.view(np.int32), first.view(np.int32))


def test_past_is_extended_in_place():
    case = Attention(heads=4, groups=2, new=3, past=(5,), rotated=16)
    feeds = case.feeds(slots=4)
    session, binding = open_attention(case.model(), PATHS[0]), None
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in feeds.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y", "cpu")
    for cache, past in (("cache_k", "past_k"), ("cache_v", "past_v")):
        binding.bind_ortvalue_output(cache, values[past])
    session.run_with_iobinding(binding)
    y, keys, _ = session.run(None, feeds)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), y)
    extended = values["past_k"].numpy()
    np.testing.assert_array_equal(extended[:, :, :8], keys[:, :, :8])
    np.testing.assert_array_equal(extended[:, :, 8:], feeds["past_k"][:, :, 8:])  # slots that nothing has written


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "case",
    [
        Attention(heads=6, groups=2, size=32, past=(3, 70, 0, 33, 64, 15), rotated=32),
        Attention(heads=2, groups=2, size=24, past=(9, 130), has_bias=True),
        Attention(heads=8, groups=1, size=16, past=(0, 0, 0), new=53, lengths=(53, 1, 20)),
    ],
    ids=["steps", "bias", "prompts"],
)
def test_row_has_the_same_bits_alone_and_on_any_number_of_threads(case, path):
    feeds = case.feeds(slots=3)
    together = {threads: open_attention(case.model(), path, threads).run(None, feeds) for threads in (1, 3)}
    for one, three in zip(*(valid(case, outputs) for outputs in together.values()), strict=True):
        np.testing.assert_array_equal(one, three)
    session, lengths = open_attention(case.model(), path), case.lengths or (1,) * case.batch
    for b, length in enumerate(lengths):
        total = int(case.totals[b])
        alone = {name: array[b : b + 1] for name, array in feeds.items() if name not in ("total", "cosines", "sines")}
        alone |= {name: feeds[name] for name in ("cosines", "sines") if name in feeds}
        for name in ("q", "k", "v"):
            alone[name] = alone[name][:, :length]
        if "bias" in feeds:
            alone["bias"] = feeds["bias"][b % len(feeds["bias"])][None, :, :, :total]
        alone["total"] = np.array(total, np.int32)
        (y, *_), single = valid(case, together[1])[b : b + 1], session.run(None, alone)[0][0]
        np.testing.assert_array_equal(y.view(np.int32), single.view(np.int32))


def test_positions_read_in_parts_have_the_bits_of_one_call():
    """Parts of any lengths, as a prompt in parts, single steps and drafts are read."""
    case = Attention(heads=4, groups=2, size=32, new=100, past=(0,), rotated=32, packed=True)
    feeds = case.feeds()
    session = open_attention(case.model(), PATHS[0])
    y, *_ = session.run(None, feeds)
    parts, caches = [], (feeds["past_k"], feeds["past_v"])
    for begin, end in ((0, 1), (1, 30), (30, 31), (31, 95), (95, 100)):
        part = {"q": feeds["q"][:, begin:end], "cosines": feeds["cosines"], "sines": feeds["sines"]}
        part |= {"past_k": caches[0], "past_v": caches[1]}
        part |= {"last": np.array([end - 1], np.int32), "total": np.array(end, np.int32)}
        out, *caches = session.run(None, part)
        parts.append(out)
    np.testing.assert_array_equal(np.concatenate(parts, 1).view(np.int32), y.view(np.int32))


def test_rows_of_a_batch_with_several_new_positions_after_cached_ones():
    """onnxruntime refuses this; each row is as in its own call there."""
    case = Attention(heads=2, groups=1, size=16, new=4, past=(7, 20, 40), rotated=16)
    y, keys, values = results(case, PATHS[0])
    for b, past in enumerate(case.past or ()):
        shared = {name: case.feeds()[name] for name in ("cosines", "sines")}
        feeds = {name: array[b : b + 1] for name, array in case.feeds().items() if array.ndim and name not in shared}
        feeds |= shared | {"total": np.array(past + 4, np.int32)}
        alone = open_attention(replace(case, past=(past,)).model(), None).run(None, feeds)
        for actual, peer in zip((y[b], keys[b, :, : past + 4], values[b, :, : past + 4]), alone, strict=True):
            peer = peer[0] if peer.ndim == 3 else peer[0, :, : past + 4]
            np.testing.assert_allclose(actual, peer, rtol=0, atol=tolerance(case, feeds))


@pytest.mark.parametrize("bound", ["cache_k", "cache_v"])
def test_one_of_both_caches_is_extended_in_place(bound):
    case = Attention(heads=2, groups=1, past=(5, 2))
    feeds = case.feeds(slots=4)
    expected = open_attention(case.model(), None).run(None, feeds)
    session = open_attention(case.model(), PATHS[0])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in feeds.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in ("y", "cache_k", "cache_v"):
        if name == bound:
            binding.bind_ortvalue_output(name, values[name.replace("cache", "past")])
        else:
            binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    outputs = [value.numpy() for value in binding.get_outputs()]
    for actual, peer in zip(valid(case, outputs), valid(case, expected), strict=True):
        np.testing.assert_allclose(actual, peer, rtol=0, atol=tolerance(case, feeds))
    other = outputs[2 if bound == "cache_k" else 1]
    for row, total in zip(other, case.totals, strict=True):
        assert not row[:, total:].any()  # nothing of an earlier call is left in a new cache


def test_last_positions_may_have_any_shape_and_a_context_no_keys():
    case = Attention(past=(5, 2))
    feeds = case.feeds()
    model = onnx.ModelProto.FromString(case.model())
    next(port for port in model.graph.input if port.name == "last").type.tensor_type.shape.dim.add()
    y = open_attention(model.SerializeToString(), PATHS[0]).run(None, feeds | {"last": feeds["last"][:, None]})[0]
    np.testing.assert_array_equal(y, results(case, PATHS[0])[0])
    nothing = Attention(context=3, past=None, new=2)
    feeds = {name: array[:, :0] if name in "kv" else array for name, array in nothing.feeds().items()}
    assert not open_attention(nothing.model(), PATHS[0]).run(None, feeds)[0].any()


def test_scores_of_minus_infinity_have_no_weight_and_nan_stays():
    case = Attention(heads=1, groups=1, new=3, past=None, rows=2, causal=False, has_bias=True)
    feeds = case.feeds()
    feeds["bias"] = np.zeros((2, 1, 3, 3), np.float32)
    feeds["bias"][0, 0, :, 2] = -np.inf
    feeds["bias"][1] = -np.inf  # attends to nothing
    feeds["v"][0, 2] = 1e30
    y = open_attention(case.model(), PATHS[0]).run(None, feeds)[0]
    assert np.abs(y[0]).max() < 10
    assert np.isnan(y[1]).all()
    feeds["q"][0, 1] = np.nan
    feeds["bias"][:] = 0
    y = open_attention(case.model(), PATHS[0]).run(None, feeds)[0]
    assert np.isnan(y[0, 1]).all()
    assert np.isfinite(y[0, [0, 2]]).all()


# -- what is replaced -------------------------------------------------------------------------------------------------


def rewrite(model: bytes) -> Rewritten:
    return replace_products(model, Path(), lambda product, files: None, attention_path=PATH)


@pytest.mark.parametrize(
    ("case", "count"),
    [
        (Attention(), 1),
        (Attention(context=4, past=None), 1),
        (Attention(extra={"softcap": 20.0}), 0),
        (Attention(extra={"local_window_size": 4}), 0),
        (Attention(extra={"smooth_softmax": 1}), 0),
        (Attention(extra={"k_quant_type": "NONE"}), 0),
        (Attention(scale=0.0), 0),  # stands for 1 / √D
        (Attention(context=4, past=None, extra={"unidirectional": 1}), 0),
    ],
)
def test_other_attentions_stay(case, count):
    model = case.model()
    rewritten = rewrite(model)
    assert rewritten.attentions == count
    if not count:
        assert rewritten.model == model
    else:
        (node,) = parse_model(rewritten.model).graph.nodes
        assert node.op_type == (NATIVE_CONTEXT_ATTENTION if case.context else NATIVE_ATTENTION)


def changed(case: Attention, change: Callable[[onnx.NodeProto], object]) -> bytes:
    model = onnx.ModelProto.FromString(case.model())
    change(model.graph.node[0])
    return model.SerializeToString()


def test_attribute_without_its_number_is_zero():
    """As onnxruntime reads it, and as writers of protobuf's third version write 0."""

    def without_number(node: onnx.NodeProto) -> None:
        next(attribute for attribute in node.attribute if attribute.name == "causal").ClearField("i")

    (node,) = parse_model(rewrite(changed(Attention(), without_number)).model).graph.nodes
    assert node.op_type == NATIVE_ATTENTION
    assert node.attributes()["causal"] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda node: node.output.pop(),
        lambda node: node.output.__setitem__(1, ""),
        lambda node: node.attribute.append(helper.make_attribute("do_rotary", 1)),  # without tables
        lambda node: node.attribute.append(helper.make_attribute("scale", 2.0)),  # twice
    ],
)
def test_nodes_that_the_kernels_cannot_run_stay(change):
    assert rewrite(changed(Attention(), change)).attentions == 0


def test_sink_that_a_caller_may_give_stays():
    model = onnx.ModelProto.FromString(Attention(has_sink=True).model())
    model.graph.initializer.append(numpy_helper.from_array(np.full(2, SINK_OF_NOTHING, np.float32), "sink"))
    (node,) = parse_model(rewrite(model.SerializeToString()).model).graph.nodes
    assert "sink" in node.inputs


def branched(sink: float, same: bool = True) -> bytes:
    """Return an attention in both branches of an `If`, of which one has a sink."""
    names = ["q", "k", "v", "past_k", "past_v", "last", "total"]
    attributes = {"num_heads": 2, "kv_num_heads": 2, "scale": 0.5}
    branches = {}
    for name, inputs in (("then_branch", names), ("else_branch", [*names, "", "", "", "", "sink"])):
        outputs = [f"{output}.{name}" for output in ("y", "cache_k", "cache_v")]
        scale = {} if same or name == "then_branch" else {"scale": 0.25}
        node = helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **attributes | scale)
        branches[name] = helper.make_graph([node], name, [], [helper.make_empty_tensor_value_info(o) for o in outputs])
    choice = helper.make_node("If", ["flag"], ["y", "cache_k", "cache_v"], **branches)
    feeds = Attention().feeds()
    graph = helper.make_graph(
        [choice],
        "graph",
        [
            *(
                helper.make_tensor_value_info(
                    name,
                    TensorProto.INT32 if name in ("last", "total") else TensorProto.FLOAT,
                    [None] * feeds[name].ndim,
                )
                for name in names
            ),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * r)
            for n, r in (("y", 3), ("cache_k", 4), ("cache_v", 4))
        ],
        [numpy_helper.from_array(np.full(2, sink, np.float32), "sink")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    content: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return content


@pytest.mark.parametrize(
    ("sink", "same", "merged"), [(SINK_OF_NOTHING, True, True), (-3.0, True, False), (SINK_OF_NOTHING, False, False)]
)
def test_branches_that_differ_in_an_empty_sink_alone_become_one(sink, same, merged):
    model = branched(sink, same)
    rewritten = rewrite(model)
    assert rewritten.attentions == 2
    operators = [node.op_type for node in parse_model(rewritten.model).graph.nodes]
    assert operators == ([NATIVE_ATTENTION] if merged else ["If"])
    feeds = Attention(past=(6,)).feeds()
    for flag in (True, False):
        given = feeds | {"flag": np.array(flag)}
        expected = open_attention(model, None).run(None, given)
        for actual, peer in zip(open_attention(model, PATHS[0]).run(None, given), expected, strict=True):
            np.testing.assert_allclose(actual, peer, rtol=0, atol=tolerance(Attention(), feeds))


def test_branches_with_weights_of_their_own_stay():
    """A weight of a branch shadows that of the graph."""
    model = onnx.ModelProto.FromString(branched(SINK_OF_NOTHING))
    for number, attribute in enumerate(model.graph.node[0].attribute):
        own = np.full((1, 1, 1, 7), number, np.float32)
        own[..., 0] = -number
        attribute.g.initializer.append(numpy_helper.from_array(own, "bias"))
        (node,) = attribute.g.node
        node.input.extend([""] * (12 - len(node.input)))
        node.input[10] = "bias"
    content = model.SerializeToString()
    rewritten = rewrite(content)
    assert rewritten.attentions == 2
    assert [node.op_type for node in parse_model(rewritten.model).graph.nodes] == ["If"]
    feeds = Attention(past=(6,)).feeds()
    for flag in (True, False):
        given = feeds | {"flag": np.array(flag)}
        expected, actual = (open_attention(content, path).run(None, given)[0] for path in (None, PATHS[0]))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance(Attention(), feeds))


def test_variable_chooses_attention():
    forced = load_kernels(onnxruntime, PATHS[0])
    products = load_kernels(onnxruntime, f"{PATHS[0]},{PRODUCTS_ALONE}")
    best, best_products = load_kernels(onnxruntime, ""), load_kernels(onnxruntime, PRODUCTS_ALONE)
    assert forced.attention_path is not None
    assert products.path == forced.path
    assert products.attention_path is None
    assert (best is None) == (best_products is None)
    if best is not None:
        assert (best.attention_path is not None) == (best.path in ATTENTION_PATHS)
        assert best_products.attention_path is None


def test_floats_of_another_precision_stay_with_onnxruntime():
    with LoadingProducts(native_kernels.load_kernels(onnxruntime, PATHS[0])) as loading:
        model = Attention().model()
        assert loading.rewrite(model, Path(), is_float32=False) == model
        assert loading.attentions == 0


# -- calls that do not fit --------------------------------------------------------------------------------------------

STEP = Attention(heads=4, groups=2, past=(5, 9), rotated=16, has_bias=True, has_sink=True)
CONTEXT = Attention(heads=2, context=5, past=None, has_bias=True)


def resized(feeds: dict[str, np.ndarray], name: str, axis: int, size: int) -> dict[str, np.ndarray]:
    array = feeds[name]
    shape = [*array.shape[:axis], size, *array.shape[axis + 1 :]]
    return feeds | {name: np.ones(shape, array.dtype)}


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (STEP, ("q", 2, 63), "queries"),
        (STEP, ("k", 1, 2), "keys and values"),
        (STEP, ("v", 2, 5), "keys and values"),
        (STEP, ("past_k", 3, 8), "keys and values"),
        (STEP, ("past_v", 2, 30), "keys and values"),
        (STEP, ("past_k", 0, 1), "keys and values"),
        (STEP, ("last", 0, 1), "last position"),
        (STEP, ("cosines", 1, 9), "same shape"),
        (STEP, ("sink", 0, 3), "sink"),
        (STEP, ("bias", 3, 3), "bias"),
        (STEP, ("bias", 1, 3), "bias"),
        (CONTEXT, ("k", 1, 6), "keys and values"),
        (CONTEXT, ("v", 2, 3), "keys and values"),
        (CONTEXT, ("bias", 2, 3), "bias"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(case, change, words):
    session = open_attention(case.model(), PATHS[0])
    feeds = case.feeds()
    session.run(None, feeds)
    with pytest.raises(Exception, match=f"tformer-kernels: .*{words}"):
        session.run(None, resized(feeds, *change))


@pytest.mark.parametrize(
    ("last", "total", "words"),
    [
        ([-1, 9], 10, "1 to"),
        ([5, 99], 10, "1 to"),
        ([5, 9], 0, "1 to"),
        ([5, 9], -7, "1 to"),
        ([5, 400], 401, "earlier positions"),
    ],
)
def test_positions_that_do_not_exist_are_refused(last, total, words):
    session = open_attention(replace(STEP, has_bias=False).model(), PATHS[0])
    feeds = replace(STEP, has_bias=False).feeds()
    feeds |= {"last": np.array(last, np.int32), "total": np.array(total, np.int32)}
    with pytest.raises(Exception, match=f"tformer-kernels: .*{words}"):
        session.run(None, feeds)


@pytest.mark.parametrize(
    ("case", "total", "words"),
    [
        (Attention(new=4, past=None, causal=False), 10_000_000, "earlier ones in a cache"),
        (Attention(new=4, past=None, causal=False), 41, "earlier ones in a cache"),
        (Attention(new=30, past=(0,), lengths=(30,)), 1, "among all positions"),
        (Attention(past=(3,)), 1_000_000, "earlier positions"),
    ],
)
def test_total_beyond_the_given_keys_is_refused(case, total, words):
    feeds = case.feeds() | {"total": np.array(total, np.int32), "last": np.array([min(total, 4) - 1], np.int32)}
    with pytest.raises(Exception, match=f"tformer-kernels: .*{words}"):
        open_attention(case.model(), PATHS[0]).run(None, feeds)


def test_positions_without_angles_are_refused():
    case = Attention(past=(20,), rotated=16)
    feeds = case.feeds()
    feeds |= {name: feeds[name][:20] for name in ("cosines", "sines")}
    with pytest.raises(Exception, match="tformer-kernels: there must be angles"):
        open_attention(case.model(), PATHS[0]).run(None, feeds)
