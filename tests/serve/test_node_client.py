"""npm's `openai` client: answers equal those of `Model`. `make node-client` installs it; otherwise it is skipped."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.served_tasks import audio_file
from support.servers import HANG_SECONDS, RunningServer

SCRIPT = Path(__file__).with_name("node_client.mjs")
FOLDER = Path(__file__).resolve().parents[2] / "build" / "node"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None or not (FOLDER / "node_modules" / "openai").is_dir(), reason="make node-client")
def test_answers_equal_those_of_the_model(files, task_files, references, task_models, tmp_path):
    (tmp_path / "a.wav").write_bytes(audio_file(2.0))
    with RunningServer({"chat": files["chat"], **task_files}) as server:
        command = [NODE, SCRIPT, FOLDER, server.url, tmp_path / "a.wav"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    model = references["chat"]
    expected = model.generate(model.prompt([{"role": "user", "content": "the oil"}]), max_new_tokens=12)
    assert answers["models"] == ["chat", *task_files]
    assert answers["chat"] == answers["stream"] == expected.text
    assert answers["usage"]["completion_tokens"] == len(expected.token_ids)
    assert list(json.loads(answers["json"])) == ["a"]
    np.testing.assert_allclose(answers["vectors"], task_models["vector"].embed(["a day", "bad"]), atol=2e-6)
    transcription = task_models["audio"].transcribe(audio_file(2.0), timestamps=True)
    assert answers["audio"]["text"] == transcription.text
    assert [word["word"] for word in answers["audio"]["words"]] == [word.text for word in transcription.segments]
    assert answers["error"][0] == 400
    assert "it cannot embed; send it to /v1/completions" in answers["error"][1]
