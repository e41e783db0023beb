"""One `Model` in many threads: the result of each call equals the result of the same call alone."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.toy_models import END_ID, Toy, assert_alike

from tformer_runtime import InputError, Model, Result

NUM_THREADS = 8
TOYS = {
    "encoder-decoder": Toy(seed=27, extras=True, layers=2),
    "decoder-only": Toy(seed=5, encoder=False),
    "portable": Toy(seed=27, encoder=False, attention="scatter-pair"),
}
WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]
OPTION_SETS = [
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
def frequent_thread_switches():
    """Set the switch interval to a hundredth, so that races become likely."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    yield
    sys.setswitchinterval(interval)


def refusal(model: Model) -> str:
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
    """Return calls of all methods of a model that compute results."""
    method_calls = [lambda w=word, o=options: model.generate(w, **o) for word in WORDS for options in OPTION_SETS]
    method_calls += [lambda o=options: list(model.generate_batch(WORDS, batch_size=3, **o)) for options in OPTION_SETS]
    method_calls += [
        lambda w=word, o=options: "".join(model.stream(w, **o))
        for word in WORDS[:4]
        for options in (*OPTION_SETS[:2], OPTION_SETS[6])
    ]
    method_calls += [lambda w=word: model.score(w, "abc") for word in WORDS]
    method_calls += [lambda: refusal(model)] * 3
    if model.manifest.encode is None:
        prefix = model.cache_prefix("instructions")
        method_calls += [lambda w=word: model.generate(w, prefix=prefix, max_new_tokens=8) for word in WORDS]
        method_calls += [lambda: list(model.generate_batch(WORDS, prefix=prefix, num_beams=2, max_new_tokens=5))] * 2
        method_calls += [
            lambda w=word: model.generate("ab", prefix=model.cache_prefix(w), max_new_tokens=5) for word in WORDS
        ]
        method_calls += [lambda w=word: conversation(model, w) for word in WORDS]
    else:
        method_calls += [lambda w=word: model.align(w, "abc") for word in WORDS]
        method_calls += [
            lambda w=word: model.generate(w, cross_attentions=True, max_new_tokens=5).cross_attentions for word in WORDS
        ]
    return method_calls


def assert_same(actual, expected) -> None:
    if isinstance(expected, list):
        for one, other in zip(actual, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, Result):
        assert_alike(actual, expected)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    else:
        assert actual == expected


@pytest.mark.usefixtures("frequent_thread_switches")
@pytest.mark.parametrize("limited", [False, True])
def test_calls_in_threads_match_single_calls(path, limited):
    """limited: the memory is enough for about two batches."""
    single = Model.load(path, "cpu", threads=1)
    serial_calls = calls(single)
    expected = [call() for call in serial_calls]
    model = Model.load(path, "cpu", threads=1, max_memory=2 * single.memory()["peak_bytes"] if limited else None)
    plan = [*enumerate(calls(model))] * 2
    random.Random(1).shuffle(plan)
    barrier = threading.Barrier(NUM_THREADS)

    def run(part):
        barrier.wait()
        return [(number, call()) for number, call in part]

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        parts = list(threads.map(run, [plan[i::NUM_THREADS] for i in range(NUM_THREADS)]))
    results = [result for part in parts for result in part]
    assert len(results) == 2 * len(expected)
    for number, actual in results:
        assert_same(actual, expected[number])
    assert model.memory()["used_bytes"] == single.memory()["used_bytes"]  # a decoder-only model keeps its cached prefix
