import importlib
import numpy as np
import torch
from catalogue import *
import glob, os
CASES = []
for f in sorted(glob.glob(os.path.dirname(__file__) + "/*_style*.py")):
    CASES += importlib.import_module(os.path.basename(f)[:-3]).CASES

PROMPTS, SOURCES, STEPS = (4, 9, 1, 6), (7, 2, 12, 5), 4

def draw(seed, lengths):
    random = np.random.default_rng(seed)
    return [random.integers(END + 1, VOCABULARY, length) for length in lengths]

def staged_error(case, staged):
    sources = None if len(case.inputs) == 1 else draw(1, SOURCES)
    rows = draw(2, tuple(n + STEPS for n in PROMPTS))
    counts = np.array(PROMPTS)
    tokens = np.full((len(rows), counts.max()), PAD)
    for i, row in enumerate(rows):
        tokens[i, : counts[i]] = row[: counts[i]]
    state = staged.start(sources and {case.inputs[0]: sources}, len(rows))
    logits = state.step(tokens, counts)
    found = [[*logits[i, : counts[i]]] for i in range(len(rows))]
    for step in range(STEPS):
        logits = state.step(np.array([[row[n + step]] for row, n in zip(rows, PROMPTS)]), np.ones(len(rows), int))
        for i in range(len(rows)):
            found[i].append(logits[i, 0])
    worst = 0
    for i, (row, values) in enumerate(zip(rows, found)):
        expected = case.logits(sources and sources[i], row)
        worst = max(worst, np.abs(np.stack(values) - expected).max() / np.ptp(expected))
    return worst
