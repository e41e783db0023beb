"""/v1/generate: results equal those of `Model` for every option, and no input names a file of the server."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.servers import RunningServer
from support.toy_models import END_ID, Toy

from tformer_runtime import Model
from tformer_serve.routes import generate

CASES = [
    ("pronounce", "hello", {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2}),
    ("pronounce", {"src": "hello"}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
    ("pronounce", [10, 7, 14], {"max_new_tokens": 9, "top_logprobs": 3}),
    ("letters", "hello", {"max_new_tokens": 9, "temperature": 1.3, "seed": 5, "num_return_sequences": 3, "top_k": 9}),
    ("letters", [1, 10, 7], {"max_new_tokens": 25, "no_repeat_ngram_size": 2, "suppress_tokens": [END_ID]}),
    ("letters", "hello", {"max_new_tokens": 9, "regex": "[a-f]{3,9}", "forced_prefix": "ab"}),
    ("letters", "hello", {"choices": ["abc", "abd", "zz"], "logit_bias": {"5": 2.5}}),
    ("letters", "hello", {"max_new_tokens": 20, "prompt_lookup": True, "num_draft_tokens": 3}),
    ("letters", "hello", {"max_new_tokens": 9, "bad_words_ids": [[5], [6, 7]], "stop_strings": ["x"]}),
    ("pronounce", "hello", {"max_new_tokens": 5, "cross_attentions": True, "hidden_states": True}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_results_equal_those_of_the_model(server, references, number):
    name, input_, options = CASES[number]
    expected = references[name].generate(input_, **options)
    answer = server.post("/v1/generate", {"model": name, "input": input_, **options}).json()
    for result, one in zip(answer["results"], (expected, *expected.alternatives), strict=True):
        assert (result["text"], result["token_ids"]) == (one.text, list(one.token_ids))
        assert result["finish_reason"] == one.finish_reason
        np.testing.assert_allclose(
            [result["score"], *result["token_logprobs"]], [one.score, *one.token_logprobs], atol=1e-4
        )
        assert [[id_ for id_, _ in pairs] for pairs in result["top_logprobs"]] == [
            [id_ for id_, _ in pairs] for pairs in one.top_logprobs
        ]
        assert ("cross_attentions" in result) == (one.cross_attentions is not None)
        if one.cross_attentions is not None:
            np.testing.assert_allclose(result["cross_attentions"], one.cross_attentions, atol=1e-4)
            assert result["labels"] == list(references[name].labels(input_, one))
            assert set(result["hidden_states"]) == set(one.hidden_states)
            for module, array in one.hidden_states.items():
                np.testing.assert_allclose(result["hidden_states"][module], array, atol=1e-3)
    tokens = sum(len(one.token_ids) for one in (expected, *expected.alternatives))
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["timing"]["first_token"] > 0
    assert ("speculation" in answer) == (expected.speculation is not None)


def test_arrays_that_are_too_large_for_an_answer_are_refused(server, monkeypatch):
    body = {"model": "pronounce", "input": "hello", "max_new_tokens": 5, "suppress_tokens": [END_ID]}
    whole = server.post("/v1/generate", {**body, "cross_attentions": True}).json()["results"][0]["cross_attentions"]
    count = np.size(whole)
    monkeypatch.setattr(generate, "MAX_ANSWER_NUMBERS", count)
    assert server.post("/v1/generate", {**body, "cross_attentions": True}).status_code == 200
    for name in ("cross_attentions", "hidden_states"):
        longer = {**body, "max_new_tokens": 6, name: True}
        error = server.post("/v1/generate", longer).json()["error"]
        assert f", and an answer of this server at most {count:,}: generate fewer tokens" in error["message"]
        assert error["param"] == name
        streamed = server.post("/v1/generate", {**longer, "stream": True})
        assert streamed.status_code == 400
        assert streamed.json()["error"]["message"] == f"{name} are in whole answers alone: leave out stream"


def events_of(response):
    """Return the events of a stream."""
    blocks = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


@pytest.mark.parametrize("number", [0, 3, 5])
def test_streamed_pieces_join_to_the_results(server, references, number):
    name, input_, options = CASES[number]
    expected = references[name].generate(input_, **options)
    response = server.post("/v1/generate", {"model": name, "input": input_, "stream": True, **options})
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events_of(response)
    for i, one in enumerate((expected, *expected.alternatives)):
        own = [piece for piece in pieces if piece["number"] == i]
        assert "".join(piece["text"] for piece in own) == one.text
        assert [id_ for piece in own for id_ in piece["token_ids"]] == list(one.token_ids)
        assert own[-1]["finish_reason"] == one.finish_reason
    np.testing.assert_allclose(last["scores"], [one.score for one in (expected, *expected.alternatives)], atol=1e-4)


def test_model_without_a_tokenizer_takes_and_gives_ids(tmp_path):
    path = Toy(encoder=False, seed=5, tokenizer=False).write(tmp_path / "ids.onnx")
    expected = Model.load(path, "cpu").generate([5, 6], max_new_tokens=6)
    with RunningServer({"ids": path}) as server:
        body = {"model": "ids", "max_new_tokens": 6}
        result = server.post("/v1/generate", {**body, "input": [5, 6]}).json()["results"][0]
        assert (result["token_ids"], result["text"]) == (list(expected.token_ids), "")
        pieces = events_of(server.post("/v1/generate", {**body, "input": [5, 6], "stream": True}))
        assert [id_ for piece in pieces for id_ in piece.get("token_ids", [])] == list(expected.token_ids)
        refused = server.post("/v1/generate", {**body, "input": "ab"})
        assert refused.status_code == 400
        assert "the file has no tokenizer for tgt" in refused.json()["error"]["message"]
