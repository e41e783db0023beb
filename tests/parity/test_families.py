"""Exported files of all families give the logits and greedy tokens of their PyTorch source for each row."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.families import END, FAMILIES, PAD, VOCABULARY

from tformer_runtime.decoding.request import make_request

PROMPTS = (4, 9, 1, 6)
SOURCES = (7, 2, 12, 5)
NUM_STEPS = 5
MAX_NEW_TOKENS = 16
# A logit is a sum of at most about 100 products after four sublayers, each with as many. float32 rounds each partial
# sum by 2⁻²⁴ of its value, in an order that depends on the kernel. The bound is 4 · 100 · 2⁻²⁴ ≈ 2.4e-5 of the logits'
# range. A wrong position or mask changes logits by at least 1e-2 of the range.
TOLERANCE = 2.5e-5

# Families with the graph structure of another family.
REDUNDANT_FAMILIES = ("seq2seq-learned-gelu-untied", "seq2seq-pre-untied", "llama-eager")


def for_families(selected):
    """Return a mark that runs a test for the chosen families."""
    return pytest.mark.parametrize(
        "name",
        [pytest.param(f.name, marks=[pytest.mark.thorough] if f.name in REDUNDANT_FAMILIES else []) for f in selected],
    )


families = for_families(FAMILIES)
portable = pytest.mark.parametrize(
    "name", ["seq2seq-learned-pre-gelu", "llama-sdpa", pytest.param("t5-eager", marks=pytest.mark.thorough)]
)


def draw_rows(seed: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Return rows of ids without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(END + 1, VOCABULARY - 6, length) for length in lengths]


def start_batch(exported, sources):
    """Return the engine's state for a batch of sources."""
    requests = {exported.family.request: sources} if exported.family.request else None
    return exported.engine.start(requests, len(sources))


def step_logits(exported):
    """Return each row's source, ids and logits (time, vocabulary).

    The first step has prompts of different lengths. Each further step has one token per row.
    """
    sources, rows = draw_rows(1, SOURCES), draw_rows(2, tuple(n + NUM_STEPS for n in PROMPTS))
    num_tokens = np.array(PROMPTS)
    tokens = np.full((len(rows), num_tokens.max()), PAD)
    for i, row in enumerate(rows):
        tokens[i, : num_tokens[i]] = row[: num_tokens[i]]
    state = start_batch(exported, sources)
    logits = exported.engine.step(state, tokens, num_tokens, logit_positions="all").copy()
    actual = [[*logits[i, : num_tokens[i]]] for i in range(len(rows))]
    for step in range(NUM_STEPS):
        logits = exported.engine.step(state, np.array([[row[n + step]] for row, n in zip(rows, PROMPTS, strict=True)]))
        for i in range(len(rows)):
            actual[i].append(logits[i].copy())
    return [(source, row, np.stack(row_logits)) for source, row, row_logits in zip(sources, rows, actual, strict=True)]


def check_logits(exported):
    """Compare all logits of a batch with the source's logits for each single row."""
    for source, row, actual in step_logits(exported):
        expected = exported.family.logits(source, row)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


def check_greedy(exported):
    """Compare tokens and finish reasons of a ragged batch with the source's for each single row.

    All rows decode at once, then two at a time, so that rows join a running batch.
    """
    rows = draw_rows(0, (5, 9, 2, 7, 1, 14, 3))
    # Rows leave at different steps even without end tokens.
    max_new_tokens = [MAX_NEW_TOKENS, 3, 9, MAX_NEW_TOKENS, 6, 2, 11]
    expected = [exported.family.greedy(row, MAX_NEW_TOKENS) for row in rows]
    results = list(exported.model.generate_batch(rows, max_new_tokens=MAX_NEW_TOKENS))
    assert [list(r.token_ids) for r in results] == expected
    assert [r.finish_reason for r in results] == ["end" if e[-1] == END else "length" for e in expected]
    assert decode_two_at_a_time(exported.model, rows, max_new_tokens) == [
        ids[:n] for ids, n in zip(expected, max_new_tokens, strict=True)
    ]
    # The expected rows differ from each other and do not repeat one token.
    assert len({tuple(e) for e in expected}) >= len(rows) - 1
    assert len({token for row in expected for token in row}) >= 10


def decode_two_at_a_time(model, rows, max_new_tokens):
    """Return the tokens of rows that decode two at a time, with a maximum length for each row."""
    generator, tasks = model.generator, []
    scheduler = generator.new_scheduler(None, 2)
    for row, length in zip(rows, max_new_tokens, strict=True):
        settings = model.settings(None, {"max_new_tokens": length})
        tasks.append(generator.make_task(make_request(model.manifest, model.inputs, row, 0, settings), settings))
        scheduler.submit(tasks[-1])
    while not scheduler.idle:
        scheduler.step()
    return [list(generator.make_result(task).token_ids) for task in tasks]


@families
def test_logits_match_the_source(exported, name):
    check_logits(exported(name))


@families
def test_greedy_tokens_match_the_source(exported, name):
    check_greedy(exported(name))


@for_families([family for family in FAMILIES if family.decoder_only])
def test_cached_prefix_and_chat_match_the_source_on_the_whole_text(exported, name):
    """Requests after a cached prefix, and turns of a chat, match the source on the whole text."""
    file = exported(name)
    prefix_ids, *rows = draw_rows(3, (8, 5, 1, 11, 2))
    prefix = file.model.cache_prefix(prefix_ids)
    results = file.model.generate_batch(rows, batch_size=2, prefix=prefix, max_new_tokens=9)
    for row, result in zip(rows, results, strict=True):
        assert list(result.token_ids) == file.family.greedy(np.concatenate([prefix_ids, row]), 9)
    chat, conversation = file.model.chat(), np.zeros(0, np.int64)
    for row in rows:
        conversation = np.concatenate([conversation, row])
        result = chat.send(row, max_new_tokens=6)
        assert list(result.token_ids) == file.family.greedy(conversation, 6)
        conversation = np.concatenate([conversation, result.token_ids])
    chat.rewind(2)
    conversation = np.concatenate([chat.turns[-1].ids, rows[2]])
    assert list(chat.send(rows[2], max_new_tokens=6).token_ids) == file.family.greedy(conversation, 6)


@pytest.mark.parametrize("name", ["hand-written", "gpt2-sdpa", "llama-sdpa", "t5-eager"])
def test_file_has_no_chained_reshapes_of_heads(exported, name):
    """Attention kernels take merged heads, so that the file needs no reshapes of the model's split heads.

    Such reshapes make a step of one row a fifth slower.
    """
    model = onnx.load(exported(name).path, load_external_data=False)
    branches = [a.g for node in model.graph.node if node.op_type == "If" for a in node.attribute] or [model.graph]
    for nodes in (branch.node for branch in branches):
        reshaped = {node.output[0] for node in nodes if node.op_type == "Reshape"}
        assert not [node.name for node in nodes if node.op_type == "Reshape" and node.input[0] in reshaped]
        assert sum(node.op_type == "Shape" for node in nodes) <= 4  # for the whole graph, not for each layer


@portable
def test_portable_logits_match_the_source(exported, name):
    check_logits(exported(name, "portable"))


@portable
def test_portable_greedy_tokens_match_the_source(exported, name):
    check_greedy(exported(name, "portable"))
