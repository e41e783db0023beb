"""A model whose thread has ended: requests fail with 500, and the health checks say that a new start heals it.

The process of chat templates is replaced instead.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from support.servers import RunningServer

from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.preprocess import chat_template

BODY = {"model": "letters", "input": "hello", "max_new_tokens": 4}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_model_that_has_failed_is_told_to_clients_and_to_health_checks(files, monkeypatch):
    with RunningServer({"letters": files["letters"]}) as server, server.http() as client:
        assert server.post("/v1/generate", BODY).status_code == 200
        assert client.get("/health/live").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "step_or_fail", lambda *_: 1 / 0)
            answers = [server.post("/v1/generate", BODY)]
        answers += [server.post("/v1/generate", BODY)]
        for answer in answers:
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "model_failed"
        stream = server.post("/v1/generate", {**BODY, "stream": True})
        assert (stream.status_code, stream.json()["error"]["code"]) == (500, "model_failed")
        for path in ("/health/live", "/health/ready"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()) == (503, {"status": "failed", "models": ["letters"]})
        assert client.get("/metrics").status_code == 200


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
@pytest.mark.parametrize("stream", [False, True])
def test_chat_is_answered_although_the_process_of_templates_was_killed(server, stream):
    body = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": stream}
    for _ in range(3):
        assert server.post("/v1/chat/completions", body).status_code == 200
        os.kill(chat_template._worker._process.pid, signal.SIGKILL)
        assert server.post("/v1/chat/completions", body).status_code == 200
