"""A target: how its cases are made and run, and which outcomes are right."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from fuzz.mutations import MAX_BYTES, mutate_bytes
from tformer_runtime.base.errors import TformerError

CORPUS = Path(__file__).parent / "corpus"
MAX_SENTENCE_CHARS = 20_100  # a sentence that lists all weights that do not fit is long
RESULT, SENTENCE, FINDING = "result", "sentence", "finding"


class WrongOutcomeError(AssertionError):
    """An outcome that is not an error of Python and not right either, such as a traceback of a command."""


@dataclass(frozen=True)
class Target:
    """A kind of untrusted data.

    name: also of the folder of its corpus.
    seeds: returns cases that give a result. Called once in a process.
    mutate: changes a case.
    run: runs a case. It returns, or raises a TformerError.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    mutate: Callable[[bytes, Random], bytes]
    run: Callable[[bytes], object]

    def corpus(self) -> dict[str, bytes]:
        """Return the cases of the folder of the corpus, by name."""
        folder = CORPUS / self.name
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}

    def pool(self) -> list[bytes]:
        """Return the seeds and the corpus."""
        return [*self.seeds(), *self.corpus().values()]

    def case(self, pool: Sequence[bytes], seed: int, number: int) -> bytes:
        """Return the case of a number: a changed member of the pool. The first ones are the pool itself."""
        if number < len(pool):
            return pool[number]
        rng = Random(f"{seed} {self.name} {number}")
        return self.changed(rng.choice(pool), rng)

    def changed(self, base: bytes, rng: Random) -> bytes:
        """Return a changed case."""
        try:
            case = self.mutate(base, rng)
        except RecursionError:  # a document that is nested so deeply that it can be parsed and not be copied
            return mutate_bytes(base, rng)
        return case if len(case) <= MAX_BYTES else mutate_bytes(base, rng)


class Outcome(NamedTuple):
    """What a case led to.

    kind: RESULT, SENTENCE or FINDING. text: the sentence, or the traceback. place: the error and where it was raised.
    """

    kind: str
    text: str = ""
    place: str = ""


def outcome_of(target: Target, case: bytes) -> Outcome:
    """Run a case and judge its outcome."""
    try:
        target.run(case)
    except TformerError as error:
        sentence = str(error)
        if not sentence.strip():
            return Outcome(FINDING, f"{type(error).__name__} has no text", f"empty sentence {_place(error)}")
        if len(sentence) > MAX_SENTENCE_CHARS:
            text = f"{len(sentence):,} characters: {sentence[:200]} …"
            return Outcome(FINDING, text, f"endless sentence {_place(error)}")
        return Outcome(SENTENCE, sentence)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is a BaseException
        text = "".join(traceback.format_exception(error))[-6000:]
        return Outcome(FINDING, text, f"{type(error).__name__} {_place(error)}")
    return Outcome(RESULT)


def _place(error: BaseException) -> str:
    """Return the last lines of the product that the error passed through."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "tformer_" in f.filename or "/fuzz/" in f.filename
    ]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1][:2])
