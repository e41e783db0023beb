"""The routes of the tasks that do not generate: results equal those of `Model` for each input alone, at any load."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading

import httpx
import numpy as np
import pytest
from msgspec.structs import asdict
from support.served_tasks import png
from support.servers import HANG_SECONDS

from tformer_serve.routes import forecast, similarity

TEXTS = ["a good day", "bad", "the old film", "good good good", "a snow night", "the bad old film", "day"]
PAIRS = [["a good", "the old day film"], ["good", "old day " * 9 + "night"], ["bad film", "the"]]
HISTORIES = [[[1, 2], [2, 3], [3, 4.5]], [[0.25, -2]] * 7, [[5, 1e3], [6, 2e3], [7, 3e3], [8, 4e3]]]


def of_spans(spans):
    return {"spans": [asdict(span) for span in spans]}


def of_class(result):
    top = [{"label": label, "score": score} for label, score in result.top]
    fields = {"label": result.label, "score": result.score, "scores": dict(result.scores)}
    return {**fields, **({"top": top} if len(top) > 1 else {})}


def of_answer(answer):
    one, *others = (
        {"text": a.text, "score": a.score, "start": a.start, "end": a.end} for a in (answer, *answer.alternatives)
    )
    return {**one, **({"alternatives": others} if others else {})}


def of_filled(filled):
    return {"masks": [[asdict(candidate) for candidate in mask] for mask in filled]}


def of_forecast(rows):
    return {"columns": ["low", "high"], "forecast": rows.tolist()}


MASKED = ["old film", "a old day old", "the bad old"]
CASES = [  # route, model, the field of the inputs, inputs, options, from a result of Python to JSON
    ("classify", "scores", "inputs", TEXTS, {}, of_class),
    ("classify", "scores", "inputs", TEXTS, {"top_k": 3}, of_class),
    ("classify", "scores", "inputs", [["good", "a day"], "bad", "good " * 30], {"truncate": True}, of_class),
    ("entities", "spans", "texts", TEXTS, {}, of_spans),
    ("entities", "spans", "texts", TEXTS, {"ignore_labels": [], "aggregation": "none"}, of_spans),
    ("entities", "spans", "texts", [text + " a day" * 9 for text in TEXTS], {"doc_stride": 2}, of_spans),
    ("answer", "answers", "pairs", PAIRS, {}, of_answer),
    ("answer", "answers", "pairs", PAIRS, {"top_k": 3, "max_seq_len": 10, "doc_stride": 2}, of_answer),
    ("answer", "answers", "pairs", PAIRS, {"allow_no_answer": True, "max_answer_tokens": 2}, of_answer),
    ("fill", "masks", "texts", MASKED, {}, of_filled),
    ("fill", "masks", "texts", MASKED, {"top_k": 2, "candidate_tokens": ["good", "bad", 3]}, of_filled),
    ("forecast", "series", "histories", HISTORIES, {}, of_forecast),
    ("forecast", "series", "histories", HISTORIES, {"horizon": 2}, of_forecast),
    ("forecast", "series", "histories", [HISTORIES[1] * 9], {"truncate": True}, of_forecast),
]  # fmt: skip


def expected_of(model, case):
    """Return the results of Python, each for its input alone."""
    route, _, _, inputs, options, to_json = case
    if route == "forecast":
        return [to_json(model.forecast(one, **options)) for one in inputs]
    truncate = {"truncate": True} if options.get("truncate") else {}
    options = {name: value for name, value in options.items() if name != "truncate"}
    values = [tuple(one) if isinstance(one, list) else one for one in inputs]
    return [to_json(next(iter(getattr(model, route)([one], **options, **truncate)))) for one in values]


def assert_close(actual, expected):
    """Numbers are equal but for the order of sums next to other rows; everything else is equal."""
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-6, abs=2e-6)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_close(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)
    else:
        assert actual == expected


def body_of(case):
    _, name, field, inputs, options, _ = case
    return {"model": name, field: inputs, **options}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case[0]} {case[4]}" for case in CASES])
def test_results_equal_those_of_the_model(task_server, task_models, number):
    case = CASES[number]
    answer = task_server.post(f"/v1/{case[0]}", body_of(case)).json()
    assert_close(answer["results"], expected_of(task_models[case[1]], case))
    assert answer["model"] == case[1]
    assert answer["object"].startswith("tformer.")


def test_results_are_the_same_while_others_are_computed(task_server, task_models):
    """Each case is asked by six clients at once. Their inputs share batches."""
    expected = [expected_of(task_models[case[1]], case) for case in CASES]

    async def ask(client, case):
        answer = await client.post(f"/v1/{case[0]}", json=body_of(case))
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    async def ask_all():
        settings = {"base_url": task_server.url, "timeout": HANG_SECONDS, "trust_env": False}
        async with httpx.AsyncClient(**settings) as client:
            return await asyncio.gather(*(ask(client, case) for case in CASES * 6))

    for number, actual in enumerate(asyncio.run(ask_all())):
        assert_close(actual, expected[number % len(CASES)])
    task_server.wait_for("tformer_open_requests", 0)


def test_many_inputs_of_a_request_have_their_results(task_server, task_models):
    """More than the places of the server: the inputs of a request wait for each other."""
    texts = [TEXTS[i * 3 % len(TEXTS)] for i in range(700)]
    answer = task_server.post("/v1/classify", {"model": "scores", "inputs": texts}).json()
    assert_close(answer["results"], [of_class(result) for result in task_models["scores"].classify(texts)])
    assert answer["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in texts)


def test_images_are_classified(task_server, task_models):
    images = [png(255, 0, 0), png(10, 200, 30), png(0, 0, 250)]
    inputs = [{"base64": base64.b64encode(one).decode()} for one in images]
    answer = task_server.post("/v1/classify", {"model": "images", "inputs": inputs}).json()
    assert [result["label"] for result in answer["results"]] == ["red", "green", "blue"]
    assert_close(answer["results"], [of_class(result) for result in task_models["images"].classify(images)])
    named = task_server.post("/v1/classify", {"model": "images", "inputs": ["/etc/passwd"]}).json()["error"]
    assert "takes no text: give" in named["message"]
    assert named["param"] == "inputs[0]"


def test_similarities_are_cosines(task_server, task_models):
    vectors = task_models["vector"].embed(TEXTS).astype(np.float64)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    table = task_server.post("/v1/similarity", {"model": "vector", "inputs": TEXTS}).json()
    np.testing.assert_allclose(table["cosines"], unit @ unit.T, atol=1e-6)
    pairs = list(zip(TEXTS[:3], TEXTS[3:6], strict=True))
    answer = task_server.post("/v1/similarity", {"model": "vector", "pairs": pairs}).json()
    np.testing.assert_allclose(answer["cosines"], (unit[:3] * unit[3:6]).sum(1), atol=1e-6)


@pytest.mark.parametrize("name", ["vector", "relevance"])
def test_documents_are_ordered_by_relevance(task_server, task_models, name):
    query, model = "a good film", task_models[name]
    if name == "vector":
        (one, *others) = model.embed([query, *TEXTS]).astype(np.float64)
        scores = [other @ one / np.linalg.norm(other) / np.linalg.norm(one) for other in others]
    else:
        scores = [result.score for result in model.classify([(query, text) for text in TEXTS])]
    body = {"model": name, "query": query, "documents": TEXTS}
    answer = task_server.post("/v1/rerank", body).json()
    assert [result["index"] for result in answer["results"]] == np.argsort(-np.array(scores)).tolist()
    np.testing.assert_allclose(
        [r["relevance_score"] for r in answer["results"]], sorted(scores, reverse=True), atol=1e-6
    )
    best = task_server.post("/v1/rerank", {**body, "top_n": 2, "return_documents": True}).json()["results"]
    assert [result["document"]["text"] for result in best] == [TEXTS[r["index"]] for r in answer["results"][:2]]
    assert task_server.post("/v1/rerank", {**body, "documents": []}).json()["results"] == []


REFUSED = [  # route, body, field, the beginning or a part of the sentence
    ("classify", {"model": "vector", "inputs": ["a"]}, None,
     "this model (feature-extraction) turns each input into numbers: it cannot classify; send it to /v1/embeddings"),
    ("classify", {"model": "letters", "inputs": ["a"]}, None,
     "this model (continue) generates: it cannot classify; send it to /v1/completions"),
    ("entities", {"model": "scores", "texts": ["a"]}, None, "it cannot label spans; send it to /v1/classify"),
    ("answer", {"model": "spans", "pairs": [["a", "b"]]}, None, "it cannot answer; send it to /v1/entities"),
    ("fill", {"model": "answers", "texts": ["a"]}, None, "it cannot fill; send it to /v1/answer"),
    ("embeddings", {"model": "masks", "input": "a"}, None, "it cannot embed; send it to /v1/fill"),
    ("embeddings", {"model": "states", "input": "a"}, None, "this file gives numbers for each position of an input"),
    ("embeddings", {"model": "audio", "input": "a"}, None, "it cannot embed; send it to /v1/audio/transcriptions"),
    ("classify", {"model": "series", "inputs": ["a"]}, None, "it cannot classify; send it to /v1/forecast"),
    ("completions", {"model": "scores", "prompt": "a"}, None, "it cannot generate; send it to /v1/classify"),
    ("forecast", {"model": "scores", "histories": [[1]]}, None, "was not exported to forecast"),
    ("rerank", {"model": "scores", "query": "a", "documents": ["b"]}, None,
     "this model (text-classification) gives 3 numbers for a pair: it cannot rerank, which needs one; send it to"),
    ("rerank", {"model": "letters", "query": "a", "documents": ["b"]}, None, "it cannot rerank; send it to /v1/comp"),
    ("rerank", {"model": "vector", "query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n must be a whole"),
    ("similarity", {"model": "vector"}, None, "give inputs, to compare each with each, or pairs"),
    ("similarity", {"model": "vector", "pairs": [["a"]]}, None, "pairs[0] has 1 parts: a pair has two"),
    ("classify", {"model": "scores", "inputs": "a"}, "inputs", "inputs should be a valid list"),
    ("classify", {"model": "scores", "inputs": ["a", "good " * 30]}, "inputs[1]", "the input is 32 tokens long and"),
    ("classify", {"model": "scores", "inputs": ["a"], "top_k": 0}, "top_k", "top_k must be a whole number of at least"),
    ("classify", {"model": "scores", "inputs": ["a"], "top_k": 5000}, "top_k", "top_k should be less than or equal"),
    ("classify", {"model": "scores", "inputs": ["a"], "adapter": "x"}, "adapter", "adapter"),
    ("classify", {"model": "scores", "inputs": ["a"] * 2049}, "inputs", "inputs has more than 2,048 parts: send fewer"),
    ("entities", {"model": "spans", "texts": ["a"], "doc_stride": 7}, "doc_stride", "doc_stride=7 is more than half"),
    ("answer", {"model": "answers", "pairs": [["", "b"]]}, "pairs[0]", "the question is empty"),
    ("answer", {"model": "answers", "pairs": [["a", "b", "c"]]}, "pairs[0]", "give a question and the context to"),
    ("answer", {"model": "answers", "pairs": [["a", "b"]], "max_seq_len": 10, "doc_stride": 9}, "doc_stride",
     "doc_stride=9 is more than half of a window of 10 tokens: set less"),
    ("fill", {"model": "masks", "texts": ["old", "good"]}, "texts[1]", "the input has no mask: write old where it"),
    ("fill", {"model": "masks", "texts": ["old " * 5] * 9, "top_k": 500}, "top_k",
     "top_k=500 for 45 masks gives more than the 10,000 tokens of an answer: give fewer texts, or a smaller top_k"),
    ("forecast", {"model": "series", "histories": [[[1, 2]] * 3, [[1]]]}, "histories[1]", "the history has the shape"),
    ("forecast", {"model": "series", "histories": [[[1, 2]] * 3], "horizon": 5}, "horizon", "horizon must be at most"),
    ("forecast", {"model": "series", "histories": [["a"]]}, "histories[0]", "a history is an array of numbers"),
    ("embeddings", {"model": "vector", "input": []}, None, "the input is an empty list"),
    ("embeddings", {"model": "vector", "input": "a", "dimensions": 3}, "dimensions", "dimensions may be 6 for this"),
    ("embeddings", {"model": "vector", "input": ["a", "day " * 20]}, "input[1]", "the input is 22 tokens long"),
    ("embeddings", {"model": "vector", "input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
    ("embeddings", {"model": "vector", "input": "a", "x": 1}, "x", "there is no option 'x'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[f"{case[0]} {case[3][:30]}" for case in REFUSED])
def test_refusal_says_what_the_model_can_do(task_server, number):
    route, body, param, sentence = REFUSED[number]
    answer = task_server.post(f"/v1/{route}", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert "()" not in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("route", "module", "body", "limit"),
    [
        ("similarity", similarity, {"model": "vector", "inputs": ["a"] * 4}, 16),
        ("forecast", forecast, {"model": "series", "histories": [[[1, 2]] * 3] * 2, "horizon": 4}, 16),
    ],
)
def test_answer_that_is_too_large_is_refused(task_server, monkeypatch, route, module, body, limit):
    monkeypatch.setattr(module, "MAX_ANSWER_NUMBERS", limit)
    assert task_server.post(f"/v1/{route}", body).status_code == 200
    monkeypatch.setattr(module, "MAX_ANSWER_NUMBERS", limit - 1)
    error = task_server.post(f"/v1/{route}", body).json()["error"]
    assert f"gives {limit} " in error["message"]
    assert f"an answer has at most {limit - 1}" in error["message"]


def test_paths_are_described(task_server):
    with task_server.http() as client:
        paths = client.get("/openapi.json").json()["paths"]
    for route in {case[0] for case in REFUSED}:
        content = paths[f"/v1/{route}"]["post"]["requestBody"]["content"]
        assert "application/json" in content
    assert "multipart/form-data" in json.dumps(paths["/v1/audio/transcriptions"])


ROUTES = {case[0]: body_of(case) for case in CASES} | {
    "embeddings": {"model": "vector", "input": TEXTS},
    "similarity": {"model": "vector", "inputs": TEXTS},
    "rerank": {"model": "relevance", "query": "a", "documents": TEXTS},
}


@pytest.mark.parametrize("route", ROUTES)
def test_deadline_ends_a_request(task_server, route):
    late = task_server.post(f"/v1/{route}", ROUTES[route], headers={"X-Request-Timeout": "1e-9"})
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline"
    assert task_server.post(f"/v1/{route}", ROUTES[route], headers={"X-Request-Timeout": "1e6"}).status_code == 200


def test_client_that_leaves_ends_the_work_for_it(task_server, task_models, monkeypatch):
    """The batch that runs is the last one that is computed for it. Others get their results."""
    engine = task_server.models["scores"].model.engine
    encode, begun, opened, rows = engine.encode, threading.Event(), threading.Event(), []

    def held_encode(requests, count, **options):
        rows.append(count)
        begun.set()
        assert opened.wait(HANG_SECONDS)
        return encode(requests, count, **options)

    monkeypatch.setattr(engine, "encode", held_encode)
    content = json.dumps({"model": "scores", "inputs": TEXTS * 20}).encode()
    head = f"POST /v1/classify HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    address = httpx.URL(task_server.url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        assert begun.wait(HANG_SECONDS)
    task_server.wait_for("tformer_open_requests", 0)
    opened.set()
    answer = task_server.post("/v1/classify", {"model": "scores", "inputs": TEXTS[:2]}).json()
    assert_close(answer["results"], [of_class(result) for result in task_models["scores"].classify(TEXTS[:2])])
    assert sum(rows) <= 8 + 2  # a batch of the server, and the two texts
