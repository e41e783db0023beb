"""An engine that a worker can run: it answers with the prompt's last id, and misbehaves when it is asked to."""

from __future__ import annotations

import os
import time

from versus.engines import UnavailableError

DIES, FAILS, HANGS, FALLS_SHORT = 13, 14, 15, 16  # prompts of so many tokens


def prepare(folder, shape, precision):
    print("a library tells what it does")
    if precision != "fp32":
        raise UnavailableError(f"no {precision} on CPU")
    return 12


class Engine:
    def __init__(self, folder, shape, precision, threads):
        self.folder = folder

    def run(self, case, inputs):
        print("and again")
        if case.prompt == DIES:
            os._exit(3)
        if case.prompt == HANGS:
            time.sleep(3600)
        if case.prompt == FAILS:
            raise ValueError("no such length\nand more lines")
        count = case.new - (case.prompt == FALLS_SHORT)
        return time.perf_counter(), [[ids[-1]] * count for ids in inputs]

    def score(self, inputs, last):
        return [-1.0] * last * len(inputs)
