"""Spans and answers of the Python runtime, from small files with seeded weights."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from golden_file import GoldenFile

REPOSITORY = Path(__file__).resolve().parents[4]
sys.path += [str(REPOSITORY / "tests")]

from support.toy_tasks import SPANS, TEXT_TASKS, write  # noqa: E402
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors  # noqa: E402

from tformer_runtime import Model  # noqa: E402

PIECES = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "good", "bad", "d", "##s", "a", "##y", "the", "##a"]
TEXTS = [
    "good day",
    "the bads  dáys a the😀 good",
    "é a☃ film BAD daya",
    "day",
    "𝔘 good\tbad",
    "a day a bad the good days",
]
LONG = "the bad days a 😀 good day the goods badly a daya the good days a bad day"


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def answer_of(answer: Any) -> list[Any]:
    return [[a.text, a.score, a.start, a.end] for a in (answer, *answer.alternatives)]


def case(name: str, folder: Path, file: GoldenFile, **parts: Any) -> dict[str, Any]:
    spans_path = write(folder / f"{name}-spans.onnx", **{**TEXT_TASKS["spans"], "output_meaning": SPANS, **parts})
    answers_path = write(folder / f"{name}-answers.onnx", **{**TEXT_TASKS["answers"], **parts})
    spans, answers = Model.load(spans_path, threads=1), Model.load(answers_path, threads=1)
    span_runs: list[tuple[list[str], dict[str, Any]]] = [
        (TEXTS[:5] + TEXTS[5:], {"aggregation": aggregation, "truncate": True, **ignore})
        for aggregation in ("none", "simple", "first", "average", "max")
        for ignore in ({}, {"ignore_labels": []}, {"ignore_labels": ["B-B" if aggregation == "none" else "B"]})
    ]
    span_runs += [([LONG, "a"], {"aggregation": how, "doc_stride": n}) for how in ("simple", "max") for n in (0, 4)]
    pairs = [(question, context) for question in ("the day", "bad?") for context in (*TEXTS, LONG)]
    answer_runs: list[dict[str, Any]] = [
        {},
        {"top_k": 4},
        {"top_k": 50, "allow_no_answer": True, "max_answer_tokens": 3},
        {"top_k": 3, "max_seq_len": 10, "doc_stride": 2},
    ]
    return {
        "name": name,
        "spansFile": file.array(np.frombuffer(spans_path.read_bytes(), np.uint8)),
        "answersFile": file.array(np.frombuffer(answers_path.read_bytes(), np.uint8)),
        "spans": [
            [
                texts,
                options,
                [[[s.label, s.score, s.text, s.start, s.end] for s in one] for one in spans.entities(texts, **options)],
            ]
            for texts, options in span_runs
        ],
        "pairs": pairs,
        "answers": [[options, [answer_of(a) for a in answers.answer(pairs, **options)]] for options in answer_runs],
    }


def main() -> None:
    file = GoldenFile()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pieces = {"tokenizers": (word_pieces().to_str(),), "tokenizer_of": {"ids": 0}}
        file.write([case("words", folder, file), case("pieces of words", folder, file, **pieces)])


main()
