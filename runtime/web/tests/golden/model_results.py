"""Results of the Python runtime for the models of this repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from golden_file import GoldenFile

from tformer_runtime import InputError, Model
from tformer_runtime.decoding.request import Result

BUILD = Path(__file__).resolve().parents[4] / "build" / "web"
WORDS = [
    "a", "be", "onnx", "hello", "transformer", "quantization", "pronunciation", "rhythm", "queue", "knight",
    "xylophone", "bureaucracy", "choir", "czar", "mnemonic", "psyche", "aisle", "gnome", "wrought", "island",
    "colonel", "debt", "subtle", "receipt", "yacht",
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "num_return_sequences": 2},
    "never": {"num_beams": 3, "early_stopping": "never", "length_penalty": 1.7, "patience": 1.5},
    "early": {"num_beams": 3, "early_stopping": True, "length_penalty": 0.0},
    "short": {"max_new_tokens": 3},
    "prefix": {"forced_prefix": "K AH", "top_logprobs": 2},
    "prefix beams": {"forced_prefix": "K AH", "num_beams": 3, "top_logprobs": 2},
    "stop": {"stop_strings": ["AH N", "R"]},
    "stop beams": {"stop_strings": ["AH N", "R"], "num_beams": 3, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.4, "min_new_tokens": 4, "no_repeat_ngram_size": 1, "num_beams": 2},
    "samples": {"temperature": 0.9, "top_k": 12, "seed": 7, "num_return_sequences": 3},
    "nucleus": {"temperature": 1.3, "top_p": 0.8, "seed": 2**60 + 1},
}


def plain(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "ids": result.token_ids,
        "score": result.score,
        "finish": result.finish_reason,
        "logprobs": [None if np.isneginf(x) else x for x in result.token_logprobs],
        "top": result.top_logprobs,
        "alternatives": [plain(one) for one in result.alternatives],
    }


def json_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if name == "seed" else value for name, value in options.items()}


def generation(name: str) -> dict[str, Any]:
    model = Model.load(BUILD / f"{name}.onnx", threads=1)
    return {
        "kind": "generate",
        "model": name,
        "words": WORDS,
        "runs": [
            {
                "name": key,
                "options": json_options(options),
                "results": [plain(r) for r in model.generate_batch(WORDS, **options)],
            }
            for key, options in OPTIONS.items()
        ],
        "scores": [[word, "K AH N", model.score(word, "K AH N").tolist()] for word in WORDS[:5]],
    }


def chat() -> dict[str, Any]:
    model = Model.load(BUILD / "words.onnx", threads=1)
    conversation = model.chat()
    messages = ["hello", "world", "transformer", "onnx"]
    return {
        "kind": "chat",
        "messages": messages,
        "answers": [plain(conversation.send(message)) for message in messages],
        "turns": [turn.ids.tolist() for turn in conversation.turns],
        "continued": [plain(r) for r in model.generate_batch(["he", "str", "un"], max_new_tokens=8)],
        "scores": model.score("hello").tolist(),
        "prompt": model.prompt("hello").tolist(),
    }


def languages() -> dict[str, Any]:
    model = Model.load(BUILD / "languages.onnx", threads=1)
    texts = [
        "Das Passwort ist zu kurz",
        "file not found",
        "パスワードが短すぎます",
        "Le mot de passe est trop court",
        "Slaptažodis per trumpas 😀",
        "كلمة المرور قصيرة جدا",
        "x",
        "The quick brown fox\tjumps\n over  the lazy dog",
    ]
    return {
        "kind": "classify",
        "texts": texts,
        "ids": [model.inputs.single_pass_arrays(text)["ids"].tolist() for text in texts],
        "results": [[list(one) for one in r.top] for r in model.classify(texts, top_k=3)],
    }


def extras(file: GoldenFile) -> dict[str, Any]:
    model = Model.load(BUILD / "g2p-extras.onnx", threads=1)
    wanted = {"cross_attentions": True, "hidden_states": True}
    runs: list[dict[str, Any]] = [{}, {"num_beams": 3, "num_return_sequences": 2}, {"forced_prefix": "K AH"}]
    return {
        "kind": "extras",
        "words": WORDS[:6],
        "runs": [
            {
                "options": options,
                "results": [
                    [
                        {
                            "text": one.text,
                            "cross": file.array(one.cross_attentions),
                            "hidden": {name: file.array(array) for name, array in one.hidden_states.items()},
                        }
                        for one in (result, *result.alternatives)
                    ]
                    for result in model.generate_batch(WORDS[:6], **options, **wanted)
                ],
            }
            for options in runs
        ],
    }


def forecasts(file: GoldenFile) -> dict[str, Any]:
    model = Model.load(BUILD / "elnino.onnx", threads=1)
    rng = np.random.default_rng(1)
    histories = [22 + 3 * np.sin(np.arange(60 + 7 * i) / 6 + i) + rng.normal(0, 0.3, 60 + 7 * i) for i in range(6)]
    return {
        "kind": "forecast",
        "histories": [file.array(history) for history in histories],
        "forecasts": [file.array(values) for values in model.forecast_batch(histories, truncate=True)],
        "short": file.array(model.forecast(histories[0], horizon=5)),
    }


def errors() -> dict[str, Any]:
    model = Model.load(BUILD / "g2p.onnx", threads=1)
    cases = []
    for text in ["héllo", "hello world", "", "a" * 100, "naïve", "日本"]:
        try:
            model.generate(text)
        except InputError as error:
            cases.append([text, str(error)])
    return {"kind": "errors", "cases": cases}


def main() -> None:
    cases = {"g2p": lambda: generation("g2p"), "g2p-int8": lambda: generation("g2p-int8")}
    file = GoldenFile()
    file.write([*(make() for make in cases.values()), chat(), languages(), errors(), extras(file), forecasts(file)])


main()
