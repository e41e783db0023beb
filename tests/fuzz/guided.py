"""The same as `fuzz.child`, but atheris keeps cases that reach new lines of the product, and changes those further."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import atheris

from fuzz.child import Recorder, limit_memory, read_pool, take_output


def main() -> None:
    name, seed, first, cases, seconds, pool_path = sys.argv[2:]
    write = take_output()
    with atheris.instrument_imports(include=["tformer_runtime", "tformer_export"], enable_loader_override=False):
        from fuzz.targets import TARGETS
    target = TARGETS[name]
    recorder = Recorder(target, Path(sys.argv[1]), write)
    pool = read_pool(target, Path(pool_path))
    recorder.warm_up(int(first), pool[0])
    limit_memory()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-pool-"))
    for number, case in enumerate(pool):
        (folder / str(number)).write_bytes(case)
    end, number = time.monotonic() + float(seconds), int(first)

    def run_one(case: bytes) -> None:
        nonlocal number
        recorder.run(number, case)
        number += 1
        if number >= int(first) + int(cases) or time.monotonic() >= end:
            recorder.end()
            os._exit(0)  # libFuzzer has no other way out

    def change(case: bytes, _: int, seed: int) -> bytes:
        return target.changed(case, Random(seed))

    options = [f"-seed={int(seed) % 2**31 + 1}", "-rss_limit_mb=0", "-timeout=0", "-max_len=1048576", "-detect_leaks=0"]
    options.append("-mutate_depth=1")  # a change has several parts as it is
    atheris.Setup([sys.argv[0], *options, str(folder)], run_one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
