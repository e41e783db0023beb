"""The text of the trained model: Python's standard library, and the docstrings of installed packages.

constraints.txt fixes the packages, so the text depends on the version of Python alone. Files are split by their names,
so that no file is in two parts. A part is a row of ids: of each file START, its tokens and END.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from versus.engines import build_once
from versus.shapes import END, PAD, START

SPECIAL = {PAD: "<pad>", START: "<s>", END: "</s>"}
PACKAGES = (
    "django", "lightning", "matplotlib", "networkx", "numpy", "pandas", "scipy", "sklearn", "statsmodels", "sympy",
    "torch", "torchmetrics",
)  # fmt: skip
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "locale"}  # tables, and texts of nobody
SHARES = {"evaluation": 0.015, "calibration": 0.015, "validation": 0.005}  # of the files; the rest is trained on
TOKENIZER = "tokenizer.json"
SHORTEST = 40  # characters of a docstring


def prepare(folder: Path, vocabulary: int) -> None:
    """Write the tokenizer and the parts, unless they are there."""
    build_once(folder, lambda part: _write(part, vocabulary))


def part(folder: Path, name: str) -> np.ndarray:
    """Return the ids of "train" or of a name of SHARES."""
    return np.load(folder / f"{name}.npy")


def windows(ids: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return rows of ids, at equal distances from each other: (count, length)."""
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    if count > 1 and (np.diff(starts) < length).any():
        raise ValueError(f"{len(ids):,} ids are too few for {count} windows of {length}")
    return np.stack([ids[start : start + length] for start in starts])


def _write(folder: Path, vocabulary: int) -> None:
    parts: dict[str, list[str]] = {name: [] for name in ("train", *SHARES)}
    for name, text in documents():
        parts[_part_of(name)].append(text)
    tokenizer = _tokenizer(parts["train"], vocabulary)
    tokenizer.save(str(folder / TOKENIZER))
    for name, texts in parts.items():
        rows = [np.array([START, *encoding.ids, END], np.uint16) for encoding in tokenizer.encode_batch(texts)]
        np.save(folder / f"{name}.npy", np.concatenate(rows))


def documents() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    library = Path(sysconfig.get_path("stdlib"))
    for name, path in _modules(library):
        yield f"stdlib/{name}", path.read_text(encoding="utf-8", errors="replace")
    site, seen = Path(sysconfig.get_path("purelib")), set[str]()
    for package in PACKAGES:
        for name, path in _modules(site / package):
            found = [text for text in _docstrings(path) if text not in seen and len(text) >= SHORTEST]
            seen.update(found)
            if found:
                yield f"{package}/{name}", "\n\n".join(found)


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not LEFT_OUT.intersection(name.parts):
            yield name.as_posix(), path


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # for newer Pythons
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def _part_of(name: str) -> str:
    drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    for part, share in SHARES.items():
        if drawn < share:
            return part
        drawn -= share
    return "train"


def _tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Return byte pairs that are learnt from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SPECIAL[i] for i in range(len(SPECIAL))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
