"""Every family, through one runner: the file computes what its source computes, row by row and token by token."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.families import END, FAMILIES, PAD, VOCABULARY

from tformer_runtime.decoding.request import make_request

PROMPTS = (4, 9, 1, 6)
SOURCES = (7, 2, 12, 5)
STEPS = 5
NEW_TOKENS = 16
# A logit is a sum of at most about 100 products after four sublayers, each of about as many; float32 rounds each
# partial sum by 2⁻²⁴ of it, in an order that differs from kernel to kernel: 4 · 100 · 2⁻²⁴ ≈ 2.4e-5 of the logits'
# range if all errors add up. A wrong position or mask moves logits by 1e-2 of the range and more.
TOLERANCE = 2.5e-5

# To others, in all that an exporter has to find.
ALIKE = ("seq2seq-learned-gelu-untied", "seq2seq-pre-untied", "llama-eager")


def some(chosen):
    return pytest.mark.parametrize(
        "name", [pytest.param(f.name, marks=[pytest.mark.thorough] if f.name in ALIKE else []) for f in chosen]
    )


families = some(FAMILIES)
portable = pytest.mark.parametrize(
    "name", ["seq2seq-learned-pre-gelu", "llama-sdpa", pytest.param("t5-eager", marks=pytest.mark.thorough)]
)


def draw(seed: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Rows of ids, none of them special."""
    random = np.random.default_rng(seed)
    return [random.integers(END + 1, VOCABULARY - 6, length) for length in lengths]


def start(exported, sources):
    requests = {exported.family.request: sources} if exported.family.request else None
    return exported.engine.start(requests, len(sources))


def stepped(exported):
    """Each row's source, ids and logits, (time, vocabulary): of a ragged prompt at once, then of single tokens."""
    sources, rows = draw(1, SOURCES), draw(2, tuple(n + STEPS for n in PROMPTS))
    counts = np.array(PROMPTS)
    tokens = np.full((len(rows), counts.max()), PAD)
    for i, row in enumerate(rows):
        tokens[i, : counts[i]] = row[: counts[i]]
    state = start(exported, sources)
    logits = exported.engine.step(state, tokens, counts, logit_positions="all").copy()
    found = [[*logits[i, : counts[i]]] for i in range(len(rows))]
    for step in range(STEPS):
        logits = exported.engine.step(state, np.array([[row[n + step]] for row, n in zip(rows, PROMPTS, strict=True)]))
        for i in range(len(rows)):
            found[i].append(logits[i].copy())
    return [(source, row, np.stack(own)) for source, row, own in zip(sources, rows, found, strict=True)]


def check_logits(exported):
    """Every logit of every row against the row alone in the source."""
    for source, row, found in stepped(exported):
        expected = exported.family.logits(source, row)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


def check_greedy(exported):
    """A ragged batch against each row alone in the source, all at once and two at a time, which others then join: the
    same tokens, the same ends."""
    rows = draw(0, (5, 9, 2, 7, 1, 14, 3))
    most = [NEW_TOKENS, 3, 9, NEW_TOKENS, 6, 2, 11]  # so that rows leave at different steps, if none ends by itself
    expected = [exported.family.greedy(row, NEW_TOKENS) for row in rows]
    results = list(exported.model.generate_batch(rows, max_new_tokens=NEW_TOKENS))
    assert [list(r.token_ids) for r in results] == expected
    assert [r.finish_reason for r in results] == ["end" if e[-1] == END else "length" for e in expected]
    assert joining(exported.model, rows, most) == [ids[:n] for ids, n in zip(expected, most, strict=True)]
    # What was compared is worth comparing: the rows differ, and are not one token over and over.
    assert len({tuple(e) for e in expected}) >= len(rows) - 1
    assert len({token for row in expected for token in row}) >= 10


def joining(model, rows, most):
    """The tokens of rows that are decoded two at a time, each up to a length of its own."""
    generator, tasks = model.generator, []
    scheduler = generator.new_scheduler(None, 2)
    for row, length in zip(rows, most, strict=True):
        settings = model.settings(None, {"max_new_tokens": length})
        tasks.append(generator.make_task(make_request(model.manifest, model.inputs, row, 0, settings), settings))
        scheduler.submit(tasks[-1])
    while not scheduler.idle:
        scheduler.step()
    return [list(generator.make_result(task).token_ids) for task in tasks]


@families
def test_logits(exported, name):
    check_logits(exported(name))


@families
def test_greedy_tokens(exported, name):
    check_greedy(exported(name))


@some([family for family in FAMILIES if family.decoder_only])
def test_what_was_read_before_counts_as_if_it_were_read_now(exported, name):
    """A prefix that requests go on from, and a conversation, each against the source on the whole."""
    file = exported(name)
    begin, *rows = draw(3, (8, 5, 1, 11, 2))
    prefix = file.model.cache_prefix(begin)
    results = file.model.generate_batch(rows, batch_size=2, prefix=prefix, max_new_tokens=9)
    for row, result in zip(rows, results, strict=True):
        assert list(result.token_ids) == file.family.greedy(np.concatenate([begin, row]), 9)
    chat, whole = file.model.chat(), np.zeros(0, np.int64)
    for row in rows:
        whole = np.concatenate([whole, row])
        result = chat.send(row, max_new_tokens=6)
        assert list(result.token_ids) == file.family.greedy(whole, 6)
        whole = np.concatenate([whole, result.token_ids])
    chat.rewind(2)
    whole = np.concatenate([chat.turns[-1].ids, rows[2]])
    assert list(chat.send(rows[2], max_new_tokens=6).token_ids) == file.family.greedy(whole, 6)


@pytest.mark.parametrize("name", ["hand-written", "gpt2-sdpa", "llama-sdpa", "t5-eager"])
def test_heads_that_are_split_and_merged_cost_nothing(exported, name):
    """The kernels of attention take merged heads, so that how a model splits them is undone, at each layer: what is
    left made a step of one row a fifth slower."""
    model = onnx.load(exported(name).path, load_external_data=False)
    branches = [a.g for node in model.graph.node if node.op_type == "If" for a in node.attribute] or [model.graph]
    for nodes in (branch.node for branch in branches):
        reshaped = {node.output[0] for node in nodes if node.op_type == "Reshape"}
        assert not [node.name for node in nodes if node.op_type == "Reshape" and node.input[0] in reshaped]
        assert sum(node.op_type == "Shape" for node in nodes) <= 4  # of the whole, not of a layer


@portable
def test_portable_logits(exported, name):
    check_logits(exported(name, "portable"))


@portable
def test_portable_greedy_tokens(exported, name):
    check_greedy(exported(name, "portable"))
