"""The soak in a short form: some hundreds of requests of all kinds on toys, each result that of the request alone."""

from __future__ import annotations

import asyncio

import pytest
import soak
from support.toy_models import Toy

from tformer_runtime import Model

TOYS = {"encoder-decoder": Toy(seed=27, extras=True), "decoder-only": Toy(seed=5, encoder=False, attention="scatter")}


@pytest.fixture(scope="module", params=sorted(TOYS))
def path(request, tmp_path_factory):
    return TOYS[request.param].write(tmp_path_factory.mktemp("soak") / "toy.onnx")


@pytest.mark.parametrize("tightness", [None, 2.0])
def test_all_kinds_of_requests_at_once(path, tightness):
    """tightness: as much memory as so many of the largest requests need."""
    free = Model.load(path, "cpu", threads=1)
    requests = soak.pool(free, 36, seed=1)
    kinds = {request.kind for request in requests}
    assert kinds >= {"greedy", "many beams", "samples", "stop", "choices", "regex"}
    limit = None if tightness is None else int(tightness * free.memory()["peak"])
    model, tally = Model.load(path, "cpu", threads=1, max_memory=limit), soak.Tally()
    asyncio.run(soak.soak(model, requests, 2, tally, lambda quiet: tally.total < 200, rows=8))
    assert not tally.wrong
    assert not tally.lost
    assert tally.total >= 200
    assert tally.done.keys() == kinds
    assert tally.streamed
    assert model.memory()["held"] == 0


def test_a_batch_of_thousands_of_requests(path):
    model, tally = Model.load(path, "cpu", threads=1), soak.Tally()
    requests = soak.tiny(model, 20, seed=1)
    soak.batch(model, requests, 3_000, tally, lambda: None)
    assert not tally.wrong
    assert tally.done == {"tiny": 3_000}
    assert model.memory()["held"] == 0 < model.memory()["peak"] < 2**20


def test_what_is_wrong_is_found(path, monkeypatch):
    """The result of another request, another text, and results that are not there in time."""
    model, tally = Model.load(path, "cpu", threads=1), soak.Tally()
    one, other, *_ = (request for request in soak.pool(model, 30, seed=1) if request.kind == "many beams")
    soak._check(tally, one, one.expected)
    soak._check(tally, one, other.expected)
    soak._check_text(tally, one, one.expected.text + "a", whole=True)
    assert len(tally.wrong) == 2
    monkeypatch.setattr(soak, "PATIENCE", 0)
    asyncio.run(soak.soak(model, [one], 2, tally, lambda quiet: not tally.lost))
    assert tally.lost
