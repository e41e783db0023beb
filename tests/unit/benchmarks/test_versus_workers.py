"""Workers: an engine in another process answers requests, and each of its failures raises PeerError in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import fake_engine
import pytest
from versus.client import Peer, PeerError, Worker, loaded
from versus.shapes import ROWS, Case

FAKE = Peer("fake", "fake_engine")
START_TIMEOUT_SECONDS = 3600.0  # a worker starts earlier on a busy machine, too


@pytest.fixture
def model(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    return {"shape": ROWS[0].shape.__dict__, "folder": str(tmp_path), "precision": "fp32"}


def test_replies_are_separate_from_the_output_of_libraries(model, tmp_path):
    case = Case(2, 3, 4)
    with loaded(FAKE, model, 1, tmp_path / "log", START_TIMEOUT_SECONDS) as worker:
        assert worker.ask("prepare", **model) == {"bytes": 12}
        reply = worker.ask("run", case=case.to_dict(), inputs=[[7, 8, 9], [4, 5, 6]], keep=True)
        assert reply["result"] == [[9] * 4, [6] * 4]
        assert 0 < reply["first"] <= reply["seconds"]
        again = worker.ask("run", case=case.to_dict(), inputs=[[7], [8]], min_seconds=0.05)
        assert set(again) == {"seconds", "first", "processor"}
        assert 0 < again["processor"] < worker.ask("processor")["seconds"]
        assert worker.ask("score", inputs=[[1, 2, 3]], last=2) == {"result": [-1.0, -1.0]}
        assert worker.ask("memory")["peak"] > 1e6
    assert "output of a library" in (tmp_path / "log").read_text()


def test_worker_continues_after_an_error_of_its_engine(model, tmp_path):
    with loaded(FAKE, model, 1, tmp_path / "log", START_TIMEOUT_SECONDS) as worker:
        with pytest.raises(PeerError, match=r"^no int8 on CPU$"):
            worker.ask("prepare", **{**model, "precision": "int8"})
        failing = Case(1, fake_engine.RAISES, 2).to_dict()
        with pytest.raises(PeerError, match=r"^ValueError: no such length$"):
            worker.ask("run", case=failing, inputs=[[1]])
        assert worker.ask("run", case=Case(1, 1, 1).to_dict(), inputs=[[1]])["seconds"] > 0


def test_wrong_number_of_tokens_is_an_error(model, tmp_path):
    with loaded(FAKE, model, 1, tmp_path / "log", START_TIMEOUT_SECONDS) as worker:
        short = Case(1, fake_engine.GENERATES_TOO_FEW, 3).to_dict()
        with pytest.raises(PeerError, match=r"it generated \[2\] tokens, not 3"):
            worker.ask("run", case=short, inputs=[[1]])


@pytest.mark.parametrize(
    ("prompt", "message"), [(fake_engine.EXITS, "ended with 3"), (fake_engine.HANGS, "no answer within")]
)
def test_ended_or_hanging_worker_fails_this_request_and_later_ones(model, tmp_path, prompt, message):
    with loaded(FAKE, model, 1, tmp_path / "log", START_TIMEOUT_SECONDS) as worker:
        worker.timeout = 1 if prompt == fake_engine.HANGS else START_TIMEOUT_SECONDS
        with pytest.raises(PeerError, match=message):
            worker.ask("run", case=Case(1, prompt, 1).to_dict(), inputs=[[1]])
        with pytest.raises(PeerError, match="its process"):
            worker.ask("memory")


def test_peer_that_is_not_installed_is_an_error(tmp_path):
    with pytest.raises(PeerError, match=r"not installed: make bench"):
        Worker(Peer("absent", "fake_engine", ".venv-of-nobody"), 1, tmp_path / "log")
    missing_module = pytest.raises(PeerError, match="No module named 'no_such_engine'")
    with Worker(Peer("absent", "no_such_engine"), 1, tmp_path / "log") as worker, missing_module:
        worker.ask("memory")
