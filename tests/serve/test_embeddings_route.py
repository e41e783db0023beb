"""/v1/embeddings with OpenAI's client: vectors equal those of `Model` for each input alone."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import openai
import pytest

from tformer_serve.routes import embeddings

TEXTS = ["a good day", "bad", "the old film", "good good good", "a snow night", "the bad old film", "day"]


def vectors_of(answer):
    return np.array([item.embedding for item in answer.data])


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_vectors_equal_those_of_the_model(task_server, task_models, form):
    """The client asks for base64 unless told otherwise."""
    expected = task_models["vector"].embed(TEXTS)
    answer = task_server.client().embeddings.create(model="vector", input=TEXTS, **form)
    if form.get("encoding_format") == "base64":
        vectors = np.array([np.frombuffer(base64.b64decode(item.embedding), "<f4") for item in answer.data])
    else:
        vectors = vectors_of(answer)
    np.testing.assert_allclose(vectors, expected, atol=2e-6)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    assert answer.model == "vector"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(text.split()) + 2 for text in TEXTS)


def test_floats_are_the_numbers_of_base64(task_server):
    client = task_server.client()
    exact = vectors_of(client.embeddings.create(model="vector", input=TEXTS[0]))
    plain = vectors_of(client.embeddings.create(model="vector", input=TEXTS[0], encoding_format="float"))
    assert np.array_equal(exact.astype(np.float32), plain.astype(np.float32))


def test_one_text_ids_and_lists_of_ids_are_read(task_server, task_models):
    client, model = task_server.client(), task_models["vector"]
    for sent, inputs in (
        ("a good day", ["a good day"]), ([1, 4, 2], [[1, 4, 2]]), ([[1, 4, 2], [1, 5, 2]], [[1, 4, 2], [1, 5, 2]]),
    ):  # fmt: skip
        answer = client.embeddings.create(model="vector", input=sent, dimensions=6, user="me")
        np.testing.assert_allclose(vectors_of(answer), model.embed(inputs), atol=2e-6)
    cut = client.embeddings.create(model="vector", input="good " * 30, extra_body={"truncate": True})
    np.testing.assert_allclose(vectors_of(cut), model.embed(["good " * 30], truncate=True), atol=2e-6)


def test_concurrent_callers_get_their_own_vectors(task_server, task_models):
    expected = task_models["vector"].embed(TEXTS)

    async def ask_all():
        async with task_server.async_client() as client:
            calls = [client.embeddings.create(model="vector", input=TEXTS[i % 7 :]) for i in range(60)]
            return await asyncio.gather(*calls)

    for number, answer in enumerate(asyncio.run(ask_all())):
        np.testing.assert_allclose(vectors_of(answer), expected[number % 7 :], atol=2e-6)


def test_vectors_that_are_too_many_for_floats_are_refused(task_server, monkeypatch):
    monkeypatch.setattr(embeddings, "MAX_ANSWER_NUMBERS", 11)
    client = task_server.client()
    with pytest.raises(
        openai.BadRequestError, match="gives 12 numbers, and an answer has at most 11: set it to base64"
    ):
        client.embeddings.create(model="vector", input=TEXTS[:2], encoding_format="float")
    assert len(client.embeddings.create(model="vector", input=TEXTS[:2]).data) == 2
