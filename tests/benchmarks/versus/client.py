"""The side of a worker in the main process: start it, send requests, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parents[1]


class PeerError(Exception):
    """A peer that is not installed, cannot do something, or ended; the text is the reason."""


@dataclass(frozen=True)
class Peer:
    """An engine.

    module: its module for the worker. environment: folder of its virtual environment; None: the present one.
    """

    name: str
    module: str
    environment: str | None = None

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else ROOT / self.environment / "bin" / "python"


OURS = Peer("tformer", "versus.engines.ours")
FIXED = Peer("tformer, fixed scales", "versus.engines.fixed")
VARIANTS = (Peer("tformer, for latency", "versus.engines.latency"), FIXED)
PEERS = (
    OURS,
    *VARIANTS,
    Peer("CTranslate2", "versus.engines.ctranslate"),
    Peer("onnxruntime-genai", "versus.engines.genai", ".venv-genai"),
    Peer("optimum-onnx", "versus.engines.optimum_onnx", ".venv-optimum"),
    Peer("llama.cpp", "versus.engines.llama", ".venv-llama"),
    Peer("llama.cpp, Q4_K_M", "versus.engines.llama_k", ".venv-llama"),
    Peer("OpenVINO", "versus.engines.open_vino", ".venv-openvino"),
    Peer("openvino-genai", "versus.engines.openvino_genai", ".venv-openvino"),
    Peer("transformers", "versus.engines.eager"),
    Peer("torch.compile", "versus.engines.compiled"),
)
SLOW = PEERS[-1]  # it compiles each case for minutes
BARE = Peer("bare onnxruntime", "versus.engines.bare")  # in starts alone
SOURCE = Peer("source", "versus.engines.source")
RATES = Peer("versus.engines.rates", "versus.engines.rates")


def require_installed(peer: Peer) -> None:
    if not peer.python.exists():
        raise PeerError(f"not installed: make bench makes {peer.environment}")


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of an engine's process."""
    from tformer_runtime.base.extras import disable_telemetry  # the environments of other engines lack it

    disable_telemetry()
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    # Installed packages have bytecode; tformer, in the repository, needs it too
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


class Worker:
    """A process with one engine, as a context manager."""

    def __init__(self, peer: Peer, threads: int, log: Path, timeout: float = 1800.0) -> None:
        require_installed(peer)
        self.peer, self.timeout = peer, timeout
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [str(peer.python), "-m", "versus.worker", peer.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(threads),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._read = b""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a request.

        PeerError if it is an error, does not come in time, or the process has ended.
        """
        line = json.dumps({"do": do, **arguments}) + "\n"
        try:
            self._in.write(line.encode())
            self._in.flush()
        except (BrokenPipeError, ValueError) as error:
            raise PeerError(self._ended()) from error
        reply = json.loads(self._line())
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _line(self) -> bytes:
        until = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while b"\n" not in self._read:
                left = until - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.close()
                    raise PeerError(f"no answer within {self.timeout:.0f} s")
                piece = os.read(self._out.fileno(), 1 << 20)
                if not piece:
                    raise PeerError(self._ended())
                self._read += piece
        line, self._read = self._read.split(b"\n", 1)
        return line

    def _ended(self) -> str:
        self.close()
        status = self._process.returncode
        if status < 0:
            return f"its process was killed by signal {-status}" + " (for want of memory?)" * (status == -9)
        return f"its process ended with {status}"

    def close(self) -> None:
        for pipe in (self._in, self._out, self._log):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def loaded(peer: Peer, model: Mapping[str, Any], threads: int, log: Path, timeout: float) -> Worker:
    """Return a worker with a loaded model. model: shape, folder and precision, as arguments of the worker."""
    worker = Worker(peer, threads, log, timeout)
    try:
        worker.ask("load", **model, threads=threads)
    except BaseException:
        worker.close()
        raise
    return worker
