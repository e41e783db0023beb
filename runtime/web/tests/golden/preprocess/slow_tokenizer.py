"""A file whose tokenizer has a regular expression that takes a time that doubles with each character."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from golden_file import GoldenFile

REPOSITORY = Path(__file__).resolve().parents[5]
sys.path += [str(REPOSITORY / "tests")]

from support.toy_tasks import SPANS, TEXT_TASKS, write  # noqa: E402
from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # noqa: E402

tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefgh")}, []))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+c"), "isolated")
file = GoldenFile()
with tempfile.TemporaryDirectory() as folder:
    parts = {"tokenizers": (tokenizer.to_str(),), "tokenizer_of": {"ids": 0}, "output_meaning": SPANS}
    path = write(Path(folder) / "slow.onnx", **{**TEXT_TASKS["spans"], **parts})
    file.write([{"definition": tokenizer.to_str(), "file": file.array(np.frombuffer(path.read_bytes(), np.uint8))}])
