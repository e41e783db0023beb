"""Small files of all kinds of caches, contexts and tasks, and the results of the Python runtime for them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from golden_file import GoldenFile

REPOSITORY = Path(__file__).resolve().parents[4]
sys.path += [str(REPOSITORY / "tests")]

from fuzz.models import byte_writer  # noqa: E402
from support.served_tasks import write_tasks  # noqa: E402
from support.toy_models import Toy  # noqa: E402

from tformer_runtime import Model  # noqa: E402

TOYS = {
    "one tensor": Toy(seed=27),
    "two layers": Toy(seed=5, layers=2),
    "scatter": Toy(attention="scatter", seed=4),
    "scatter pair": Toy(attention="scatter-pair", seed=6, layers=2),
    "all logits": Toy(select=False, seed=7),
    "stride": Toy(stride=3, seed=8, extras=True),
    "shared context": Toy(shares=True, seed=9),
    "carries": Toy(carries=True, attention="scatter", seed=10),
    "decoder only": Toy(encoder=False, seed=3),
    "decoder with carries": Toy(encoder=False, carries=True, seed=12),
    "decoder with pairs": Toy(encoder=False, attention="scatter-pair", select=False, seed=13),
    "no end": Toy(encoder=False, end=(), seed=14, defaults={"max_new_tokens": 9}),
}
TEXTS = ["abc", "z", "hello", "thequickbrownfox", "ab", "mmmmm", "zyxwvutsrqponmlkjihg"]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12},
    "prefix": {"forced_prefix": "ab", "max_new_tokens": 8, "num_beams": 2, "top_logprobs": 3},
    "samples": {"temperature": 1.1, "seed": 5, "num_return_sequences": 2, "max_new_tokens": 12},
    "rules": {"suppress_tokens": [4, 5], "repetition_penalty": 1.5, "min_new_tokens": 3, "max_new_tokens": 10},
}


def plain(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "ids": result.token_ids,
        "score": result.score,
        "finish": result.finish_reason,
        "alternatives": [plain(one) for one in result.alternatives],
    }


def toy_case(name: str, toy: Toy, folder: Path, file: GoldenFile) -> dict[str, Any]:
    path = toy.write(folder / f"{name}.onnx")
    model = Model.load(path, threads=1)
    case: dict[str, Any] = {
        "kind": "generate",
        "name": name,
        "file": file.array(np.frombuffer(path.read_bytes(), np.uint8)),
        "texts": TEXTS,
        "runs": [
            {"name": key, "options": options, "results": [plain(r) for r in model.generate_batch(TEXTS, **options)]}
            for key, options in OPTIONS.items()
        ],
        "scores": [model.score(text, "abcab").tolist() for text in TEXTS],
        "chat": None,
    }
    if not toy.encoder:
        chat = model.chat()
        answers = [plain(chat.send(text, max_new_tokens=4)) for text in TEXTS[:4]]
        chat.rewind(2)
        case["chat"] = [*answers, plain(chat.send("q", max_new_tokens=4))]
    return case


def bytes_case(file: GoldenFile) -> dict[str, Any]:
    model = Model.load(byte_writer(), threads=1)
    options = {"temperature": 1.5, "seed": 3, "max_new_tokens": 30, "num_return_sequences": 2}
    texts = ["über", "日本語", "a b", "😀"]
    return {
        "kind": "bytes",
        "file": file.array(np.frombuffer(byte_writer().read_bytes(), np.uint8)),
        "texts": texts,
        "options": options,
        "results": [plain(r) for r in model.generate_batch(texts, **options)],
    }


def tasks(folder: Path, file: GoldenFile) -> list[dict[str, Any]]:
    files = write_tasks(folder)
    rng = np.random.default_rng(2)
    texts = ["good day", "the old night film", "a", "bad", "unknown words here", "good bad day film a the"]
    images = [rng.integers(0, 256, shape, np.uint8) for shape in [(9, 7, 3), (4, 4, 3), (20, 31, 3)]]
    recordings = [0.1 * rng.standard_normal(n).astype(np.float32) for n in (16000, 4000, 45000)]
    histories = [rng.standard_normal((n, 2)).cumsum(0) for n in (3, 9, 40, 3)]
    loaded = {name: Model.load(path, threads=1) for name, path in files.items()}
    masked = ["old day", "a good old old film", "the old night"]
    speech = {"timestamps": "char", "num_beams": 3, "chunk_length_s": 1.0}
    return [
        {
            "kind": "tasks",
            "files": {
                name: file.array(np.frombuffer(files[name].read_bytes(), np.uint8))
                for name in ("vector", "states", "relevance", "masks", "images", "audio", "series")
            },
            "texts": texts,
            "vectors": [file.array(v) for v in loaded["vector"].embed(texts)],
            "states": [file.array(v) for v in loaded["states"].predict(texts)],
            "masked": masked,
            "filled": [
                [[[c.token, c.id, c.score, c.text] for c in mask] for mask in text]
                for text in loaded["masks"].fill(masked, top_k=3)
            ],
            "chosen": [
                [[c.id for c in mask] for mask in text]
                for text in loaded["masks"].fill(masked, top_k=2, candidate_tokens=["good", 4])
            ],
            "relevance": [r.score for r in loaded["relevance"].classify(list(zip(texts, texts[::-1], strict=True)))],
            "images": [file.array(p) for p in images],
            "labels": [list(r.scores.items()) for r in loaded["images"].classify(images)],
            "recordings": [file.array(s) for s in recordings],
            "transcriptions": [
                {
                    "text": t.text,
                    "ids": t.token_ids,
                    "score": t.score,
                    "segments": [[s.text, s.start, s.end] for s in t.segments],
                }
                for t in loaded["audio"].transcribe_batch(recordings, **speech)
            ],
            "histories": [file.array(h) for h in histories],
            "forecasts": [file.array(f) for f in loaded["series"].forecast_batch(histories)],
        }
    ]


def main() -> None:
    file = GoldenFile()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [toy_case(key, toy, folder, file) for key, toy in TOYS.items()]
        file.write([*cases, bytes_case(file), *tasks(folder, file)])


main()
