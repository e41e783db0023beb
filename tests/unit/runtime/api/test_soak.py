"""A short soak test: each of some hundred concurrent requests has the result of the same request alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import soak
from msgspec import structs
from support.toy_models import Toy

from tformer_runtime import Model

TOYS = {"encoder-decoder": Toy(seed=27, extras=True), "decoder-only": Toy(seed=5, encoder=False, attention="scatter")}


@pytest.fixture(scope="module", params=sorted(TOYS))
def path(request, tmp_path_factory):
    return TOYS[request.param].write(tmp_path_factory.mktemp("soak") / "toy.onnx")


@pytest.mark.parametrize("memory_factor", [None, 2.0])
def test_concurrent_requests_of_all_kinds_match_single_requests(path, memory_factor):
    """memory_factor: the memory limit, as a multiple of the memory of the largest request."""
    unlimited = Model.load(path, "cpu", threads=1)
    requests = soak.pool(unlimited, 36, seed=1)
    kinds = {request.kind for request in requests}
    assert kinds >= {"greedy", "many beams", "samples", "stop", "choices", "regex"}
    limit = None if memory_factor is None else int(memory_factor * unlimited.memory()["peak_bytes"])
    model, tally = Model.load(path, "cpu", threads=1, max_memory=limit), soak.Tally()
    asyncio.run(soak.soak(model, requests, 2, tally, lambda quiet: tally.total < 200, rows=8))
    assert not tally.wrong
    assert not tally.lost
    assert tally.total >= 200
    assert tally.done.keys() == kinds
    assert tally.streamed
    assert model.memory()["used_bytes"] == 0


def test_batch_of_thousands_of_requests_matches_single_requests(path):
    model, tally = Model.load(path, "cpu", threads=1), soak.Tally()
    requests = soak.tiny(model, 20, seed=1)
    soak.batch(model, requests, 3_000, tally, lambda: None)
    assert not tally.wrong
    assert tally.done == {"tiny": 3_000}
    assert model.memory()["used_bytes"] == 0 < model.memory()["peak_bytes"] < 2**20


def test_soak_reports_wrong_results_wrong_texts_and_lost_requests(path, monkeypatch):
    model, tally = Model.load(path, "cpu", threads=1), soak.Tally()
    requests = soak.pool(model, 30, seed=1)
    request, other, *_ = (request for request in requests if request.kind == "many beams")
    soak.batch(model, [request], 1, tally, lambda: None)
    assert not tally.wrong
    soak.batch(model, [replace(request, expected=other.expected)], 1, tally, lambda: None)
    assert len(tally.wrong) == 1
    streamed = next(request for request in requests if request.streams and request.expected.text)
    wrong_text = replace(streamed, expected=structs.replace(streamed.expected, text=streamed.expected.text + "a"))
    texts = soak.Tally()
    asyncio.run(soak.soak(model, [wrong_text], 2, texts, lambda quiet: not any("streamed" in w for w in texts.wrong)))
    assert any("streamed" in message for message in texts.wrong)
    monkeypatch.setattr(soak, "PATIENCE", 0)
    asyncio.run(soak.soak(model, [request], 2, tally, lambda quiet: not tally.lost))
    assert tally.lost
