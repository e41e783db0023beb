"""The measured models, their precisions and their requests.

This module needs the standard library only: engines in other environments import it too.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Kind = Literal["translate", "continue", "embed"]  # encoder-decoder, decoder-only, encoder-only
PRECISIONS = ("fp32", "int8", "int4")
END, START, PAD = 2, 1, 0
FIRST = 10  # the lowest id of inputs
TEXTS = 1000  # of a file
NEW_OF_TEXT = 16  # generated tokens of each


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. heads: of queries; shared: of keys and values. gated: a third matrix in the feed-forward.

    vocabulary: of the inputs; target: of the outputs, if it differs.
    """

    name: str
    kind: Kind
    vocabulary: int
    width: int
    heads: int
    layers: int
    feedforward: int
    max_length: int
    shared: int | None = None
    gated: bool = False
    target: int | None = None
    trained: str | None = None  # a checkpoint of the repository, in the place of random weights

    @property
    def keys(self) -> int:
        """Return the width of the keys of all heads."""
        return self.width * (self.shared or self.heads) // self.heads

    @property
    def written(self) -> int:
        return self.target or self.vocabulary


@dataclass(frozen=True)
class Case:
    """One batch of requests.

    prompt: tokens of each, in the encoder or before the generated ones; new: generated tokens.
    """

    batch: int
    prompt: int
    new: int = 0
    beams: int = 1

    @property
    def name(self) -> str:
        beams = f", {self.beams} beams" if self.beams > 1 else ""
        return f"batch {self.batch}{beams}, {self.prompt} tokens"

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """A model with its cases. quality: the case whose results are compared with the source's in fp32."""

    shape: Shape
    precisions: tuple[str, ...]
    cases: tuple[Case, ...]
    quick: tuple[Case, ...]
    quality: Case
    peers: tuple[str, ...] = ()  # empty: all of them
    has_file: bool = False  # a file of texts is measured too

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def first(self) -> Case:
        """Return the request of a process that has just started."""
        return replace(self.quick[0], new=min(self.quick[0].new, 1))


def _translations(source: int, new: int) -> tuple[Case, ...]:
    return tuple(Case(batch, source, new, beams) for beams in (1, 4) for batch in (1, 8, 32))


def _continuations(new: int, *sizes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case(batch, prompt, new) for batch, prompt in sizes)


_BASE = Shape("encoder-decoder 60M", "translate", 32000, 512, 8, 6, 2048, 256)
_G2P = Shape("g2p", "translate", 31, 128, 4, 4, 512, 64, target=42, trained="models/g2p/model.pt")
_SMALL = Shape("decoder-only 125M", "continue", 32000, 768, 12, 12, 2048, 2048, gated=True)
_LARGE = Shape("decoder-only 1.1B", "continue", 32000, 2048, 32, 22, 5632, 2048, shared=4, gated=True)
_ENCODER = Shape("encoder-only 22M", "embed", 30522, 384, 12, 6, 1536, 512)

ROWS = (
    Row(
        _BASE,
        PRECISIONS,
        (*_translations(24, 32), Case(1, 128, 32), Case(8, 128, 32)),
        (Case(1, 24, 32), Case(8, 24, 32, 4)),
        Case(32, 24, 32),
        has_file=True,
    ),
    Row(_G2P, ("fp32", "int8"), _translations(8, 8), (Case(1, 8, 8), Case(8, 8, 8, 4)), Case(32, 8, 8)),
    Row(
        _ENCODER,
        PRECISIONS,
        tuple(Case(batch, length) for length in (16, 128) for batch in (1, 8, 32)),
        (Case(1, 16), Case(32, 16)),
        Case(32, 16),
    ),
    Row(
        _SMALL,
        PRECISIONS,
        (
            *_continuations(32, (1, 16), (1, 256), (1, 1024), (1, 2000), (8, 16), (8, 256), (8, 1024), (32, 16)),
            Case(32, 256, 32),
            Case(1, 16, 32, 4),
            Case(8, 16, 32, 4),
        ),
        _continuations(16, (1, 16), (8, 16), (1, 256)),
        Case(32, 16, 32),
        has_file=True,
    ),
    Row(
        _LARGE,
        PRECISIONS,
        (*_continuations(16, (1, 16), (1, 256), (8, 16), (8, 256), (32, 16)), Case(1, 16, 16, 4)),
        _continuations(8, (1, 16)),
        Case(8, 16, 16),
        peers=("tformer", "tformer, for latency", "CTranslate2", "onnxruntime-genai", "transformers"),
    ),
)


def shape_of(values: dict[str, Any]) -> Shape:
    return Shape(**values)


def inputs_of(shape: Shape, case: Case, seed: int = 0) -> list[list[int]]:
    """Return random ids for a case, the same in any process."""
    draw = random.Random(f"{shape.name} {case.batch} {case.prompt} {seed}")
    lowest = min(FIRST, shape.vocabulary // 2)
    return [[draw.randrange(lowest, shape.vocabulary) for _ in range(case.prompt)] for _ in range(case.batch)]


def texts_of(shape: Shape, count: int = TEXTS) -> list[list[int]]:
    """Return texts of random ids. Their lengths are those of sentences: log-normal, 4 to 80, median 18."""
    draw = random.Random(f"{shape.name} texts")
    lengths = (min(80, max(4, round(draw.lognormvariate(math.log(18), 0.6)))) for _ in range(count))
    return [[draw.randrange(FIRST, shape.vocabulary) for _ in range(length)] for length in lengths]
