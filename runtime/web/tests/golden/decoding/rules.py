"""Scores after the rules of the Python runtime, for random options and rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from golden_file import GoldenFile

from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.rules.logit_rules import forbidden_ids, make_rules, read_length_alone
from tformer_runtime.format.manifest import SpecialTokens

CASES, VOCABULARY = 600, 24


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Return some options. Most cases have a few of them, so that the order of rules matters."""

    def ids(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    all_options = {
        "logit_bias": [[token, float(rng.normal())] for token in dict.fromkeys(ids(4))],
        "repetition_penalty": float(rng.choice([0.7, 1.3, 2.0])),
        "presence_penalty": float(rng.choice([0.0, 0.3, -0.7])),
        "frequency_penalty": float(rng.choice([0.0, 0.1, 1.1])),
        "no_repeat_ngram_size": int(rng.integers(1, 4)),
        "bad_words_ids": [ids(int(rng.integers(1, 4))) for _ in range(12)],
        "min_new_tokens": int(rng.integers(0, 5)),
        "forced_bos_token_id": int(rng.integers(0, VOCABULARY)),
        "forced_prefix": ids(1),
        "suppress_tokens": ids(5),
        "begin_suppress_tokens": ids(5),
    }
    chosen = {name: value for name, value in all_options.items() if rng.random() < 0.3}
    if chosen.get("forced_bos_token_id") in chosen.get("suppress_tokens", ()):
        del chosen["suppress_tokens"]
    return chosen


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


golden = GoldenFile()
cases = []
rng = np.random.default_rng(21)
for _ in range(CASES):
    options = random_options(rng)
    ends = rng.integers(0, VOCABULARY + 4, rng.integers(0, 3)).tolist()
    rules = make_rules(
        Settings(**{n: tuples(v) for n, v in options.items()}), SpecialTokens((), tuple(ends)), VOCABULARY
    )
    prompt = int(rng.integers(0, 5))
    ids = rng.integers(0, 4 if rng.random() < 0.4 else VOCABULARY, prompt + rng.integers(0, 12))
    ids[:prompt] = rng.integers(0, VOCABULARY + 8, prompt)  # the step input may have ids without scores
    scores = rng.normal(0, 3, VOCABULARY).astype(np.float32)
    changed = scores.copy()
    for rule in rules:
        rule(ids, prompt, changed)
    forbidden = forbidden_ids(rules, ids, prompt)
    cases.append(
        {
            "options": options,
            "ends": ends,
            "prompt": prompt,
            "ids": ids.tolist(),
            "scores": golden.array(scores),
            "changed": golden.array(changed),
            "forbidden": None if forbidden is None else forbidden.tolist(),
            "length_alone": read_length_alone(rules),
            "rules": [type(rule).__name__ for rule in rules],
        }
    )
golden.write(cases)
