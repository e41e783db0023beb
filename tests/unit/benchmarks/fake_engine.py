"""An engine for a worker process: it repeats the last id of the prompt, and fails for some prompt lengths."""

from __future__ import annotations

import os
import time

from versus.engines import UnavailableError

# Prompt lengths, in tokens, for which the engine fails.
EXITS, RAISES, HANGS, GENERATES_TOO_FEW = 13, 14, 15, 16


def prepare(folder, shape, precision):
    print("output of a library")
    if precision != "fp32":
        raise UnavailableError(f"no {precision} on CPU")
    return 12


class Engine:
    def __init__(self, folder, shape, precision, threads):
        self.folder = folder

    def run(self, case, inputs):
        print("more output of a library")
        if case.prompt == EXITS:
            os._exit(3)
        if case.prompt == HANGS:
            time.sleep(3600)
        if case.prompt == RAISES:
            raise ValueError("no such length\nand more lines")
        num_tokens = case.new - (case.prompt == GENERATES_TOO_FEW)
        return time.perf_counter(), [[ids[-1]] * num_tokens for ids in inputs]

    def score(self, inputs, last):
        return [-1.0] * last * len(inputs)
