"""Greedy loops give the tokens and the bits of steps one by one, whatever the options, and no plan can do harm."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch
import transformers
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper
from support.native_products import PATHS, kernels_of, requires_kernels, session_of

from tformer_export import Quantization, export
from tformer_export.sources.hugging_face.folder import from_transformers
from tformer_runtime import InputError, Model
from tformer_runtime.backend.native_kernels import APART, VARIABLE
from tformer_runtime.decoding.request import make_request
from tformer_runtime.engine import greedy_steps, spare_buffers
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.greedy_steps import GreedyPlan
from tformer_runtime.engine.memory_budget import MemoryBudget
from tformer_runtime.format.manifest import (
    BATCH_AXIS,
    MANIFEST_KEY,
    POSITIONS,
    SELECTED_AXIS,
    ExtraOutput,
    Manifest,
)
from tformer_runtime.rewriting.operator_chain import CHAIN
from tformer_runtime.rewriting.product_rewrite import DOMAIN

pytestmark = requires_kernels

WORDS = ["hello", "transformer", "a", "kernel", "mississippi", "onomatopoeia", "of"]
NONE = np.zeros(0, np.int64)
WIDTH = 32
FORMS = ["none", "int8", "int4"]
OPTIONS = [
    {},
    {"max_new_tokens": 3},
    {"min_new_tokens": 9},
    {"min_new_tokens": 2, "suppress_tokens": [4, 9, 22]},
    {"begin_suppress_tokens": [4, 5, 6, 7, 8], "min_new_tokens": 4},
    {"forced_bos_token_id": 7},
    {"no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.5},
    {"stop_strings": ["AH0"]},
    {"top_logprobs": 2},
    {"temperature": 0.8, "seed": 3},
    {"num_beams": 3},
    {"prompt_lookup": True},
]


@pytest.fixture(params=FORMS)
def models(request, g2p_file, monkeypatch):
    """The same file with greedy loops, and without them."""
    file = g2p_file(Quantization(request.param), "throughput")
    loaded = []
    for kernels in (PATHS[0], f"{PATHS[0]},{APART}"):
        monkeypatch.setenv(VARIABLE, kernels)
        loaded.append(Model.load(file, device="cpu", threads=2))
    looping, plain = loaded
    assert looping.engine.session.max_greedy_steps > 8
    assert plain.engine.session.max_greedy_steps == 1
    return looping, plain


def summary(results):
    return [(r.token_ids, r.token_logprobs, r.score, r.finish_reason, r.top_logprobs) for r in results]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_have_the_results_of_steps_one_by_one(models, options):
    looping, plain = models
    for batch_size in (1, 3, 7):
        found, expected = (summary(m.generate_batch(WORDS, batch_size=batch_size, **options)) for m in models)
        assert found == expected
    assert summary([looping.generate("hello", **options)]) == summary([plain.generate("hello", **options)])


def test_loop_runs_the_steps_of_several_tokens_at_once(models, monkeypatch):
    looping, _ = models
    runs = []
    run = looping.engine.session.run
    monkeypatch.setattr(looping.engine.session, "run", lambda *arguments: (runs.append(arguments[1]), run(*arguments)))
    result = looping.generate("transformer")
    assert len(result.token_ids) > 8
    assert runs == ["encode", "decode"]


def test_loop_ends_with_the_steps_that_the_buffers_and_the_model_have_room_for(models):
    """A row that is never ended fills the model's greatest length, in several runs."""
    looping, _ = models
    options = {"suppress_tokens": list(looping.manifest.special_tokens.eos_token_ids), "max_new_tokens": 47}
    found, expected = (summary(m.generate_batch(WORDS, **options)) for m in models)
    assert found == expected
    assert {len(ids) for ids, *_ in found} == {47}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_logits_have_the_bits_of_steps_one_by_one(path, form, rows, g2p_file, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    engine = Engine(g2p_file(Quantization(form), "throughput"), device="cpu", threads=2)
    random = np.random.default_rng(rows)
    sources = {"src": [random.integers(3, 30, 3 + i) for i in range(rows)]}
    first = np.full((rows, 1), 1)
    forbidden = np.array([5, 9, 9, 10**9, -4])[:3]
    state = engine.start(sources, rows)
    engine.step(state, first)
    steps = engine.greedy_steps(state, first, lambda _: GreedyPlan(9, (), forbidden))
    logits, tokens = steps.logits, steps.tokens
    logits = logits.copy()
    assert tokens.shape == (9, rows)
    np.testing.assert_array_equal(state.lengths, 10)
    apart = engine.start(sources, rows)
    engine.step(apart, first)
    for step, fed in enumerate([first[:, 0], *tokens[:-1]]):
        expected = engine.step(apart, fed[:, None]).copy()
        np.testing.assert_array_equal(logits[step].view(np.int32), expected.view(np.int32))
        expected[:, forbidden] = -np.inf
        np.testing.assert_array_equal(tokens[step], expected.argmax(-1))
    # Both states go on alike: the caches are the same.
    after, after_apart = (engine.step(s, tokens[-1][:, None]).copy() for s in (state, apart))
    np.testing.assert_array_equal(after, after_apart)


def test_logits_of_steps_take_bounded_memory(models, monkeypatch):
    """No budget counts them."""
    engine = models[0].engine
    sources, vocabulary = {"src": [np.array([5, 6, 7])] * 4}, int(engine.decode.logits.shape[-1])
    state, limit = engine.start(sources, 4), engine.session.max_greedy_steps
    assert engine.max_greedy_steps(state) == limit
    monkeypatch.setattr("tformer_runtime.engine.engine.MAX_LOOP_LOGITS", 4 * 5 * vocabulary)
    assert engine.max_greedy_steps(state) == 5
    monkeypatch.setattr("tformer_runtime.engine.engine.MAX_LOOP_LOGITS", 1)
    assert engine.max_greedy_steps(state) == 1
    expected = models[1].generate_batch(WORDS, batch_size=3)
    assert summary(models[0].generate_batch(WORDS, batch_size=3)) == summary(expected)


def test_spare_buffers_have_no_large_logits(models, monkeypatch):
    engine = models[0].engine
    engine._spares._spares.clear()
    for has_room in (True, False):
        state = engine.start({"src": [np.array([5, 6, 7])]}, 1, max_tokens=[40])
        engine.greedy_steps(state, np.ones((1, 1), np.int64), lambda _: GreedyPlan(8, (), NONE))
        call = state.calls[1, "last"]
        assert call.loop_logits.nbytes > 8 * 4 * 30
        limit = state.nbytes + call.logits.nbytes + call.loop_logits.nbytes * has_room
        monkeypatch.setattr(spare_buffers, "MAX_SPARE_BYTES", limit)
        engine.release(state)
        (spare,) = engine._spares._spares
        assert spare.call is call
        assert (spare.call.loop_logits.nbytes > 0) == has_room
    monkeypatch.setattr(spare_buffers, "MAX_SPARE_BYTES", limit - 1)
    state = engine.start({"src": [np.array([5, 6, 7])]}, 1, max_tokens=[40])
    engine.greedy_steps(state, np.ones((1, 1), np.int64), lambda _: GreedyPlan(8, (), NONE))
    engine.release(state)
    assert engine._spares._spares == []


@pytest.mark.parametrize("block", [1, 40, 200, 1 << 20])
def test_last_step_is_that_of_steps_one_by_one(block, monkeypatch):
    monkeypatch.setattr(greedy_steps, "BLOCK_NUMBERS", block)
    random = np.random.default_rng(block)
    for _ in range(200):
        steps, rows, vocabulary = (int(random.integers(1, limit)) for limit in (9, 4, 9))
        logits = random.integers(-3, 4, (steps, rows, vocabulary)).astype(np.float32)
        special = random.choice([np.nan, np.inf, -np.inf], logits.shape)
        logits = np.where(random.random(logits.shape) < 0.02, special, logits).astype(np.float32)
        forbidden = np.flatnonzero(random.random(vocabulary) < 0.2)
        plan = GreedyPlan(steps, tuple(np.flatnonzero(random.random(vocabulary) < 0.1).tolist()), forbidden)
        tokens = []
        for step in logits:
            allowed = np.where(np.isin(np.arange(vocabulary), forbidden), -np.inf, step)
            is_finite = ~(np.isnan(step).any(-1) | (step.max(-1) == np.inf))
            chosen = np.where(is_finite, allowed.argmax(-1), step.argmax(-1))
            tokens.append(chosen)
            if not is_finite.all() or (allowed.max(-1) == -np.inf).any() or set(chosen.tolist()) & {*plan.ends}:
                break
        found = greedy_steps.chosen_tokens(logits, plan)
        count = len(found)
        assert count == len(tokens)
        finite = np.isfinite(logits[:count].max(-1))  # the others are not choices
        np.testing.assert_array_equal(found[finite], np.array(tokens)[finite])


def test_loop_stops_after_the_first_end_of_a_row(models):
    engine = models[0].engine
    sources, first = {"src": [np.array([5, 6, 7]), np.array([9, 8])]}, np.ones((2, 1), np.int64)
    tokens = engine.greedy_steps(engine.start(sources, 2), first, lambda _: GreedyPlan(8, (), NONE)).tokens
    for step in range(1, 8):
        for ends in [(int(tokens[step, 1]),), (int(tokens[step, 0]), 10**6, -1)]:
            state = engine.start(sources, 2)
            found = engine.greedy_steps(state, first, lambda _, ends=ends: GreedyPlan(8, ends, NONE)).tokens
            count = 1 + next(i for i, row in enumerate(tokens.tolist()) if set(row) & set(ends))
            np.testing.assert_array_equal(found, tokens[:count])
            np.testing.assert_array_equal(state.lengths, count)


@pytest.mark.parametrize("plans", [[(2,), (6, -1), (6, -1)], [(2,), (6,), (2,)]], ids=["plan", "logits"])
def test_loop_after_one_that_could_not_be_bound_has_the_tokens_of_steps_one_by_one(plans, models, monkeypatch):
    """Memory runs out while the second loop is bound: for its longer plan, or for its logits."""
    looping, plain = (model.engine for model in models)
    source, token, tokens = {"src": [np.array([5, 6, 7])]}, np.ones((1, 1), np.int64), [1]
    state, apart = (engine.start(source, 1, max_tokens=[20]) for engine in (looping, plain))
    first, second, third = (GreedyPlan(count, ends, NONE) for count, *ends in plans)

    def run(plan):
        steps = looping.greedy_steps(state, np.array([tokens[-1:]]), lambda _: plan)
        tokens.extend(steps.tokens[:, 0].tolist())

    def without_memory(array):
        raise MemoryError

    run(first)
    with monkeypatch.context() as patch:
        patch.setattr(looping.session, "host_tensor", without_memory)
        with pytest.raises(MemoryError):
            run(second)
    run(third)
    assert len(tokens) == 1 + first.max_steps + third.max_steps
    for expected in tokens[1:]:
        token = plain.step(apart, token).argmax(-1)[:, None]
        assert token.item() == expected


def test_stream_has_every_token_and_an_error_of_its_reader_ends_it_alone(models):
    looping, plain = models
    assert "".join(looping.stream("transformer")) == plain.generate("transformer").text
    generator, settings = looping.generator, looping.settings(None, {})
    scheduler = generator.new_scheduler(settings, 8)
    tasks = []
    for i, word in enumerate(WORDS):
        task = generator.make_task(make_request(looping.manifest, looping.inputs, word, i, settings), settings)
        tasks.append(task)
    seen = []

    def fail(token):
        seen.append(token.id)
        if len(seen) == 3:
            raise KeyError("the reader's own")

    tasks[1].on_token = fail
    for task in tasks:
        scheduler.submit(task)
    while not scheduler.idle:
        scheduler.step()
    assert isinstance(tasks[1].error, KeyError)
    assert len(seen) == 3
    for i, word in enumerate(WORDS):
        if i != 1:
            assert generator.make_result(tasks[i]).token_ids == plain.generate(word).token_ids


def scheduled(model, words):
    """Return a scheduler, and a task for each word."""
    settings = model.settings(None, {})
    tasks = [
        model.generator.make_task(make_request(model.manifest, model.inputs, word, i, settings), settings)
        for i, word in enumerate(words)
    ]
    return model.generator.new_scheduler(settings, 8), tasks


def test_cancelled_task_gets_no_more_tokens(models):
    """Its own callback cancels the first task, and the callback of the second one cancels the third."""
    words = ["mississippi", "onomatopoeia", "transformer", "kernel"]
    scheduler, tasks = scheduled(models[0], words)
    seen = [[], [], [], []]

    def listen(i, cancelled):
        def on_token(token):
            seen[i].append(token.id)
            if len(seen[i]) == 2 and cancelled is not None:
                scheduler.cancel(tasks[cancelled], KeyError("cancelled"))

        return on_token

    for i, cancelled in enumerate((0, 2, None, None)):
        tasks[i].on_token = listen(i, cancelled)
        scheduler.submit(tasks[i])
    while not scheduler.idle:
        scheduler.step()
    assert [isinstance(task.error, KeyError) for task in tasks] == [True, False, True, False]
    assert (len(seen[0]), len(seen[2])) == (2, 1)
    for i in (1, 3):
        assert seen[i] == [*models[1].generate(words[i]).token_ids]


def test_task_that_fails_leaves_the_memory_that_the_others_have_reserved(models):
    """Three tasks are started one by one, since the source of the second is too large an id."""
    model = models[0]
    scheduler, tasks = scheduled(model, WORDS[:3])
    memory = scheduler.memory = scheduler.starter._budget = MemoryBudget(1 << 24).new_share()
    tasks[1].sources = {"src": np.array([10**6])}

    def fail(token):
        raise KeyError("the reader's own")

    tasks[0].on_token = fail
    reserved = []
    start = model.engine.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model.engine,
            "start",
            lambda *given, **named: (reserved.append(memory.reserved_bytes), start(*given, **named))[1],
        )
        for task in tasks:
            scheduler.submit(task)
        while not scheduler.idle:
            scheduler.step()
    assert isinstance(tasks[0].error, KeyError)
    assert isinstance(tasks[1].error, InputError)
    assert tasks[2].error is None
    assert len(reserved) == 4
    assert min(reserved) == max(reserved) > 0
    assert memory.reserved_bytes == memory.used_bytes == 0


def test_id_outside_the_vocabulary_is_an_error_of_its_request(models):
    looping, _ = models
    engine = looping.engine
    state = engine.start({"src": [np.array([5, 6])]}, 1)
    with pytest.raises(InputError, match="is beyond one of the model's tables"):
        engine.step(state, np.array([[10**6]]))
    engine.step(state, np.array([[1]]))


FAMILIES = {
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=300, max_position_embeddings=64, d_model=64, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
            eos_token_id=7, bos_token_id=1, pad_token_id=0, decoder_start_token_id=2, forced_eos_token_id=None,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, eos_token_id=7, bos_token_id=1, pad_token_id=0,
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, eos_token_id=7,
            bos_token_id=1, pad_token_id=0,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("bart", "int8"),
        ("llama", "none"),
        ("gpt2", "int8"),
        *(
            pytest.param(family, bits, marks=pytest.mark.thorough)
            for family, bits in (("bart", "none"), ("llama", "int8"), ("gpt2", "none"))
        ),
    ],
)
def test_models_of_transformers_loop_with_the_tokens_of_generate(family, quantization, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    for name, parameter in model.named_parameters():  # transformers begins with biases of zero
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    file = tmp_path / "model.onnx"
    export(from_transformers(model), file, quantization=Quantization(quantization))
    monkeypatch.setenv(VARIABLE, PATHS[0])
    loaded = Model.load(file, device="cpu", threads=1)
    assert loaded.engine.session.max_greedy_steps > 1
    monkeypatch.setenv(VARIABLE, "0")
    plain = Model.load(file, device="cpu", threads=1)
    prompts = [[5, 6, 9, 12], [40, 41], [299], [17, 3, 99, 100, 101, 102]]
    for prompt in prompts:
        found = loaded.generate(prompt, max_new_tokens=24).token_ids
        if quantization == "none":
            ids = torch.tensor([prompt])
            out = model.generate(ids, max_new_tokens=24, do_sample=False)[0].tolist()
            assert list(found) == out[1 if model.config.is_encoder_decoder else len(prompt) :]
        else:
            assert found == plain.generate(prompt, max_new_tokens=24).token_ids


class FlatProduct(torch.nn.Module):
    """A projection by `torch.addmm` of flattened rows."""

    def __init__(self, inner, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inner, columns) / inner**0.5)
        self.bias = torch.nn.Parameter(torch.randn(columns) / 10)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class HandwrittenLayer(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.qkv, self.out = FlatProduct(WIDTH, 3 * WIDTH), FlatProduct(WIDTH, WIDTH)
        self.up, self.down = FlatProduct(WIDTH, 4 * WIDTH), FlatProduct(4 * WIDTH, WIDTH)
        self.norm, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.parts = parts

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.parts(self.qkv(self.norm(x))))
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value
        x = x + self.out(y.transpose(1, 2).contiguous().view(x.shape))
        y = self.up(self.norm2(x))
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y * y * y)))
        return x + self.down(y)


class HandwrittenDecoder(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(60, WIDTH), torch.nn.Embedding(48, WIDTH)
        self.layers = torch.nn.ModuleList([HandwrittenLayer(parts) for _ in range(2)])
        self.head = FlatProduct(WIDTH, 60)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PARTS = {
    "split": lambda x: x.split(WIDTH, -1),
    "chunks": lambda x: x.chunk(3, -1),
    "slices": lambda x: (x[..., :WIDTH], x[..., WIDTH : 2 * WIDTH], x[..., 2 * WIDTH :]),
}


@pytest.mark.parametrize("parts", PARTS)
def test_handwritten_decoder_of_flat_products_loops_with_the_tokens_of_torch(parts, tmp_path, monkeypatch):
    torch.manual_seed(1)
    model, file = HandwrittenDecoder(PARTS[parts]).eval(), tmp_path / "model.onnx"
    special = {"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0}
    example = {"ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    report = export(model, file, example, "ids", special_tokens=special, max_length=48)
    counts = {name: report.counts[name] for name in ("gelu", "unflatten_products", "pack_attention_inputs")}
    assert counts == {"gelu": 2, "unflatten_products": 9, "pack_attention_inputs": 2}
    monkeypatch.setenv(VARIABLE, PATHS[0])
    loaded = Model.load(file, device="cpu", threads=1)
    assert loaded.engine.session.max_greedy_steps > 1
    for prompt in ([1], [1, 6, 9, 12], [1, 41]):
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + 24 and (len(ids) == len(prompt) or ids[-1] != 2):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        found = [*loaded.generate(prompt, max_new_tokens=24).token_ids]
        assert found == ids[len(prompt) :]


def test_file_whose_other_results_read_the_logits_has_no_loop(tmp_path, monkeypatch):
    """They would get the logits of several steps."""
    torch.manual_seed(0)
    file = tmp_path / "model.onnx"
    export(from_transformers(FAMILIES["llama"]().eval()), file)
    model = onnx.load(file)
    manifest = Manifest.from_json(next(p.value for p in model.metadata_props if p.key == MANIFEST_KEY))
    vocabulary = int(manifest.decode.logits.shape[-1])
    shape = (BATCH_AXIS, SELECTED_AXIS, vocabulary)
    extra = ExtraOutput("hidden_states.scaled", "float32", shape)
    nodes = [
        helper.make_node("Constant", [], ["axis"], value=numpy_helper.from_array(np.array([2]))),
        helper.make_node("Cast", [POSITIONS], ["positions"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["positions", "axis"], ["column"]),
        helper.make_node("Mul", ["logits", "column"], [extra.name]),
    ]
    model.graph.node.extend(nodes)
    model.graph.output.append(helper.make_tensor_value_info(extra.name, TensorProto.FLOAT, shape))
    del model.metadata_props[:]
    decode = replace(manifest.decode, extras=(extra,))
    helper.set_model_props(model, {MANIFEST_KEY: replace(manifest, decode=decode).to_json()})
    other = tmp_path / "other.onnx"
    onnx.save(model, other)
    monkeypatch.setenv(VARIABLE, PATHS[0])
    found, expected = (Model.load(path, device="cpu", threads=1) for path in (other, file))
    assert expected.engine.session.max_greedy_steps > 1
    assert found.engine.session.max_greedy_steps == 1
    prompts = [[5, 6, 9, 12], [40, 41]]
    results = [[r.token_ids for r in m.generate_batch(prompts, max_new_tokens=12)] for m in (found, expected)]
    assert results[0] == results[1]


def loop_session(loop: str, plan: np.ndarray | None = None, counts: str = "int64"):
    """Return a session of a chain: a table's rows of the tokens times a norm's weight are the logits."""
    random = np.random.default_rng(0)
    table = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    norm = {"0.path": 0, "1.path": kernels_of("scalar").attention_path, "1.epsilon": 1e-5, "1.root_mean_square": 1}
    node = helper.make_node(
        CHAIN, ["tokens", "table", "g", "plan"], ["y"], domain=DOMAIN, input_count=4, output_count=1, parts=1,
        program="Lookup 1 0 - > 5\nNorm 5 - 2 - > 4", loop=loop, **norm,
    )  # fmt: skip
    weights = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.ones(WIDTH, np.float32), "g")]
    return table, session_of([node], [("tokens", TensorProto.INT64), ("plan", TensorProto.INT64)], weights)


LOOP = "tokens 0\nlogits 4\nplan 3"


def test_plan_is_followed_by_a_chain_alone():
    table, session = loop_session(LOOP)
    tokens = np.array([[3], [9]])
    logits = session.run(None, {"tokens": tokens, "plan": np.array([6, 0, 12])})[0].reshape(6, 2, WIDTH)
    for step, following in pairwise(range(6)):
        expected = logits[step].copy()
        expected[:, 12] = -np.inf
        x = table[expected.argmax(-1)]
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(logits[following], y, rtol=1e-5, atol=1e-6)
    assert session.run(None, {"tokens": tokens, "plan": NONE})[0].shape == (2, 1, WIDTH)


@pytest.mark.parametrize(
    "plan",
    [[1], [0, 0], [-1, 0], [1 << 40, 0], [2, 1], [2, 5, 1, 1], [2, -1], [2, 1 << 62], [-(1 << 63), 0]],
    ids=str,
)
def test_damaged_plan_is_an_error(plan):
    _, session = loop_session(LOOP)
    with pytest.raises(Exception, match="the plan of a loop"):
        session.run(None, {"tokens": np.array([[3]]), "plan": np.array(plan)})
    assert session.run(None, {"tokens": np.array([[3]]), "plan": np.array([1, 0])})[0].shape == (1, 1, WIDTH)


@pytest.mark.parametrize("tokens", [np.zeros((1, 2), np.int64), np.zeros(1, np.int64), np.zeros((0, 1), np.int64)])
def test_loop_of_more_than_a_token_for_each_row_is_an_error(tokens):
    _, session = loop_session(LOOP)
    with pytest.raises(Exception, match="one token of each sequence"):
        session.run(None, {"tokens": tokens, "plan": np.array([2, 0])})


@pytest.mark.parametrize(
    "loop",
    [
        "tokens 0",  # neither logits nor plan
        "tokens 0\nlogits 4",
        "tokens 4\nlogits 4\nplan 3",  # a result as an input
        "tokens 0\nlogits 0\nplan 3",
        "tokens 0\nlogits 5\nplan 3",  # a value between operators
        "tokens 9\nlogits 4\nplan 3",
        "tokens -1\nlogits 4\nplan 3",
        "tokens\nlogits 4\nplan 3",
        "words 0\nlogits 4\nplan 3",
        f"{LOOP}\ncounts 4",
        f"{LOOP}\ncache 0",
        f"{LOOP}\ncache 4 0",
        f"{LOOP} 7",
    ],
)
def test_damaged_loop_is_an_error(loop):
    with pytest.raises(Exception, match="a damaged loop"):
        loop_session(loop)


def test_loop_with_caches_that_are_not_written_in_place_is_an_error():
    _, session = loop_session(f"{LOOP}\ncache 1 4")
    with pytest.raises(Exception, match="must be written in place"):
        session.run(None, {"tokens": np.array([[3]]), "plan": np.array([2, 0])})


@pytest.mark.parametrize(("tokens", "ids"), [(1000, 1), (1, 2), (3, 2)])
def test_loop_with_logits_of_another_number_of_sequences_is_an_error(tokens, ids):
    """The tokens of each sequence are chosen from its logits, and there are none beyond them."""
    table = np.ones((WIDTH, WIDTH), np.float32)
    node = helper.make_node(
        CHAIN, ["tokens", "ids", "table", "plan"], ["y"], domain=DOMAIN, input_count=4, output_count=1, parts=1,
        program="Lookup 2 1 - > 4", loop="tokens 0\nlogits 4\nplan 3", **{"0.path": 0},
    )  # fmt: skip
    inputs = [(name, TensorProto.INT64) for name in ("tokens", "ids", "plan")]
    session = session_of([node], inputs, [numpy_helper.from_array(table, "table")])
    feeds = {"tokens": np.zeros((tokens, 1), np.int64), "ids": np.zeros((ids, 1), np.int64)}
    with pytest.raises(Exception, match="logits of each sequence"):
        session.run(None, feeds | {"plan": np.array([2, 0, 5])})
    assert session.run(None, feeds | {"plan": NONE})[0].shape == (ids, 1, WIDTH)


def test_counts_of_floats_are_an_error():
    _, session = loop_session(f"{LOOP}\ncounts 2")
    with pytest.raises(Exception, match="counts of a loop must be integers"):
        session.run(None, {"tokens": np.array([[3]]), "plan": np.array([2, 0])})


def test_logits_without_numbers_end_no_loop_and_come_first():
    """A NaN is likelier than any number, as for numpy's argmax."""
    table = np.zeros((WIDTH, WIDTH), np.float32)
    table[3, 9:11] = np.nan
    norm = {"0.path": 0}
    node = helper.make_node(
        CHAIN, ["tokens", "table", "plan"], ["y"], domain=DOMAIN, input_count=3, output_count=1, parts=1,
        program="Lookup 1 0 - > 3", loop="tokens 0\nlogits 3\nplan 2", **norm,
    )  # fmt: skip
    inputs = [("tokens", TensorProto.INT64), ("plan", TensorProto.INT64)]
    session = session_of([node], inputs, [numpy_helper.from_array(table, "table")])
    first, second = session.run(None, {"tokens": np.array([[3]]), "plan": np.array([2, 0])})[0]
    assert int(first[0].argmax()) == 9
    np.testing.assert_array_equal(second[0], np.zeros(WIDTH))  # of row 9


FIRST = """
import sys
from pathlib import Path
from tformer_runtime.backend import native_kernels
assert native_kernels.find_native_ranking() is not None and "onnxruntime" not in sys.modules
from tformer_runtime import Model
model = Model.load(sys.argv[1], device="cpu", threads=1)
print(model.engine.session.max_greedy_steps > 1, model.generate("hello").text)
"""


def test_library_may_be_loaded_before_onnxruntime(g2p_file, monkeypatch):
    monkeypatch.setenv(VARIABLE, PATHS[0])
    file = g2p_file(Quantization("none"), "throughput")
    done = subprocess.run([sys.executable, "-c", FIRST, file], capture_output=True, text=True, check=True)
    expected = Model.load(file, device="cpu", threads=1).generate("hello").text
    assert done.stdout.split(maxsplit=1) == ["True", f"{expected}\n"]
