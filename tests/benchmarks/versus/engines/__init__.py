"""Every engine is a module with

    prepare(folder, shape, precision) -> int      make its files from the source's, if they are missing; their bytes
    Engine(folder, shape, precision, threads)     open them
    Engine.run(case, inputs)                      → the time of the first token (perf_counter; None: unknown), and the
                                                  tokens of each request, or the vector of each
    Engine.score(inputs, last)                    optional: the log-probabilities of the last ids of each sequence
    Engine.many(inputs, new)                      optional: `new` tokens for each of many texts of any lengths, in
                                                  batches of the engine's choice; FileEngine in the place of Engine,
                                                  where a file of texts is best run with other settings
    file_command(folder, precision, threads, texts, results, new)
                                                  optional: the engine's own program for a file of texts

and raises UnavailableError for a case that it cannot run. Heavy imports are in functions: a worker that opens a file
imports no more than a user's program.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from versus.shapes import Shape

SOURCE = "source"  # the folder with the source of every engine's files
HUGGING_FACE = "hf"  # in it, the same weights as a transformers model, where there is a class for them


class UnavailableError(Exception):
    """This engine cannot do that; the text is the reason."""


def build_once(path: Path, make: Callable[[Path], object], code: str = "") -> int:
    """Let `make` fill a folder, unless the same code has filled it before; return its bytes. An interrupted run leaves
    no
    partial folder."""
    code_file = path / "code"
    if not path.exists() or (code and (code_file.read_text() if code_file.exists() else "") != code):
        part = path.with_name(f"{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        if code:
            (part / code_file.name).write_text(code)
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file != code_file)


def code_of(*folders: Path) -> str:
    """Return a digest of the Python files in some folders."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def hugging_face(folder: Path, shape: Shape) -> Path:
    """Return the transformers model of a shape."""
    path = folder / SOURCE / HUGGING_FACE
    if not path.exists():
        raise UnavailableError(f"transformers has no class for {shape.name} (pre-norm, a vocabulary for each side)")
    return path


def only(precision: str, *known: str) -> None:
    if precision not in known:
        raise UnavailableError(f"no {precision} on CPU")
