"""One engine in a process of its own: a line of JSON in, a line of JSON out.

    python -m versus.worker MODULE        versus.engines.ours, or another module with `prepare` and `Engine`

    {"do": "prepare", "shape": …, "folder": …, "precision": …}     → {"bytes": of the files}
    {"do": "load", …the same…, "threads": 2}                       → {"seconds": …}
    {"do": "run", "case": …, "inputs": [[ids], …], "min_seconds": 0.25}  → {"seconds": …, "first": …, "processor": …}
        with "keep": true                                          → {…, "result": [[…], …]}
    {"do": "score", "inputs": [[ids], …], "last": 32}              → {"result": log-probabilities of the last ids}
    {"do": "versions"}                                             → {package: version}
    {"do": "memory"}                                               → {"peak": bytes, "now": bytes}
    {"do": "processor"}                                            → {"seconds": of the process since its start}

min_seconds: a request is repeated until this many seconds have passed, FEWEST times at least, and the median is the
answer; the first run, which wakes the engine, does not count then. first: seconds to the first token, None where an
engine does not report it. processor: the processor time of all threads during the request, with that of threads that
spin. An error is answered with {"error": sentence}. Every engine, tformer included, runs like
this: no threads spin in another engine's process, and memory is its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from versus.engines import UnavailableError
from versus.shapes import Case, shape_of

PACKAGES = (
    "tformer", "ctranslate2", "onnxruntime", "onnxruntime-gpu", "onnxruntime-genai", "optimum-onnx", "llama-cpp-python",
    "openvino", "openvino-genai", "torch", "transformers",
)  # fmt: skip


FEWEST = 3  # so that one disturbed run is not the median


class Worker:
    def __init__(self, module: Any) -> None:
        self.module = module
        self.engine: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return getattr(self, f"_{request.pop('do')}")(**request)
        except UnavailableError as error:
            return {"error": str(error)}
        except Exception as error:  # any error: the other engines continue
            if os.environ.get("VERSUS_TRACE"):
                raise
            lines = str(error).strip().splitlines() or [""]
            return {"error": f"{type(error).__name__}: {lines[0][:300]}"}

    def _prepare(self, shape: dict[str, Any], folder: str, precision: str) -> dict[str, Any]:
        return {"bytes": self.module.prepare(Path(folder), shape_of(shape), precision)}

    def _load(self, shape: dict[str, Any], folder: str, precision: str, threads: int) -> dict[str, Any]:
        begun = time.perf_counter()
        self.engine = self.module.Engine(Path(folder), shape_of(shape), precision, threads)
        return {"seconds": time.perf_counter() - begun}

    def _run(
        self, case: dict[str, int], inputs: list[list[int]], min_seconds: float = 0.0, keep: bool = False
    ) -> dict[str, Any]:
        reply, result = self._once(Case(**case), inputs)
        if reply["seconds"] < min_seconds:
            counted = []
            while len(counted) < FEWEST or sum(one["seconds"] for one in counted) < min_seconds:
                reply, result = self._once(Case(**case), inputs)
                counted.append(reply)
            reply = sorted(counted, key=lambda one: one["seconds"])[len(counted) // 2]
        return {**reply, "result": result} if keep else reply

    def _once(self, case: Case, inputs: list[list[int]]) -> tuple[dict[str, Any], list[Any]]:
        begun, processor = time.perf_counter(), time.process_time()
        first, result = self.engine.run(case, inputs)
        seconds, processor = time.perf_counter() - begun, time.process_time() - processor
        lengths = {len(row) for row in result} if case.new else {0}
        if lengths != {case.new}:
            raise UnavailableError(f"it generated {sorted(lengths)} tokens, not {case.new}")
        first = None if first is None else first - begun
        return {"seconds": seconds, "first": first, "processor": processor}, result

    def _score(self, inputs: list[list[int]], last: int) -> dict[str, Any]:
        if not hasattr(self.engine, "score"):
            raise UnavailableError("it has no call for it")
        return {"result": self.engine.score(inputs, last)}

    def _measure(self, **arguments: Any) -> dict[str, Any]:
        return self.module.measure(**arguments)

    def _versions(self) -> dict[str, Any]:
        versions = {}
        for name in PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        return versions

    def _memory(self) -> dict[str, Any]:
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
        return {"peak": int(sizes["VmHWM"]) * 1024, "now": int(sizes["VmRSS"]) * 1024}

    def _processor(self) -> dict[str, Any]:
        return {"seconds": time.process_time()}


def serve(worker: Worker, lines: TextIO, replies: TextIO) -> None:
    for line in lines:
        replies.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        replies.flush()


def main() -> None:
    # Output of the engines' libraries must not mix with the answers on standard output.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    try:
        module = importlib.import_module(sys.argv[1])
    except Exception as error:
        for _ in sys.stdin:
            replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            replies.flush()
        return
    serve(Worker(module), sys.stdin, replies)


if __name__ == "__main__":
    main()
