"""`Model.close`: memory and threads go, later calls raise one error, and requests of other threads end."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from support.concurrent_calls import side_by_side
from support.toy_models import END_ID, Toy, assert_alike
from support.toy_tasks import write

from tformer_runtime import Model, UnsupportedCallError

CLOSED = r"^the model is closed: load the file again with Model\.load\(\)$"
VOCABULARY, WIDTH = 200_000, 16
WEIGHT_BYTES = 2 * 4 * VOCABULARY * WIDTH  # embeddings and projection, at least
LONG = {"suppress_tokens": [END_ID], "max_new_tokens": 20}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Toy(seed=5, encoder=False).write(tmp_path_factory.mktemp("closed") / "toy.onnx")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    toy = Toy(seed=5, encoder=False, vocabulary=VOCABULARY, tokenizer=False)
    return toy.write(tmp_path_factory.mktemp("closed") / "large.onnx")


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def mappings_of(path):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_close_frees_weights_mappings_files_and_threads(large):
    """Though a conversation and a prefix, which hold bound buffers, are still there."""
    Model.load(large, "cpu", threads=3).close()  # libraries are loaded, and heaps have grown
    files, threads = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    model = Model.load(large, "cpu", threads=3)
    assert len(os.listdir("/proc/self/task")) > len(threads)
    prefix, chat = model.cache_prefix([4, 5]), model.chat()
    expected = model.generate([6, 7], prefix=prefix, max_new_tokens=3)
    chat.send([4, 5], max_new_tokens=3)
    before = resident_bytes()
    model.close()
    assert before - resident_bytes() > WEIGHT_BYTES
    assert mappings_of(large) == []
    assert os.listdir("/proc/self/fd") == files
    assert len(os.listdir("/proc/self/task")) == len(threads)
    for call in (lambda: chat.send([4], max_new_tokens=3), lambda: model.generate([6, 7], prefix=prefix)):
        with pytest.raises(UnsupportedCallError, match=CLOSED):
            call()
    chat.release()
    prefix.release()
    assert model.budget.used_bytes == 0
    with Model.load(large, "cpu", threads=3) as again:
        assert_alike(again.generate([6, 7], prefix=again.cache_prefix([4, 5]), max_new_tokens=3), expected)


GENERATING_CALLS = {
    "generate": lambda model: model.generate("ab"),
    "generate_batch": lambda model: list(model.generate_batch(["ab"])),
    "generate_batch with workers": lambda model: list(model.generate_batch(["ab"] * 9, workers=2)),
    "stream": lambda model: list(model.stream("ab")),
    "score": lambda model: model.score("ab", "c"),
    "cache_prefix": lambda model: model.cache_prefix("ab"),
    "chat": lambda model: model.chat(),
    "align": lambda model: model.align("ab", "c"),
    "hidden_states": lambda model: model.hidden_states("ab"),
    "labels": lambda model: model.labels("ab", None),
    "settings": lambda model: model.settings(None, {}),
    "info": lambda model: model.info(),
    "pickle": pickle.dumps,
    "with": lambda model: model.__enter__(),
    "forecast": lambda model: model.forecast([[1.0]]),
    "forecast_batch": lambda model: model.forecast_batch([[[1.0]]]),
}
SINGLE_PASS_CALLS = {
    "predict": lambda model: list(model.predict(["a day"])),
    "embed": lambda model: model.embed(["a day"]),
    "classify": lambda model: model.classify(["a day"]),
    "entities": lambda model: model.entities(["a day"]),
    "answer": lambda model: model.answer([("a", "day")]),
    "fill": lambda model: model.fill(["a day"]),
    "attentions": lambda model: model.attentions("a day"),
    "transcribe": lambda model: model.transcribe(np.zeros(9)),
}


@pytest.mark.parametrize("name", [*GENERATING_CALLS, *SINGLE_PASS_CALLS])
def test_each_call_of_a_closed_model_raises_one_error(path, tmp_path, name):
    call = {**GENERATING_CALLS, **SINGLE_PASS_CALLS}[name]
    model = Model.load(path if name in GENERATING_CALLS else write(tmp_path / "task.onnx"), "cpu")
    assert not model.closed
    model.close()
    model.close()
    assert model.closed
    with pytest.raises(UnsupportedCallError, match=CLOSED):
        call(model)
    assert model.memory()["used_bytes"] == 0


def test_with_closes_the_model_after_an_error_too(path):
    def fail(ids, logits):
        raise ZeroDivisionError

    model = Model.load(path, "cpu")
    with pytest.raises(ZeroDivisionError), model:
        model.generate("ab", logits_processor=fail)
    assert model.closed


def test_started_results_end_with_the_error(path):
    """Results that are read lazily: each that was computed before is right, then the error follows."""
    model = Model.load(path, "cpu")
    stream, results = model.stream("ab", **LONG), model.generate_batch(["ab", "c"] * 20, batch_size=2, **LONG)
    expected = model.generate("ab", **LONG)
    assert expected.text.startswith(next(stream))
    assert_alike(next(results), expected)
    model.close()
    for rest in (stream, results):
        with pytest.raises(UnsupportedCallError, match=CLOSED):
            list(rest)
    assert model.memory()["used_bytes"] == 0


def test_run_that_has_begun_ends_with_its_result(path):
    """The model is closed while onnxruntime runs. The next run is refused, and with one run the request is complete."""
    model, begun, goes_on = Model.load(path, "cpu"), threading.Event(), threading.Event()
    expected = model.generate("ab", max_new_tokens=1)
    session = model.engine.session._sessions["decode"]

    class Slow:
        def __getattr__(self, name):
            return getattr(session, name)

        def run_with_iobinding(self, *arguments):
            begun.set()
            goes_on.wait()
            session.run_with_iobinding(*arguments)

    model.engine.session._sessions = dict.fromkeys(("encode", "decode"), Slow())
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(outcome(model, n))) for n in (1, 2)]
    for thread in threads:
        thread.start()
    begun.wait()
    model.close()
    goes_on.set()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, UnsupportedCallError):
            assert "the model is closed" in str(result)
        else:
            assert_alike(result, expected)
    assert any(isinstance(result, UnsupportedCallError) for result in results)  # of the two tokens


def outcome(model, max_new_tokens=20):
    try:
        return model.generate("ab", max_new_tokens=max_new_tokens, suppress_tokens=[END_ID])
    except UnsupportedCallError as error:
        return error


def test_threads_that_generate_while_others_close_end_with_a_result_or_the_error(path):
    for _ in range(10):
        model = Model.load(path, "cpu", threads=1)
        expected = outcome(model)

        def work(number, model=model, expected=expected):
            if number < 2:
                model.close()
                return
            result = outcome(model)
            while not isinstance(result, UnsupportedCallError):
                assert result.token_ids == expected.token_ids
                result = outcome(model)
            assert str(result).startswith("the model is closed")

        side_by_side(work, range(5))
        gc.collect()
        assert model.budget.used_bytes == model.budget.reserved_bytes == 0
