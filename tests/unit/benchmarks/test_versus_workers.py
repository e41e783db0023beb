"""An engine in a process of its own answers what it is asked, and whatever happens there is told in a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import fake_engine
import pytest
from versus.client import Peer, PeerError, Worker, loaded
from versus.shapes import ROWS, Case

FAKE = Peer("fake", "fake_engine")
LONG = 3600.0  # seconds that no worker needs to start, on a busy machine either


@pytest.fixture
def model(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    return {"shape": ROWS[0].shape.__dict__, "folder": str(tmp_path), "precision": "fp32"}


def test_answers_are_whole_whatever_libraries_print(model, tmp_path):
    case = Case(2, 3, 4)
    with loaded(FAKE, model, 1, tmp_path / "log", LONG) as worker:
        assert worker.ask("prepare", **model) == {"bytes": 12}
        reply = worker.ask("run", case=case.to_dict(), inputs=[[7, 8, 9], [4, 5, 6]], keep=True)
        assert reply["result"] == [[9] * 4, [6] * 4]
        assert 0 < reply["first"] <= reply["seconds"]
        again = worker.ask("run", case=case.to_dict(), inputs=[[7], [8]], least=0.05)
        assert set(again) == {"seconds", "first"}
        assert worker.ask("score", inputs=[[1, 2, 3]], last=2) == {"result": [-1.0, -1.0]}
        assert worker.ask("memory")["peak"] > 1e6
    assert "a library tells what it does" in (tmp_path / "log").read_text()


def test_what_an_engine_cannot_do_is_its_own_sentence_and_the_worker_goes_on(model, tmp_path):
    with loaded(FAKE, model, 1, tmp_path / "log", LONG) as worker:
        with pytest.raises(PeerError, match=r"^no int8 on CPU$"):
            worker.ask("prepare", **{**model, "precision": "int8"})
        wrong = Case(1, fake_engine.FAILS, 2).to_dict()
        with pytest.raises(PeerError, match=r"^ValueError: no such length$"):
            worker.ask("run", case=wrong, inputs=[[1]])
        assert worker.ask("run", case=Case(1, 1, 1).to_dict(), inputs=[[1]])["seconds"] > 0


def test_a_wrong_number_of_tokens_is_no_measurement(model, tmp_path):
    with loaded(FAKE, model, 1, tmp_path / "log", LONG) as worker:
        short = Case(1, fake_engine.FALLS_SHORT, 3).to_dict()
        with pytest.raises(PeerError, match=r"it generated \[2\] tokens, not 3"):
            worker.ask("run", case=short, inputs=[[1]])


@pytest.mark.parametrize(
    ("prompt", "said"), [(fake_engine.DIES, "ended with 3"), (fake_engine.HANGS, "no answer within")]
)
def test_a_worker_that_dies_or_hangs_is_told_of_now_and_later(model, tmp_path, prompt, said):
    with loaded(FAKE, model, 1, tmp_path / "log", LONG) as worker:
        worker.timeout = 1 if prompt == fake_engine.HANGS else LONG
        with pytest.raises(PeerError, match=said):
            worker.ask("run", case=Case(1, prompt, 1).to_dict(), inputs=[[1]])
        with pytest.raises(PeerError, match="its process"):
            worker.ask("memory")


def test_a_peer_that_is_not_installed(tmp_path):
    with pytest.raises(PeerError, match=r"not installed: make bench"):
        Worker(Peer("absent", "fake_engine", ".venv-of-nobody"), 1, tmp_path / "log")
    missing = pytest.raises(PeerError, match="No module named 'no_such_engine'")
    with Worker(Peer("absent", "no_such_engine"), 1, tmp_path / "log") as worker, missing:
        worker.ask("memory")
