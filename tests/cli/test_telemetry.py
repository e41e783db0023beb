"""No command sends anything unasked, looks a name up, or writes under HOME, though its packages do by default.

Each command runs with an empty HOME, under strace where it is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import transformers
from support.toy_models import Toy

from tformer_runtime.base.extras import TELEMETRY_OFF

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "run": "tformer_runtime.cli.main",
    "serve": "tformer_serve.cli",
    "export": "tformer_export.cli",
    "golden": "tformer_export.golden_cli",
}
SENDS = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o"]
ADDRESS = re.compile(r"sa_family=AF_INET6?\b")
LOOPBACK = re.compile(r'inet_addr\("127\.|"::1"')
HANG_SECONDS = 120
IMPORT = "from tformer_runtime.base.extras import import_onnxruntime; import_onnxruntime()"
NATIVE = f"{IMPORT}; import ctypes; f = ctypes.CDLL(None).getenv; f.restype = ctypes.c_char_p; print(f(%r).decode())"


@pytest.fixture
def environment(tmp_path):
    """Return the environment of a process that has an empty HOME and no setting of telemetry."""
    (tmp_path / "home").mkdir()
    kept = {n: v for n, v in os.environ.items() if n not in TELEMETRY_OFF and not n.startswith(("XDG_", "HF_"))}
    paths = [ROOT, ROOT / "runtime", ROOT / "models", kept.get("PYTHONPATH")]
    path = os.pathsep.join(str(p) for p in paths if p)
    return {**kept, "HOME": str(tmp_path / "home"), "PYTHONPATH": path}


@pytest.fixture
def traced(tmp_path, environment):
    """Return a function that starts a command of the package, and one that checks what it did until its end."""
    trace = tmp_path / "trace"

    def start(name, *arguments):
        command = [sys.executable, "-c", f"from {COMMANDS[name]} import main; main()", *map(str, arguments)]
        if name == "run":
            command[2] = f"from {COMMANDS[name]} import run; run()"
        tracer = [*SENDS, str(trace)] if shutil.which("strace") else []
        return subprocess.Popen([*tracer, *command], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def check():
        assert [str(path) for path in (tmp_path / "home").rglob("*")] == []
        if trace.exists():
            sent = [line for line in trace.read_text().splitlines() if ADDRESS.search(line)]
            assert [line for line in sent if not LOOPBACK.search(line)] == []

    return start, check


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Toy(seed=27).write(tmp_path_factory.mktemp("model") / "toy.onnx")


def finished(process):
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err


def test_run_and_golden_send_and_write_nothing(traced, model, tmp_path):
    start, check = traced
    for name, *arguments in (
        ("run", model, "abc"),
        ("golden", model, "-o", "toy.json"),
        ("golden", model, "--check", "toy.json"),
    ):
        finished(start(name, *arguments))
        check()


def test_export_of_a_local_folder_sends_and_writes_nothing(traced, tmp_path):
    """The folder's config names a hub id, and transformers looks some of its files up where they are missing."""
    start, check = traced
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=16, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "someone" / "model")
    finished(start("export", "someone/model", "-o", "out.onnx"))
    check()


def test_server_sends_and_writes_nothing(traced, model):
    start, check = traced
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start("serve", model, "--port", port)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            try:
                assert (
                    httpx.post(
                        f"http://127.0.0.1:{port}/v1/generate", json={"model": "toy", "input": "abc"}
                    ).status_code
                    == 200
                )
                break
            except httpx.TransportError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        child = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(child[0]) if child else process.pid, signal.SIGTERM)
    finished(process)
    check()


@pytest.mark.parametrize("variable", TELEMETRY_OFF)
def test_switch_reaches_native_code_and_a_setting_of_the_user_stays(variable, environment):
    for setting, expected in (({}, TELEMETRY_OFF[variable]), ({variable: "user"}, "user")):
        program = [sys.executable, "-c", NATIVE % variable.encode()]
        done = subprocess.run(program, env={**environment, **setting}, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_trace_sees_a_name_that_is_asked_for(traced, tmp_path, environment):
    """The check itself: it fails for a process that writes under HOME or sends a datagram."""
    _, check = traced
    environment["HOME"] = str(tmp_path / "home")
    (tmp_path / "home" / "deviceid").write_text("x")
    with pytest.raises(AssertionError, match="deviceid"):
        check()
    if not shutil.which("strace"):
        pytest.skip("strace is not installed: only files are checked")
    (tmp_path / "home" / "deviceid").unlink()
    asks = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 53))"
    subprocess.run([*SENDS, tmp_path / "trace", sys.executable, "-c", asks], env=environment, check=False)
    with pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        check()
