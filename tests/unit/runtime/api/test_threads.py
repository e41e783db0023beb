"""One `Model`, many threads, every call: each yields what it yields when nothing else runs."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.toy_models import END_ID, Toy, assert_alike

from tformer_runtime import InputError, Model, Result

THREADS = 8
TOYS = {
    "encoder-decoder": Toy(seed=27, extras=True, layers=2),
    "decoder-only": Toy(seed=5, encoder=False),
    "portable": Toy(seed=27, encoder=False, attention="scatter-pair"),
}
WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]
WAYS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 20, "stop_strings": ["e", "££"], "suppress_tokens": [END_ID]},
    {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2},
    {"max_new_tokens": 15, "temperature": 1.3, "seed": 4, "num_return_sequences": 2},
    {"max_new_tokens": 10, "repetition_penalty": 1.4, "top_logprobs": 2, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 7, "choices": ["abc", "abd", "zz"]},
    {"max_new_tokens": 9, "regex": "(ab|c)+"},
]


@pytest.fixture(scope="module", params=sorted(TOYS))
def path(request, tmp_path_factory):
    return TOYS[request.param].write(tmp_path_factory.mktemp("threads") / "toy.onnx")


@pytest.fixture
def switching():
    """Threads take turns a hundred times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    yield
    sys.setswitchinterval(interval)


def refused(model: Model) -> str:
    with pytest.raises(InputError) as caught:
        model.generate("hé")
    return str(caught.value)


def conversation(model: Model, word: str) -> list[Result]:
    chat = model.chat()
    results = [chat.send(word, max_new_tokens=4), chat.send("ab", max_new_tokens=4)]
    chat.rewind()
    results.append(chat.send("c", max_new_tokens=4))
    chat.release()
    return results


def calls(model: Model) -> list:
    """Everything that a model can be asked, as functions."""
    made = [lambda w=word, o=way: model.generate(w, **o) for word in WORDS for way in WAYS]
    made += [lambda o=way: list(model.generate_batch(WORDS, batch_size=3, **o)) for way in WAYS]
    made += [lambda w=word, o=way: "".join(model.stream(w, **o)) for word in WORDS[:4] for way in (*WAYS[:2], WAYS[6])]
    made += [lambda w=word: model.score(w, "abc") for word in WORDS]
    made += [lambda: refused(model)] * 3
    if model.manifest.encode is None:
        shared = model.cache_prefix("instructions")
        made += [lambda w=word: model.generate(w, prefix=shared, max_new_tokens=8) for word in WORDS]
        made += [lambda: list(model.generate_batch(WORDS, prefix=shared, num_beams=2, max_new_tokens=5))] * 2
        made += [lambda w=word: model.generate("ab", prefix=model.cache_prefix(w), max_new_tokens=5) for word in WORDS]
        made += [lambda w=word: conversation(model, w) for word in WORDS]
    else:
        made += [lambda w=word: model.align(w, "abc") for word in WORDS]
        made += [
            lambda w=word: model.generate(w, cross_attentions=True, max_new_tokens=5).cross_attentions for word in WORDS
        ]
    return made


def assert_same(found, expected) -> None:
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, Result):
        assert_alike(found, expected)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    else:
        assert found == expected


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("limited", [False, True])
def test_threads_share_a_model(path, limited):
    """limited: there is memory for two batches or so at a time."""
    alone = Model.load(path, "cpu", threads=1)
    serially = calls(alone)
    expected = [call() for call in serially]
    model = Model.load(path, "cpu", threads=1, max_memory=2 * alone.memory()["peak"] if limited else None)
    plan = [*enumerate(calls(model))] * 2
    random.Random(1).shuffle(plan)
    barrier = threading.Barrier(THREADS)

    def run(part):
        barrier.wait()
        return [(number, call()) for number, call in part]

    with ThreadPoolExecutor(THREADS) as threads:
        parts = list(threads.map(run, [plan[i::THREADS] for i in range(THREADS)]))
    results = [result for part in parts for result in part]
    assert len(results) == 2 * len(expected)
    for number, found in results:
        assert_same(found, expected[number])
    assert model.memory()["held"] == alone.memory()["held"]  # the shared prefix, if there is one
