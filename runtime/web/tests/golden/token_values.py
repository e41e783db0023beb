"""Attention weights, hidden states and results with a cached prefix of the Python runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_file import GoldenFile
from plain_result import plain

from tformer_runtime import Model

BUILD = Path(__file__).resolve().parents[4] / "build" / "web"
PAIRS = [
    ("transformer", "T R AE N S"),
    ("a", "AH"),
    ("pronunciation", "P R AH N AH N S IY EY SH AH N"),
    ("onnx", "AA N K S"),
]
TEXTS = ["Das Passwort ist zu kurz", "file not found", "x", "Slaptažodis per trumpas 😀"]
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 8},
    {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6},
    {"max_new_tokens": 6, "temperature": 1.1, "seed": 4},
    {"forced_prefix": "AH", "max_new_tokens": 4},
]


def alignments(file: GoldenFile) -> dict[str, Any]:
    model = Model.load(BUILD / "g2p-extras.onnx", threads=1)
    generated = [model.generate(source, cross_attentions=True) for source, _ in PAIRS]
    return {
        "kind": "alignments",
        "pairs": PAIRS,
        "weights": [file.array(model.align(source, target)) for source, target in PAIRS],
        "labels": [model.labels(source, result) for (source, _), result in zip(PAIRS, generated, strict=True)],
        "states": [
            {name: file.array(values) for name, values in model.hidden_states(source, *given).items()}
            for source, target in PAIRS
            for given in ((), (target,))
        ],
    }


def attentions(file: GoldenFile) -> dict[str, Any]:
    model = Model.load(BUILD / "languages-attentions.onnx", threads=1)
    found = [model.attentions(text) for text in TEXTS]
    return {
        "kind": "attentions",
        "texts": TEXTS,
        "weights": [file.array(weights) for weights, _ in found],
        "labels": [labels for _, labels in found],
        "classes": [result.label for result in model.classify(TEXTS)],
    }


def prefixes() -> dict[str, Any]:
    model = Model.load(BUILD / "words.onnx", threads=1)
    prefix = model.cache_prefix("tra")
    rest = ["ns", "in", "n", "velling"]
    return {
        "kind": "prefixes",
        "prefix": "tra",
        "rest": rest,
        "runs": [
            [options, [plain(r) for r in model.generate_batch(rest, prefix=prefix, **options)]] for options in OPTIONS
        ],
    }


def main() -> None:
    file = GoldenFile()
    file.write([alignments(file), attentions(file), prefixes()])


main()
