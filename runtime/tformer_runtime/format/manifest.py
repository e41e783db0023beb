"""The manifest: all that a runtime must know of a model file, as JSON in the file's own metadata.

The exporter writes it, the runtime reads it; nothing else passes between the two. A model has up to two stages:

``encode``  request inputs → context tensors (or, for a model that is run once, its outputs)
``decode``  new tokens + context + caches → logits + the same caches, extended

With both, the graph is one ``If`` over the boolean input ``STAGE``: true runs decode. Every input must be bound in
either stage; the ones that the stage does not read may be empty. With one stage there is no ``If`` and no ``STAGE``.

Caches are right-padded: slot *j* of a row's cache holds the row's token *j*. The decode stage is told where the new
tokens stand by *control inputs*, of which a file lists those that it reads (``Decode.controls``). For a call that feeds
``N`` new token slots to each of ``B`` rows, of which the first ``count[b]`` are valid, after ``past[b]`` cached tokens:

=============== ======= ======== =====================================================================================
POSITIONS       int64   (B, N)   ``past[b] + i``, clipped to ``max_length - 1`` (only slots beyond ``count`` need it)
LAST            int32   (B,)     ``past[b] + count[b] - 1``: the index of the row's last valid token
TOTAL           int32   ()       ``max(past[b]) + N`` : how many slots the longest row has after the call
START           int64   (B,)     ``past[b]``: the slot that the row's first new token goes to
SLOTS           int64   (TOTAL,) ``0 … TOTAL - 1``: the slots that attention may read
SELECT          int64   (B, M)   which of the N new slots logits are wanted for
=============== ======= ======== =====================================================================================

The logits are ``(B, M, vocabulary)``, float32. A file with a shortlist (``Decode.shortlist``) has three inputs more:

=============== ======= ======== =====================================================================================
GATHER          int64   (G,)     ids whose columns of the output projection are wanted as the output GATHERED, (d, G)
COLUMNS         int64   (C,)     the ids of the columns in WEIGHT, for which alone logits are computed, ``(B, M, C)``;
                                 none: for all
WEIGHT          int     (d, C)   what GATHERED was for these ids; float32 where the projection is not quantised
=============== ======= ======== =====================================================================================

In a call of encode COLUMNS and WEIGHT have one column, whatever it holds.

What a file gives beside the logits (``extras``) is ``(B, M, …)`` too if it is of decode, and ``(B, …)`` if it is of
encode; an axis with the name of a request input's axis is as long as that input. A cache whose ``in_place`` is true is
bound with one buffer as past and present; otherwise present is a buffer of the same shape, apart. Buffers have room for
at least TOTAL slots, and start as zeros.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tformer_runtime.base.errors import ModelFileError

KEY = "tformer.manifest"
VERSION = 3

STAGE = "stage.decode"
POSITIONS = "decode.positions"
LAST = "decode.last"
TOTAL = "decode.total"
START = "decode.start"
SLOTS = "decode.slots"
SELECT = "decode.select"
GATHER = "shortlist.gather"
GATHERED = "shortlist.gathered"
COLUMNS = "shortlist.columns"
WEIGHT = "shortlist.weight"

BATCH = "batch"  # names of axes in TensorSpec.shape
NEW = "new"
SLOT = "slot"
WANTED = "wanted"

AUDIO, IMAGE, SERIES = "audio", "image", "series"  # kinds of Preparation

ALIGNMENTS = "alignments"  # kinds of Extra
ATTENTION = "attention"
HIDDEN = "hidden"


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output. `dtype` is numpy's name; an axis of `shape` is a size or the name of a free size."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class RequestInput(TensorSpec):
    """An input of the encode stage.

    role: "ids" (token ids, padded with `pad`), "types" (the types that the tokenizer gives the tokens of the input
    `of`: which of a pair of texts each belongs to; 0 for ids that come without a text), "mask" (derived: `keep` where
    the input `of` is valid, else the other value; integer masks use 1 and 0) or "data" (features that the caller
    supplies). `vocabulary`: how many ids there are.
    """

    role: str = "ids"
    of: str | None = None
    keep: bool = True
    pad: int = 0
    max_length: int | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class Cache:
    """One cached tensor: graph input `past`, graph output `present`; `shape` has the axes BATCH (first) and SLOT."""

    past: str
    present: str
    dtype: str
    shape: tuple[int | str, ...]
    in_place: bool = True


@dataclass(frozen=True)
class Extra(TensorSpec):
    """What a stage gives beside what it is for.

    kind: ALIGNMENTS, cross-attention's weights over the positions of the request, the name too; ATTENTION, those of all
    layers and heads of a model that is run once, the name too; or HIDDEN, the output of the source model's submodule
    `NAME`, called "hidden.NAME".
    """

    kind: str = HIDDEN

    @property
    def module(self) -> str:
        """The submodule's qualified name, of hidden states."""
        return self.name.removeprefix(f"{HIDDEN}.")


@dataclass(frozen=True)
class Follows:
    """The size of an axis that a model makes of one of an input's, as convolutions do: of n it makes
    (n - least) // stride + 1. of: the input's axis."""

    of: str
    least: int
    stride: int


@dataclass(frozen=True)
class Encode:
    """The stage that runs once a request. Its outputs are the context of decode, or the results of the model.

    ragged: whether rows of different lengths may be run together, of a model that is run once; else padding would
    change them, and only rows of one size are. follows: what the outputs' axes that are no input's are, by name.
    """

    inputs: tuple[RequestInput, ...]
    outputs: tuple[TensorSpec, ...]
    extras: tuple[Extra, ...] = ()
    ragged: bool = False
    follows: Mapping[str, Follows] = field(default_factory=dict)


@dataclass(frozen=True)
class Shortlist:
    """Candidates for each request, which the file's metadata hold (`engine/shortlist.py`).

    dtype, inner: of the projection's columns, (inner,). common, each: how many ids are candidates of every request, and
    at most of a source id. measured: on the data that it was learned from, for people.
    """

    dtype: str
    inner: int
    common: int = 0
    each: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decode:
    """The stage that runs once a step.

    `step` is (batch, new) ids, or (batch, new, features) numbers in a model that continues a series, whose outputs are
    called `logits` all the same.
    `context` are the graph inputs that take encode's outputs, in their order. `vocabulary`: how many ids the step input
    may hold; None: as many as there are logits. `controls` are the control inputs that the graph has. `ragged_chunks`
    tells whether several new tokens may be fed at once to more than one row that has a past (the first call of a row,
    with no past, may always do so). `shares_context` tells whether a row of the context may be that of several
    neighbouring rows of the step input, of as many for each; else there are as many of it as of those. `few_tokens`:
    up to how many tokens of a step, those of all rows together, products may have kernels of their own, which round
    otherwise than those for more; None if any number of tokens has the same.
    """

    step: TensorSpec
    controls: tuple[str, ...]
    caches: tuple[Cache, ...]
    logits: TensorSpec
    context: tuple[str, ...] = ()
    vocabulary: int | None = None
    ragged_chunks: bool = True
    extras: tuple[Extra, ...] = ()
    shares_context: bool = False
    shortlist: Shortlist | None = None
    few_tokens: int | None = None

    @property
    def features(self) -> tuple[int, ...]:
        """What the step input holds at each position: nothing where it is an id, (F,) where it is F numbers."""
        return tuple(int(size) for size in self.step.shape[2:])


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the step input's vocabulary: `start` is put before what is generated (encoder-decoder) or before the
    prompt (decoder-only); generation ends at any of `end`; `pad` is the padding, None if the model has none."""

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    pad: int | None = None


SINGLE_LABEL = "single_label"  # problems of `Outcome`
MULTI_LABEL = "multi_label"
REGRESSION = "regression"


@dataclass(frozen=True)
class Outcome:
    """What the outputs of a model that is run once stand for, which its task makes results of.

    labels: what an output's numbers are the scores of, in their order. problem: SINGLE_LABEL (softmax: one of them
    holds), MULTI_LABEL (sigmoid: each may hold) or REGRESSION (the numbers themselves). settings: what else the task
    needs, by its own names.
    """

    labels: tuple[str, ...] = ()
    problem: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparation:
    """How a raw input becomes a request input that is neither ids nor what follows from them.

    kind: of what it is made of, such as an image, sound or a series. numbers: sizes, means, rates, by their names in
    that kind.
    """

    kind: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionSettings:
    """How onnxruntime runs the file, unless the one who opens it says otherwise.

    threads: of one operator; None: one per core. spinning: whether they wait busily, which is faster where nobody else
    needs the cores. disabled_optimizers: fusions into CPU kernels that are slower than what they replace. By default
    SkipLayerNormalization, against Add and LayerNormalization of d = 512, one thread: 5.6 against 3.9 µs for one row,
    89 against 14 for 32; BiasGelu, against Add and Gelu of d = 1536: 37 against 38 µs for 16 rows, 1600 against 1200
    for 512.
    """

    threads: int | None = None
    spinning: bool = True
    disabled_optimizers: tuple[str, ...] = ("SkipLayerNormFusion", "BiasGeluFusion")


@dataclass(frozen=True)
class Manifest:
    """See the module's docstring.

    `tokenizers` are texts in tokenizers' JSON format, `tokenizer_of` maps an input's name to its index there.
    `chat_template` is a Jinja text that makes a prompt of a conversation, as transformers reads it; `chat_tokens` are
    the special tokens that it may name, such as bos_token, and their texts.
    `outcome` says what the results of a model that is run once stand for, `preparation` how an input of that name is
    made of what a user has.
    `precision` is what products and caches are in: "fp32", "fp16" or "bf16".
    `session` is what the CPU session is opened with. `forms` are the operators that were kept because they were
    measured to be the fastest, by what they compute; empty in a file that has the exporter's defaults.
    `parity`, `quantization`, `optimized_for`, `forms` and `producer` are for people: they are shown, not interpreted.
    """

    task: str
    max_length: int
    encode: Encode | None
    decode: Decode | None
    special: SpecialTokens = SpecialTokens()
    tokenizers: tuple[str, ...] = ()
    tokenizer_of: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    target: str = "cpu"
    precision: str = "fp32"
    quantization: str = "none"
    optimized_for: str = ""
    session: SessionSettings = SessionSettings()
    forms: Mapping[str, str] = field(default_factory=dict)
    source_digest: str = ""
    producer: Mapping[str, str] = field(default_factory=dict)
    parity: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    chat_tokens: Mapping[str, str] = field(default_factory=dict)
    outcome: Outcome = Outcome()
    preparation: Mapping[str, Preparation] = field(default_factory=dict)
    version: int = VERSION

    @property
    def staged(self) -> bool:
        """Whether the graph holds both stages, in one `If`."""
        return self.encode is not None and self.decode is not None

    @property
    def encoded(self) -> tuple[TensorSpec, ...]:
        """What the encode stage gives beside its extras; nothing where there is none."""
        return self.encode.outputs if self.encode else ()

    @property
    def extras(self) -> tuple[Extra, ...]:
        """What the file gives beside its results, of both stages."""
        return tuple(extra for stage in (self.encode, self.decode) if stage for extra in stage.extras)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest. ModelFileError if it is damaged or of another version than this runtime's."""
        try:
            data = json.loads(text)
            version = int(data["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFileError("the file's tformer manifest is damaged: export the model again") from error
        if version > VERSION:
            raise ModelFileError(
                f"the file's manifest has version {version} and this runtime reads version {VERSION}: upgrade tformer"
            )
        if version < VERSION:
            raise ModelFileError(
                f"the file was written by an earlier tformer (its manifest has version {version}, this runtime reads "
                f"version {VERSION}): export the model again"
            )
        try:
            return cls._from_dict(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelFileError(f"the file's tformer manifest is damaged ({error}): export the model again") from error

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Manifest:
        encode, decode = data["encode"], data["decode"]
        return cls(
            **{
                **data,
                "encode": encode
                and Encode(
                    tuple(RequestInput(**_shaped(i)) for i in encode["inputs"]),
                    tuple(TensorSpec(**_shaped(o)) for o in encode["outputs"]),
                    _extras(encode),
                    bool(encode["ragged"]),
                    {name: Follows(**how) for name, how in encode["follows"].items()},
                ),
                "decode": decode
                and Decode(
                    TensorSpec(**_shaped(decode["step"])),
                    tuple(decode["controls"]),
                    tuple(Cache(**_shaped(c)) for c in decode["caches"]),
                    TensorSpec(**_shaped(decode["logits"])),
                    tuple(decode["context"]),
                    decode["vocabulary"],
                    decode["ragged_chunks"],
                    _extras(decode),
                    decode["shares_context"],
                    Shortlist(**decode["shortlist"]) if decode["shortlist"] else None,
                    decode["few_tokens"],
                ),
                "special": SpecialTokens(
                    tuple(data["special"]["start"]), tuple(data["special"]["end"]), data["special"]["pad"]
                ),
                "tokenizers": tuple(data["tokenizers"]),
                "session": _session(data["session"]),
                "outcome": _outcome(data["outcome"]),
                "preparation": {name: Preparation(**how) for name, how in data["preparation"].items()},
                "version": VERSION,
            }
        )


def _extras(stage: dict[str, Any]) -> tuple[Extra, ...]:
    return tuple(Extra(**_shaped(extra)) for extra in stage["extras"])


def _outcome(data: dict[str, Any]) -> Outcome:
    return Outcome(**{**data, "labels": tuple(data.get("labels", ()))})


def _session(data: dict[str, Any]) -> SessionSettings:
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    settings = SessionSettings(**{**data, **lists})
    if not (settings.threads is None or isinstance(settings.threads, int)):
        raise ValueError(f"session threads {settings.threads!r}")
    return settings


def _shaped(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "shape": tuple(data["shape"])}
