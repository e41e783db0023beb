"""Hypotheses of the Python runtime's searches, with logits that a table has for each hash of the ids so far."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from golden_file import GoldenFile

from tformer_runtime.decoding.beam_search import BeamSearch
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.rules.logit_rules import make_rules
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.decoding.token_search import TokenSearch
from tformer_runtime.format.manifest import SpecialTokens

STATES = 61  # rows of a table
golden = GoldenFile()
rng = np.random.default_rng(91)


def random_options(beams: bool) -> dict[str, Any]:
    """Return options that may be combined."""
    options: dict[str, Any] = {"length_penalty": float(rng.choice([-1.0, -1.0, 0.0, 0.5, 1.0, 2.0]))}
    if beams:
        options["num_beams"] = int(rng.choice([2, 3, 3, 4, 6]))
        options["early_stopping"] = [False, True, "never", "never"][rng.integers(4)]
        options["num_return_sequences"] = options["num_beams"] if rng.random() < 0.5 else 1
        if rng.random() < 0.5:
            options["patience"] = float(rng.choice([1.0, 1.25, 1.5, 3.0]))
        if rng.random() < 0.3:
            options["num_beam_groups"] = 2 if options["num_beams"] % 2 == 0 else 3
            options["diversity_penalty"] = float(rng.choice([0.3, 2.0]))
    elif rng.random() < 0.7:
        options |= {"temperature": float(rng.choice([0.5, 1.0, 3.0])), "seed": int(rng.integers(2**40))}
        options["num_return_sequences"] = int(rng.integers(1, 4))
        if rng.random() < 0.5:
            options["top_k"] = 5
        if rng.random() < 0.5:
            options["top_p"] = 0.8
    rules = {
        "min_new_tokens": int(rng.integers(1, 4)),
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.4,
        "suppress_tokens": [3, 4],
        "bad_words_ids": [[5], [6, 7]],
        "logit_bias": [[8, 1.5]],
        "frequency_penalty": 0.5,
    }
    options |= {name: value for name, value in rules.items() if rng.random() < 0.15}
    if rng.random() < 0.3:
        options["top_logprobs"] = int(rng.integers(1, 4))
    return options


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def stops(ids: Sequence[int]) -> bool:
    """Return whether a text has the stop string: two ids of a certain sum."""
    return any((one + other) % 13 == 5 for one, other in pairwise(ids))


def stop_checker() -> Any:
    ids: list[int] = []

    def has_stop_string(token: int) -> bool:
        ids.append(token)
        return stops(ids)

    return has_stop_string


def finish(search: Any, tasks: list[SequenceTask], table: np.ndarray) -> None:
    """Run a search to its end. The rows change their places after each step."""
    search.add(tasks)
    states = np.arange(len(tasks))
    while search.width:
        parents, tokens = search.advance(table[states])
        states = (states[parents] * 31 + tokens * 7 + 1) % STATES
        if search.width:
            search.renumber(np.arange(len(states))[::-1].copy())
            states = states[::-1]


cases: list[dict[str, Any]] = []
for number in range(500):
    vocabulary = int(rng.integers(12, 40)) if number % 30 else 1500
    options = random_options(number % 2 == 0)
    settings = Settings(**{name: tuples(value) for name, value in options.items()})
    ends = rng.integers(0, vocabulary, rng.integers(1, 3)).tolist()
    stopping = rng.random() < 0.2
    table = rng.normal(0, rng.choice([0.5, 1.5, 4]), (STATES, vocabulary)).astype(np.float32)
    table[:, ends] += rng.choice([-1, 0, 2, 5])
    prompts = [rng.integers(0, vocabulary, rng.integers(1, 4)) for _ in range(rng.integers(1, 4))]
    max_tokens = [int(rng.integers(3, 14)) for _ in prompts]
    tasks = [
        SequenceTask(
            index,
            prompt,
            limit,
            settings,
            tuple(ends),
            make_rules(settings, SpecialTokens((), tuple(ends)), vocabulary),
            truncates_text=stops if stopping else None,
            stop_checker=stop_checker if stopping else None,
        )
        for index, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
    ]
    finish(BeamSearch() if settings.num_beams > 1 else TokenSearch(), tasks, table)
    cases.append(
        {
            "options": options,
            "ends": ends,
            "stopping": stopping,
            "table": golden.array(table),
            "prompts": [prompt.tolist() for prompt in prompts],
            "max_tokens": max_tokens,
            "results": [
                {"error": f"{type(task.error).__name__}: {task.error}"}
                if task.hypotheses is None
                else {
                    "hypotheses": [
                        {
                            "ids": one.ids,
                            "logprobs": one.logprobs,
                            "score": one.score,
                            "finish": one.finish,
                            "alternatives": one.alternatives,
                        }
                        for one in task.hypotheses
                    ]
                }
                for task in tasks
            ],
        }
    )
golden.write(cases)
