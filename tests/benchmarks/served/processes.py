"""Processes of servers on a core of their own, with their processor time and memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from versus.client import ROOT, environment

from served.load import MAX_CONNECTIONS

HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 60.0
NO_VARIABLES: Mapping[str, str] = {}


class ServerError(Exception):
    """A server that does not start."""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        return int(bound.getsockname()[1])


def pin(core: int | None) -> None:
    """Keep this process and its later children on a core. None leaves it where it is."""
    if core is not None:
        os.sched_setaffinity(0, {core})


class Server:
    """A server in a process, as a context manager."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        ready: str,
        core: int | None,
        log: Path,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        """ready: a path that answers 200 as soon as the server is ready. core: of all its threads. variables: of it."""
        self.name, self.port, self._ready = name, port, ready
        self._log = log.open("wb")
        self._log_path = log
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**environment(1), **variables},
            preexec_fn=lambda: pin(core),
        )
        self._info = psutil.Process(self._process.pid)

    def __enter__(self) -> Server:
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        ends_at = time.monotonic() + START_SECONDS
        while time.monotonic() < ends_at:
            if self._process.poll() is not None:
                break
            if self._is_ready():
                return
            time.sleep(0.1)
        lines = self._log_path.read_text(errors="replace").splitlines()
        raise ServerError(f"{self.name} does not start: {lines[-1] if lines else 'it says nothing'}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}{self._ready}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # such as one of urllib
            return False

    def processor(self) -> float:
        """Return the processor time of the process and of its children so far."""
        total = 0.0
        for process in [self._info, *self._info.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def resident(self) -> int:
        """Return the resident bytes of the process, without its children."""
        return int(self._info.memory_info().rss)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> int | None:
        """End the server as an orchestrator does. Return its exit status."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        return self._process.returncode


def tformer_server(
    path: Path,
    core: int | None,
    log: Path,
    options: Sequence[str] = (),
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Server:
    """Return `tformer-serve` of a file, which clients call "model"."""
    port = free_port()
    command = [sys.executable, "-m", "tformer_serve.cli", f"model={path}", "--port", str(port)]
    command += ["--device", "cpu", "--threads", "1", *options]
    return Server("tformer-serve", command, port, "/health/ready", core, log, variables)


def http_floor(events: int, core: int | None, log: Path) -> Server:
    """Return a server of FastAPI that computes nothing. events: of a stream."""
    port = free_port()
    command = [sys.executable, "-m", "served.http_floor", str(port), str(-1 if core is None else core), str(events)]
    return Server("tformer-serve", command, port, "/health/ready", core, log)


def llama_server(program: Path, path: Path, rows: int, length: int, core: int | None, log: Path) -> Server:
    """Return llama.cpp's server with a cache for each row, in the precision of the weights."""
    port = free_port()
    command = [str(program), "--model", str(path), "--host", HOST, "--port", str(port)]
    command += ["--threads", "1", "--threads-batch", "1", "--parallel", str(rows), "--ctx-size", str(rows * length)]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--no-webui"]
    command += ["--kv-unified", "--cache-ram", "0", "--threads-http", str(2 * MAX_CONNECTIONS)]
    return Server("llama-server", command, port, "/health", core, log)


def gguf_file(source: Path, path: Path) -> Path:
    """Return a file for llama.cpp's server, which is written once. source: a transformers folder."""
    if not path.exists():
        python = ROOT / ".venv-llama" / "bin" / "python"
        if not python.exists():
            raise ServerError(f"llama-server needs a GGUF file: make bench makes {python.parents[1].name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        command = [str(python), "-m", "versus.engines.gguf_weights", str(source), str(part)]
        done = subprocess.run(command, env=environment(1), capture_output=True, text=True)
        if done.returncode:
            raise ServerError(f"no GGUF file: {done.stderr.strip().splitlines()[-1]}")
        part.rename(path)
    return path


def find_llama_server(named: Path | None) -> Path | None:
    """Return the program: the named one, or one on the path."""
    found = named or (Path(which) if (which := shutil.which("llama-server")) else None)
    return found.absolute() if found is not None and found.exists() else None
