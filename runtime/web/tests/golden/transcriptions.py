"""Transcriptions of the Python runtime for a tiny Whisper, within a window of one second and beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from golden_file import GoldenFile

from tformer_runtime import Model, TformerError
from tformer_runtime.tasks.speech import Transcription
from tformer_runtime.tasks.speech_to_text import DecoderPrompt, TimestampRules, split_segments

MODEL = Path(__file__).resolve().parents[4] / "build" / "web" / "tiny-whisper.onnx"
RATE = 16000
SECONDS = (0.4, 1.0, 0.83, 2.6, 3.17, 1.013)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"timestamps": True},
    {"language": "de"},
    {"language": "<|FR|>", "task": "translate", "timestamps": True},
    {"task": "transcribe"},
    {"num_beams": 3, "language": "en"},
    {"num_beams": 2, "timestamps": True},
]
REFUSED: list[dict[str, Any]] = [{"language": "xx"}, {"task": "sing"}]
NO_TIMESTAMPS = 40  # of the cases without a model


def random_audio(seconds: float, seed: int) -> np.ndarray:
    """Return tones whose loudness changes, and some noise."""
    random, time = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * p * time) * np.sin(9 * time + p) for p in random.uniform(100, 5000, 6))
    return (0.1 * tones + 0.02 * random.standard_normal(len(time))).astype(np.float32)


def plain(result: Transcription) -> dict[str, Any]:
    return {
        "text": result.text,
        "ids": result.token_ids,
        "score": result.score,
        "segments": [[segment.text, segment.start, segment.end] for segment in result.segments],
        "language": result.language,
    }


def refusal(model: Model, samples: np.ndarray, options: dict[str, Any]) -> str:
    try:
        model.transcribe(samples, **options)
    except TformerError as error:
        return str(error)
    raise AssertionError(f"{options} were taken")


def model_case(file: GoldenFile) -> dict[str, Any]:
    model = Model.load(MODEL, threads=1)
    recordings = [random_audio(seconds, seed) for seed, seconds in enumerate(SECONDS, 1)]
    runs = [[options, [plain(r) for r in model.transcribe_batch(recordings, **options)]] for options in OPTIONS]
    assert max(len(one["segments"]) for _, results in runs for one in results) > 3
    return {
        "kind": "model",
        "recordings": [file.array(samples) for samples in recordings],
        "runs": runs,
        "refused": [[options, refusal(model, recordings[0], options)] for options in REFUSED],
    }


def rules_case(file: GoldenFile) -> dict[str, Any]:
    """Return scores before and after the rules of timestamps."""
    random = np.random.default_rng(3)
    prompt, cases = DecoderPrompt(no_timestamps=NO_TIMESTAMPS, latest=10), []
    for number in range(200):
        count = random.integers(0, 8)
        generated = np.where(
            random.random(count) < 0.5, random.integers(NO_TIMESTAMPS + 1, 70, count), random.integers(0, 30, count)
        )
        ids = np.concatenate([[1, 2, 3], generated]).astype(np.int64)
        scores = 3 * random.standard_normal(70).astype(np.float32)
        if number % 2:
            scores -= np.log(np.exp(scores).sum())
        after = TimestampRules(prompt, 30, 3)(ids.copy(), scores.copy())
        cases.append([ids.tolist(), file.array(scores), file.array(after)])
    return {"kind": "rules", "noTimestamps": NO_TIMESTAMPS, "latest": 10, "endId": 30, "cases": cases}


def segments_case() -> dict[str, Any]:
    """Return random ids, in some of which times begin and end every piece, and their segments."""
    random, cases = np.random.default_rng(4), []
    for number in range(300):
        time = NO_TIMESTAMPS + 1
        ids = [time] if number % 5 else []
        for _ in range(random.integers(0, 5)):
            time += int(random.integers(0, 20))
            ids += [*random.integers(0, 30, random.integers(0, 3)).tolist(), *[time] * int(random.integers(0, 3))]
        if ids and ids[0] <= NO_TIMESTAMPS:
            ids.insert(0, NO_TIMESTAMPS + 1)  # as the rules have it
        frames = int(random.integers(1, 101))
        prompt = DecoderPrompt(no_timestamps=None if number % 50 == 0 else NO_TIMESTAMPS)
        cases.append([ids, frames, prompt.no_timestamps, *split_segments(ids, prompt, frames)])
    return {"kind": "segments", "cases": cases}


def prompts_case() -> dict[str, Any]:
    """Return the prompts of all settings and calls."""
    languages, tasks = {"<|en|>": 5, "<|de|>": 6}, {"transcribe": 7, "translate": 8}
    cases = []
    for names in ({}, {"languages": languages}, {"languages": languages, "tasks": tasks}):
        for forced in ((), (5,), (None, 7), (5, 7, NO_TIMESTAMPS)):
            for default in (None, "de") if names else (None,):
                settings = {**names, "forced": forced, "language": default, "no_timestamps": NO_TIMESTAMPS}
                prompt = DecoderPrompt(**settings)
                for language in (None, "en") if names else (None,):
                    for task in (None, "translate") if "tasks" in names else (None,):
                        for timestamps in (False, True):
                            ids = prompt.ids(1, language, task, timestamps)
                            cases.append([settings, language, task, timestamps, ids])
    return {"kind": "prompts", "cases": cases}


def main() -> None:
    file = GoldenFile()
    file.write([model_case(file), rules_case(file), segments_case(), prompts_case()])


main()
