"""Files that change while they are served: answers are those of verified bytes, and operators load the files again."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.digested_models import with_changed_byte, write_digested, write_in_place
from support.servers import HANG_SECONDS, RunningServer, StepGate, write_chat_model
from support.toy_models import END_ID
from support.toy_tasks import TEXT_TASKS
from support.toy_tasks import write as write_task

from tformer_runtime import Model, OutOfMemoryError
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.format import open_files
from tformer_runtime.format.digest import ENTRY_BYTES, Digest
from tformer_serve.logs import JsonFormatter

KEY = {"Authorization": "Bearer operator"}
LONG = {"model": "live", "input": "hello", "suppress_tokens": [END_ID]}


def digest_of(path):
    digest = Digest()
    digest.update(path.read_bytes()[:-ENTRY_BYTES])
    return digest.hexdigest()


def wait_until_gone(reference):
    """Wait until the loop has let go of the task that closed an object, which is the last that refers to it."""
    end = time.monotonic() + HANG_SECONDS
    while reference() is not None:
        assert time.monotonic() < end, "something else refers to it"
        time.sleep(0.01)


def text_of(path):
    with Model.load(path, "cpu") as model:
        return model.generate("hello", suppress_tokens=[END_ID]).text


@pytest.fixture
def watched(monkeypatch):
    """No file is small enough to be mapped from a copy."""
    monkeypatch.setattr(open_files, "MAX_COPIED_BYTES", -1)


@pytest.fixture
def live(tmp_path):
    return write_digested(tmp_path / "live.onnx", seed=5, encoder=False)


@pytest.fixture
def new(tmp_path):
    return write_digested(tmp_path / "new.onnx", seed=6, encoder=False)


@pytest.fixture
def server(live, files):
    with RunningServer({"live": live, "letters": files["letters"]}, admin_keys=("operator",)) as running:
        yield running


@pytest.fixture
def lines(caplog, monkeypatch):
    """Return a function that returns the lines of the log with an event."""
    caplog.set_level(logging.INFO, "tformer_serve")
    formatter = JsonFormatter()
    return lambda event: [
        record for each in caplog.records if (record := json.loads(formatter.format(each)))["event"] == event
    ]


def reload(server, status=200):
    """Ask for a reload, and return name → its outcome, digest and error."""
    answer = server.post("/admin/reload", None, headers=KEY)
    assert answer.status_code == status, answer.text
    return {each["id"]: each for each in answer.json()["data"]}


def answer_of(server, body=LONG):
    answer = server.post("/v1/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["results"][0]["text"]


def shown_digest(server, name="live"):
    with server.http() as client:
        return client.get(f"/v1/models/{name}").json()["tformer"]["digest"]


def test_requests_finish_with_the_old_file_and_new_ones_have_the_new_one(server, live, new, lines):
    old, expected = server.models["live"], {"old": text_of(live), "new": text_of(new)}
    session = weakref.ref(old.model.engine.session._sessions["decode"])
    digests = [digest_of(live), digest_of(new)]
    assert shown_digest(server) == digests[0]
    with StepGate.closed(old.model) as gate, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.post, "/v1/generate", {**LONG, "stream": i == 0}) for i in range(3)]
        server.wait_for("tformer_open_requests", 3)
        gate.wait_until_reached()
        os.replace(new, live)
        outcomes = reload(server)
        assert outcomes["live"] == {
            "id": "live", "object": "model.reload", "outcome": "reloaded", "digest": digests[1],
        }  # fmt: skip
        assert outcomes["letters"]["outcome"] == "unchanged"
        assert answer_of(server) == expected["new"]  # the old ones still wait for their steps
        assert not old.model.closed
        assert not any(answer.done() for answer in answers)
        gate.open()
        streamed, *whole = [answer.result(HANG_SECONDS) for answer in answers]
    pieces = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
    assert "".join(piece.get("text", "") for piece in pieces) == expected["old"]
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert [answer.json()["results"][0]["text"] for answer in whole] == [expected["old"]] * 2
    assert shown_digest(server) == digests[1]
    assert server.metric("tformer_model_info", model="live", digest=digests[1]) == 1
    assert server.metric("tformer_model_info", model="live", digest=digests[0]) == 0
    assert server.metric("tformer_reloads_total", model="live", outcome="reloaded") == 1
    assert [(line["model"], line["outcome"]) for line in lines("reload")] == [
        ("live", "reloaded"), ("letters", "unchanged"),
    ]  # fmt: skip
    assert lines("reload")[0]["digest"] == digests[1]
    server.wait_for_closings()
    assert old.model.closed
    wait_until_gone(session)  # its weights are free, without Python's collector


def test_old_model_leaves_nothing_in_memory(server, live, new):
    os.replace(new, live)
    old = weakref.ref(server.models["live"].model)
    gc.disable()
    try:
        assert answer_of(server)
        reload(server)
        assert answer_of(server)
        server.wait_for_closings()
        wait_until_gone(old)
    finally:
        gc.enable()


def test_reloads_in_a_row_each_see_the_file_of_their_time(server, live, new):
    first = text_of(live)
    shutil.copy(live, live.with_name("first.onnx"))
    second = text_of(new)
    for path, expected in ((new, second), (live.with_name("first.onnx"), first)):
        os.replace(path, live)
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(reload, server) for _ in range(3)]
            outcomes = sorted(answer.result(HANG_SECONDS)["live"]["outcome"] for answer in answers)
        assert outcomes == ["reloaded", "unchanged", "unchanged"]
        assert answer_of(server) == expected


def _remove(live, monkeypatch):
    live.unlink()


def _damage(live, monkeypatch):
    damaged = live.with_name("damaged.onnx")
    damaged.write_bytes(with_changed_byte(live))
    os.replace(damaged, live)


def _other_task(live, monkeypatch):
    name, how = next(iter(TEXT_TASKS.items()))
    os.replace(write_task(live.with_name(f"{name}.onnx"), **how), live)


def _too_large(live, monkeypatch):
    def load(*_, **__):
        raise MemoryError

    os.replace(write_digested(live.with_name("new.onnx"), seed=6, encoder=False), live)
    monkeypatch.setattr(Model, "load", load)


def _refused_memory(live, monkeypatch):
    def load(*_, **__):
        raise OutOfMemoryError("there is not enough memory")

    _too_large(live, monkeypatch)
    monkeypatch.setattr(Model, "load", load)


def _fault(live, monkeypatch):
    def load(*_, **__):
        raise ZeroDivisionError

    _too_large(live, monkeypatch)
    monkeypatch.setattr(Model, "load", load)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_remove, "live.onnx does not exist"),
        (_damage, "live.onnx is damaged, or was changed after its export"),
        (_other_task, "start the server again to serve another kind of model"),
        (_too_large, "there is not enough memory"),
        (_refused_memory, "there is not enough memory"),
        (_fault, "an error that was not foreseen, ZeroDivisionError"),
    ],
)
def test_file_that_cannot_be_served_leaves_the_old_one(server, live, lines, monkeypatch, spoil, sentence):
    expected, digest = text_of(live), digest_of(live)
    spoil(live, monkeypatch)
    failed = reload(server, 500)["live"]
    assert (failed["outcome"], failed["digest"]) == ("failed", digest)
    assert sentence in failed["error"]
    (line,) = [line for line in lines("reload") if line["model"] == "live"]
    assert (line["level"], line["outcome"], line["file"]) == ("error", "failed", str(live))
    assert sentence in line["message"]
    assert ("traceback" in line) == (spoil is _fault)
    assert server.metric("tformer_reloads_total", model="live", outcome="failed") == 1
    assert answer_of(server) == expected
    assert shown_digest(server) == digest
    with server.http() as client:
        assert client.get("/health/ready").status_code == 200


def test_chat_model_without_a_template_is_another_kind(tmp_path, lines):
    path = write_chat_model(tmp_path / "chat.onnx")
    with RunningServer({"chat": path}, admin_keys=("operator",)) as server:
        os.replace(path.with_suffix(".plain.onnx"), path)
        assert "and no /v1/chat/completions" in reload(server, 500)["chat"]["error"]


def test_file_that_is_changed_in_place_is_told_until_it_is_loaded_again(watched, server, live, new, lines):
    changed = new.read_bytes()
    expected = text_of(new)
    assert len(changed) == live.stat().st_size
    write_in_place(live, changed)
    for body in (LONG, {**LONG, "stream": True}):
        answer = server.post("/v1/generate", body)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "model_changed"
        assert error["message"].startswith("live.onnx was changed in place while it was served: replace it by renaming")
    assert lines("model_changed")[0]["file"] == str(live)
    assert answer_of(server, {**LONG, "model": "letters"})
    with server.http() as client:
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "changed", "models": ["live"]})
        assert client.get("/health/live").status_code == 200
        assert reload(server)["live"]["outcome"] == "reloaded"
        assert client.get("/health/ready").status_code == 200
    assert answer_of(server) == expected


def test_small_file_that_is_changed_in_place_stays_until_it_is_loaded_again(server, live, new):
    before, after, changed = text_of(live), text_of(new), new.read_bytes()
    for content in (b"", changed):
        write_in_place(live, content)
        assert answer_of(server) == before
    with server.http() as client:
        assert client.get("/health/ready").status_code == 200
    assert reload(server)["live"]["outcome"] == "reloaded"
    assert answer_of(server) == after


def test_link_that_leads_to_another_file_is_loaded_again(live, new, tmp_path):
    link = tmp_path / "current.onnx"
    link.symlink_to(live)
    with RunningServer({"live": link}, admin_keys=("operator",)) as server:
        for target in (new, live):  # an update, and its return
            (tmp_path / "next.onnx").symlink_to(target)
            os.replace(tmp_path / "next.onnx", link)
            assert reload(server)["live"]["digest"] == digest_of(target)
            assert reload(server)["live"]["outcome"] == "unchanged"
            assert answer_of(server) == text_of(target)


def test_file_that_is_cut_short_does_not_end_the_server(watched, server, live):
    os.truncate(live, 0)
    assert server.post("/v1/generate", LONG).json()["error"]["code"] == "model_changed"
    assert "not a whole ONNX file" in reload(server, 500)["live"]["error"]
    assert server.post("/v1/generate", LONG).json()["error"]["code"] == "model_changed"


def test_stream_of_a_file_that_changes_ends_with_the_error(watched, server, live):
    with StepGate.closed(server.models["live"].model) as gate, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/generate", {**LONG, "stream": True})
        gate.wait_until_reached()
        write_in_place(live, with_changed_byte(live))
        gate.open()
        events = answer.result(HANG_SECONDS).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "model_changed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_model_whose_thread_has_ended_is_loaded_again(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step_or_fail", lambda *_: 1 / 0)
        assert server.post("/v1/generate", LONG).json()["error"]["code"] == "model_failed"
    assert reload(server)["live"]["outcome"] == "reloaded"
    assert answer_of(server)
    with server.http() as client:
        assert client.get("/health/live").status_code == 200


def test_only_operators_may_reload(live):
    with RunningServer({"live": live}, api_keys=("client",), admin_keys=("operator",)) as server:
        for headers in ({}, {"Authorization": "Bearer client"}, {"Authorization": "Bearer operator2"}):
            answer = server.post("/admin/reload", None, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.post("/v1/generate", LONG, headers=KEY).status_code == 401
        assert reload(server)["live"]["outcome"] == "unchanged"
    with RunningServer({"live": live}) as server:
        answer = server.post("/admin/reload", None, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_keys")


def test_full_server_reloads_and_a_stopping_one_does_not(live, new):
    options = {"max_batch_size": 1, "max_queue": 0, "drain_seconds": HANG_SECONDS, "admin_keys": ("operator",)}
    with RunningServer({"live": live}, **options) as server, ThreadPoolExecutor(1) as pool:
        with StepGate.closed(server.models["live"].model) as gate:
            running = pool.submit(server.post, "/v1/generate", LONG)
            gate.wait_until_reached()
            os.replace(new, live)
            assert reload(server)["live"]["outcome"] == "reloaded"
            server.drain()
            answer = server.post("/admin/reload", None, headers=KEY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
            gate.open()
            assert running.result(HANG_SECONDS).status_code == 200
        server.wait_for_end()
