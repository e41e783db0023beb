"""A file that carries states decodes as PyTorch in each way: joins, prefixes, chats, rewinding, beams, speculation.

An encoder of recurrent layers runs once.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recurrent_state import CellsAndAttention
from support.handwritten_case import BLOCK, END, SPECIAL, VOCABULARY, Case
from support.handwritten_checks import assert_close, draw_rows
from torch import nn

from tformer_export import export
from tformer_runtime import Model
from tformer_runtime.decoding import drafting

CASE = Case("cells-and-attention", CellsAndAttention)
MAX_NEW_TOKENS = 9


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("recurrent") / "model.onnx"
    export(CASE.module, path, **CASE.arguments, special_tokens=SPECIAL, max_length=BLOCK)
    return path


@pytest.fixture(scope="module")
def model(path):
    return Model.load(path, device="cpu", threads=1)


def test_rows_that_join_a_running_batch_get_the_tokens_of_pytorch(model):
    rows = draw_rows(3, (5, 1, 9, 2, 7, 12, 3))
    expected = [CASE.greedy(row, MAX_NEW_TOKENS) for row in rows]
    results = model.generate_batch(rows, batch_size=2, max_new_tokens=MAX_NEW_TOKENS)
    assert [list(result.token_ids) for result in results] == expected
    assert len({token for tokens in expected for token in tokens}) > 8


def test_generation_after_a_prefix_gives_the_tokens_of_pytorch(model):
    first, *rest = draw_rows(4, (8, 3, 1, 5))
    prefix = model.cache_prefix(first)
    results = model.generate_batch(rest, batch_size=2, max_new_tokens=MAX_NEW_TOKENS, prefix=prefix)
    expected = [CASE.greedy(np.concatenate([first, row]), MAX_NEW_TOKENS) for row in rest]
    assert [list(result.token_ids) for result in results] == expected


def test_chat_and_its_rewinding_give_the_tokens_of_pytorch(model):
    chat, (first, second, other) = model.chat(), draw_rows(5, (4, 3, 2))
    conversation = first
    answer = CASE.greedy(conversation, 4)
    assert list(chat.send(first, max_new_tokens=4).token_ids) == answer
    conversation = np.concatenate([conversation, answer])
    for message in (second, other):
        expected = CASE.greedy(np.concatenate([conversation, message]), 4)
        assert list(chat.send(message, max_new_tokens=4).token_ids) == expected
        chat.rewind()


def test_state_before_a_step_is_kept_and_an_earlier_one_is_read_again(model):
    engine, (row,) = model.engine, draw_rows(6, (12,))
    state = engine.start(None, 1)
    engine.step(state, row[None, :6])
    engine.step(state, row[None, 6:9])
    state.rewind(7)
    assert state.lengths.tolist() == [6]
    assert_close(engine.step(state, row[None, 8:10])[0], CASE.logits(None, np.append(row[:6], row[8:10]))[-1])
    state.rewind(3)
    assert state.lengths.tolist() == [0]
    assert_close(engine.step(state, row[None])[0], CASE.logits(None, row)[-1])


def test_beam_search_gives_the_hypotheses_of_a_loop_over_pytorch(model):
    rows = draw_rows(7, (6, 2, 4))
    settings = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "suppress_tokens": [END]}
    for row, result in zip(rows, model.generate_batch(rows, batch_size=2, **settings), strict=True):
        actual = [list(hypothesis.token_ids) for hypothesis in (result, *result.alternatives)]
        assert actual == search_beams(row, 3, 6)


def search_beams(row: np.ndarray, num_beams: int, num_tokens: int) -> list[list[int]]:
    """Return the continuations with the greatest probabilities, each step keeping `num_beams` of them."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(num_tokens):
        candidates = []
        for score, tokens in beams:
            logprobs = torch.from_numpy(CASE.logits(None, np.append(row, tokens).astype(np.int64))[-1])
            logprobs = logprobs.log_softmax(-1).tolist()
            candidates += [(score + logprobs[i], [*tokens, i]) for i in range(VOCABULARY) if i != END]
        beams = sorted(candidates, reverse=True)[:num_beams]
    return [tokens for _, tokens in beams]


def test_speculative_decoding_gives_the_tokens_of_pytorch(model, path, monkeypatch):
    monkeypatch.setattr(drafting, "relative_cost", lambda *_: 0.1)  # a draft of the model's size would be disabled
    drafts = {"prompt_lookup": True}, {"draft_model": Model.load(path, device="cpu", threads=1)}
    num_guessed = num_accepted = 0
    for row in draw_rows(8, (3, 6, 1)):
        repeated = np.concatenate([row, row])
        for draft in drafts:
            result = model.generate(repeated, max_new_tokens=MAX_NEW_TOKENS, **draft)
            assert list(result.token_ids) == CASE.greedy(repeated, MAX_NEW_TOKENS)
            num_guessed += result.speculation.guessed
            num_accepted += result.speculation.accepted
    assert num_guessed >= num_accepted > 10


class RecurrentTagger(nn.Module):
    """A recurrent layer in both directions, which tags each position."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 12), nn.Linear(16, 5)
        self.rnn = nn.LSTM(12, 8, bidirectional=True, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def test_encoder_in_both_directions_gives_the_results_of_pytorch_for_rows_of_any_length(tmp_path):
    module, path = RecurrentTagger().eval(), tmp_path / "model.onnx"
    export(module, path, example={"ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}, step_input=None)
    rows = draw_rows(9, (1, 7, 3, 12))
    results = Model.load(path, device="cpu", threads=1).predict([{"ids": row} for row in rows])
    for row, result in zip(rows, results, strict=True):
        with torch.no_grad():
            expected = module(torch.from_numpy(row)[None])[0].numpy()
        (actual,) = result.values() if isinstance(result, dict) else [result]
        assert_close(np.asarray(actual), expected)
