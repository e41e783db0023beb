"""The manifest: everything that a runtime must know about a model file, as JSON in the file's own metadata.

The exporter writes it and the runtime reads it. They share no other data. A model has up to two stages:

``encode``  request inputs → context tensors (or the outputs of a single-pass model)
``decode``  new tokens + context + caches → logits + the same caches, extended

With both stages, the graph is one ``If`` over the boolean input ``STAGE_INPUT``: true runs decode. Every graph input
must be bound for either stage, but the inputs that the stage does not read may be empty. With one stage the graph has
neither the ``If`` nor ``STAGE_INPUT``.

Caches are right-padded: slot *j* of a row's cache holds the row's token *j*. A cache without an axis of slots is a
*carry*: a value of fixed size that each row carries from token to token, such as the last inputs of a convolution. It
holds the value after the row's last valid token. *Control inputs* give the decode stage the
positions of the new tokens. A file lists the control inputs that its graph reads (``DecodeStage.controls``). A call
feeds ``N`` new token slots to each of ``B`` rows. The first ``count[b]`` of them are valid and follow ``past[b]``
cached tokens:

=============== ======= ============== ===============================================================================
POSITIONS       int64   (B, N)         ``past[b] + i``, clipped to ``max_length - 1`` (only slots beyond ``count`` need
                                       clipping)
LAST_POSITION   int32   (B,)           ``past[b] + count[b] - 1``: the index of the row's last valid token
TOTAL_SLOTS     int32   ()             ``max(past) + N``: the number of slots of the longest row after the call
START_SLOT      int64   (B,)           ``past[b]``: the slot of the row's first new token
SLOT_INDICES    int64   (TOTAL_SLOTS,) ``0 … TOTAL_SLOTS - 1``: the slots that attention may read
NEW_COUNTS      int64   (B,)           ``count[b]``; 0 for a row whose carries must not change
SELECTED_TOKENS int64   (B, M)         indices of the new tokens, out of N, for which the stage computes logits
ADAPTER_ROWS    int64   (B,)           the number of each row's adapter; 0 for none (``Manifest.adapters``)
=============== ======= ============== ===============================================================================

The logits are ``(B, M, vocabulary)``, float32. A file with a shortlist (``DecodeStage.shortlist``) has three more
inputs:

================ ======= ======= =====================================================================================
GATHER_IDS       int64   (G,)    ids whose columns of the output projection are returned as the output
                                 GATHERED_COLUMNS, (d, G)
COLUMN_IDS       int64   (C,)    ids of the columns in COLUMN_WEIGHT. The stage computes only their logits,
                                 ``(B, M, C)``. If it is empty, the stage computes the logits of all ids.
COLUMN_WEIGHT    int     (d, C)  GATHERED_COLUMNS for these ids; float32 if the projection is not quantised
================ ======= ======= =====================================================================================

In a file with adapters the encode stage has the input ADAPTER_INPUT, which is like ADAPTER_ROWS. No ``RequestInput``
describes it.

In a call of encode COLUMN_IDS and COLUMN_WEIGHT have one column with arbitrary content.

Extra outputs (``extras``) of decode are ``(B, M, …)``, and extra outputs of encode are ``(B, …)``. An axis with the
name of a request input's axis has the length of that input. A cache with ``in_place`` is bound with one buffer as past
and present. Otherwise present is a separate buffer of the same shape. Buffers have at least TOTAL_SLOTS slots and are
initialised with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from tformer_runtime.base.errors import ModelFileError, OptionError
from tformer_runtime.base.validation import MAX_THREADS
from tformer_runtime.format.stored_forms import StoredProducts
from tformer_runtime.format.typed_json import Count, Id, Index, Name, read_typed

Bits = Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]?$")]  # a number of bits, as a key in JSON

MANIFEST_KEY = "tformer.manifest"
MANIFEST_VERSION = 11
VERSION_WITHOUT_PRODUCTS = 10  # has no record of stored products, and is read as a file without any

STAGE_INPUT = "stage.decode"
POSITIONS = "decode.positions"
LAST_POSITION = "decode.last"
TOTAL_SLOTS = "decode.total"
START_SLOT = "decode.start"
SLOT_INDICES = "decode.slots"
NEW_COUNTS = "decode.counts"
SELECTED_TOKENS = "decode.select"
ADAPTER_ROWS = "decode.adapter"
GREEDY_PLAN = "greedy.plan"  # int64 (n,): of `rewriting.greedy_loop`, which adds the input when a file is opened
ADAPTER_INPUT = "request.adapter"
GATHER_IDS = "shortlist.gather"
GATHERED_COLUMNS = "shortlist.gathered"
COLUMN_IDS = "shortlist.columns"
COLUMN_WEIGHT = "shortlist.weight"

BATCH_AXIS = "batch"  # names of axes in TensorSpec.shape
NEW_AXIS = "new"
SLOT_AXIS = "slot"
SELECTED_AXIS = "selected"

BASE_ADAPTER = "base"  # the name of the model without an adapter

AUDIO, IMAGE, SERIES = "audio", "image", "series"  # kinds of Preprocessing

CROSS_ATTENTIONS = "cross_attentions"  # kinds of ExtraOutput
ATTENTIONS = "attentions"
HIDDEN_STATES = "hidden_states"


# target → the devices that a file in float32 suits, the best one first
DEVICES_OF_TARGET = {
    "cpu": ("cpu", "wasm"),
    "cuda": ("cuda", "cpu"),
    "web": ("webgpu", "wasm", "cpu"),
    "portable": ("cpu", "cuda", "wasm"),
}

Shape = tuple[Index | Name, ...]
Dtype = Annotated[str, msgspec.Meta(pattern="^(bool|u?int8|int16|int32|int64|b?float16|float32|float64)$")]


class TensorSpec(Struct, frozen=True):
    """A graph input or output.

    dtype: numpy's name of the type.
    shape: for each axis its size, or the name of a free size.
    """

    name: Name
    dtype: Dtype
    shape: Shape


class RequestInput(TensorSpec, frozen=True):
    """An input of the encode stage.

    role: "ids" (token ids, padded with `pad`);
        "types" (the tokenizer's token types for the input `of`, which number the texts of a pair; 0 for ids that come
        without a text);
        "mask" (derived: `keep` at the valid positions of the input `of`, else the other value; integer masks use 1 and
        0);
        or "data" (features that the caller passes).
    of: the input that a mask or types belong to.
    max_length: upper limit of the first axis; None for no limit.
    vocabulary: the number of ids.
    required: whether types must come with ids that come without a text, because the model computes something else
        without types than with zeros.
    """

    role: Annotated[str, msgspec.Meta(pattern="^(ids|types|mask|data)$")] = "ids"
    of: str | None = None
    keep: bool = True
    pad: Id = 0
    max_length: Count | None = None
    vocabulary: Count | None = None
    required: bool = False


class CacheSpec(Struct, frozen=True):
    """One cached tensor: graph input `past`, graph output `present`.

    shape: has the axes BATCH_AXIS (first) and SLOT_AXIS; a carry has BATCH_AXIS alone.
    in_place: whether past and present are bound to one buffer. False for a carry.
    """

    past: Name
    present: Name
    dtype: Dtype
    shape: Shape
    in_place: bool = True

    @property
    def is_carry(self) -> bool:
        """Whether the cache has no slots: it holds a value after the last token, and none of earlier tokens."""
        return SLOT_AXIS not in self.shape


class ExtraOutput(TensorSpec, frozen=True):
    """An output of a stage in addition to its logits, context or results.

    kind: CROSS_ATTENTIONS (weights of cross-attention over the positions of the request; the output has this name too);
        ATTENTIONS (weights of all layers and heads of a single-pass model; the output has this name too);
        or HIDDEN_STATES (the output of the source model's submodule `NAME`; the output's name is "hidden_states.NAME").
    """

    kind: Annotated[str, msgspec.Meta(pattern="^(cross_attentions|attentions|hidden_states)$")] = HIDDEN_STATES

    @property
    def module(self) -> str:
        """The qualified name of the submodule whose output the hidden states are."""
        return self.name.removeprefix(f"{HIDDEN_STATES}.")


class DerivedLength(Struct, frozen=True):
    """The length of an output axis that follows from the length n of an input axis, as in convolutions.

    It is (n - minimum) // stride + 1.

    of: the name of the input axis.
    """

    of: Name
    minimum: Index
    stride: Count


class EncodeStage(Struct, frozen=True):
    """The stage that runs once for a request. Its outputs are the context of decode, or the results of the model.

    ragged: for a single-pass model, whether a batch may have rows of different lengths. If not, padding would change
        the results, and only rows of one size run together.
    derived_lengths: lengths of the output axes that are not an input's, by axis name.
    min_lengths: name of a free axis of the inputs → the least length of a row there, where it is more than 1. Axes of
        one name have one length in each row.
    no_longer_than: name of a free axis of the inputs → the free axes whose lengths its own may not exceed in a row.
    """

    inputs: tuple[RequestInput, ...]
    outputs: tuple[TensorSpec, ...]
    extras: tuple[ExtraOutput, ...] = ()
    ragged: bool = False
    derived_lengths: Mapping[str, DerivedLength] = field(default_factory=dict)
    min_lengths: Mapping[str, Count] = field(default_factory=dict)
    no_longer_than: Mapping[str, tuple[Name, ...]] = field(default_factory=dict)


class ShortlistSpec(Struct, frozen=True):
    """The shortlist of candidates, whose tables are in the file's metadata (`engine/shortlist.py`).

    dtype, inner: type and length of the projection's columns, (inner,).
    common: the number of ids that are candidates of every request.
    each: the upper limit of the candidates of one source id.
    measured: figures from the data that the shortlist was learned from, for people.
    """

    dtype: Dtype
    inner: Count
    common: Index = 0
    each: Index = 0
    measured: Mapping[str, Any] = field(default_factory=dict)


class DecodeStage(Struct, frozen=True):
    """The stage that runs once for a step.

    step: the step input: (batch, new) ids, or (batch, new, features) numbers in a model that continues a series. The
        outputs of such a model are called `logits` too.
    controls: the control inputs that the graph reads.
    context: the graph inputs that take encode's outputs, in their order.
    vocabulary: the number of ids of the step input; None: the number of logits.
    chunked_prefill: whether a call may feed several new tokens to more than one row with a past. The first call of a
        row, with no past, may always feed several.
    shares_context: whether a row of the context may serve several neighbouring rows of the step input, the same number
        for each. If not, the context has as many rows as the step input.
    small_batch_limit: up to this number of tokens in a step (of all rows together), matrix products may use other
        kernels, with other rounding, than for more tokens. None if the kernels are the same for any number.
    hidden_id: the padding id, if the model hides it wherever it stands. The file reads it as any other id, so no row
        may hold it.
    """

    step: TensorSpec
    controls: tuple[Name, ...]
    caches: tuple[CacheSpec, ...]
    logits: TensorSpec
    context: tuple[Name, ...] = ()
    vocabulary: Count | None = None
    chunked_prefill: bool = True
    extras: tuple[ExtraOutput, ...] = ()
    shares_context: bool = False
    shortlist: ShortlistSpec | None = None
    small_batch_limit: Index | None = None
    hidden_id: Index | None = None

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of the step input at each position: () for an id, (F,) for F numbers."""
        return tuple(int(size) for size in self.step.shape[2:])


class SpecialTokens(Struct, frozen=True):
    """Special ids of the step input's vocabulary.

    bos_token_ids: put before the generated tokens (encoder-decoder) or before the prompt (decoder-only).
    eos_token_ids: generation ends at any of them.
    pad_token_id: the padding; None if the model has none.
    """

    bos_token_ids: tuple[Index, ...] = ()
    eos_token_ids: tuple[Index, ...] = ()
    pad_token_id: Index | None = None

    @property
    def pads_alone(self) -> bool:
        """Whether the padding is not an id that decoding starts or ends with."""
        return self.pad_token_id not in (*self.bos_token_ids, *self.eos_token_ids)


SINGLE_LABEL = "single_label_classification"  # values of OutputMeaning.problem_type
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"


class OutputMeaning(Struct, frozen=True):
    """The meaning of the outputs of a single-pass model. Its task turns them into results.

    labels: names of the numbers of an output, in their order.
    problem_type: SINGLE_LABEL (softmax: one label applies), MULTI_LABEL (sigmoid: any number of labels apply) or
        REGRESSION (the numbers themselves).
    settings: further settings of the task, by the task's names.
    """

    labels: tuple[str, ...] = ()
    problem_type: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class Preprocessing(Struct, frozen=True):
    """The conversion of a raw input to a request input, for inputs that are not ids, types or masks.

    kind: the kind of the raw input: AUDIO, IMAGE or SERIES.
    numbers: sizes, means and rates, by the names of that kind.
    """

    kind: Annotated[str, msgspec.Meta(pattern="^(audio|image|series)$")]
    numbers: Mapping[str, Any] = field(default_factory=dict)


class Placeholder(Struct, frozen=True):
    """How the items of a request input, such as the images of a prompt, stand among the ids of the step input.

    The input has an axis of items after the batch axis. Each item has `positions` placeholders in the prompt, whose
    embeddings the encode stage computes: the placeholders of a row take them in order.

    token_id: the id of a placeholder.
    marker: the text that stands for an item in a caller's text; empty in a file without a tokenizer.
    replacement: the text that replaces a marker before the text is tokenized.
    grids: "rows x columns" of an image that is cut into tiles → the texts before, between and after the tiles'
        placeholders. Each tile is an item. Empty for images that are one item each.
    """

    token_id: Index
    positions: Count
    marker: str = ""
    replacement: str = ""
    grids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class SessionSettings(Struct, frozen=True):
    """Default settings of the onnxruntime session on the CPU.

    threads: threads of one operator; None: one per core.
    spinning: whether waiting threads spin, which is faster if no other process needs the cores.
    disabled_optimizers: fusions into CPU kernels that are slower than the nodes that they replace. By default
        SkipLayerNormalization and BiasGelu, as measured (docs/design/kernels.md#norms-and-sums).
    """

    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)] | None = None
    spinning: bool = True
    disabled_optimizers: tuple[str, ...] = ("SkipLayerNormFusion", "BiasGeluFusion")


class Manifest(Struct, frozen=True):
    """The content of a manifest. The module's docstring describes the stages.

    tokenizers: texts in the JSON format of the tokenizers library.
    tokenizer_of: name of an input → index of its tokenizer.
    chat_template: a Jinja text that turns a conversation into a prompt, as in transformers.
    chat_tokens: the special tokens that the template may name, such as bos_token, and their texts.
    output_meaning: the meaning of the results of a single-pass model.
    preprocessing: name of an input → conversion of a raw input to it.
    placeholders: name of a request input → how its items stand in the prompt. A file with placeholders takes a prompt
        besides its request inputs, and a request may have no items. A row of context that holds NaN stands for no item.
    devices: the devices whose operators the file has, the best one first: "cpu", "cuda", "wasm" (WebAssembly in a
        browser) and "webgpu".
    precision: the type of matrix products and caches: "fp32", "fp16" or "bf16".
    session: default settings of the CPU session.
    adapters: the names of the adapters among which each request chooses; their numbers begin with 1.
    kernel_forms: computation → the form of it that was measured to be the fastest; empty in a file with the exporter's
        defaults.
    weight_bits: bits → the number of weights that the file stores in so many bits.
    max_length_cause: why no sequence is longer, in words; empty for a single-pass model.
    stored_products: the stored forms of quantised products. A runtime that computes a product in another way needs its
        record; a product without one runs as the operators that the graph has.
    parity, quantization, weight_bits, max_length_cause, optimized_for, kernel_forms, producer: for people. The
        runtime shows them and does not interpret them.
    """

    task: str
    max_length: Index
    encode: EncodeStage | None
    decode: DecodeStage | None
    special_tokens: SpecialTokens = SpecialTokens()
    tokenizers: tuple[str, ...] = ()
    tokenizer_of: Mapping[str, Index] = field(default_factory=dict)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    target: str = "cpu"
    devices: tuple[Name, ...] = DEVICES_OF_TARGET["cpu"]
    precision: str = "fp32"
    quantization: str = "none"
    max_length_cause: str = ""
    weight_bits: Mapping[Bits, Index] = field(default_factory=dict)
    optimized_for: str = ""
    session: SessionSettings = SessionSettings()
    kernel_forms: Mapping[str, str] = field(default_factory=dict)
    source_digest: str = ""
    producer: Mapping[str, str] = field(default_factory=dict)
    parity: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    chat_tokens: Mapping[str, str] = field(default_factory=dict)
    output_meaning: OutputMeaning = OutputMeaning()
    preprocessing: Mapping[str, Preprocessing] = field(default_factory=dict)
    adapters: tuple[Name, ...] = ()
    placeholders: Mapping[str, Placeholder] = field(default_factory=dict)
    stored_products: StoredProducts = StoredProducts()
    version: int = MANIFEST_VERSION

    @property
    def staged(self) -> bool:
        """Whether the graph holds both stages, in one `If`."""
        return self.encode is not None and self.decode is not None

    @property
    def lacks_records(self) -> bool:
        """Whether the file has quantised products without records, because an earlier exporter wrote it."""
        return self.version == VERSION_WITHOUT_PRODUCTS and self.quantization != "none"

    @property
    def takes_prompt(self) -> bool:
        """Whether a text of the caller is the beginning of the step input, and not the source of an encoder."""
        return self.decode is not None and (self.encode is None or bool(self.placeholders))

    @property
    def encoded(self) -> tuple[TensorSpec, ...]:
        """The outputs of the encode stage without its extra outputs; empty if there is no encode stage."""
        return self.encode.outputs if self.encode else ()

    @property
    def extras(self) -> tuple[ExtraOutput, ...]:
        """The extra outputs of both stages."""
        return tuple(extra for stage in (self.encode, self.decode) if stage for extra in stage.extras)

    def adapter_number(self, name: str | None) -> int:
        """Return the number of an adapter; 0 for BASE_ADAPTER and None. Raise OptionError for another name."""
        if name in (None, BASE_ADAPTER):
            return 0
        if not self.adapters:
            raise OptionError(
                f"adapter={name!r} names an adapter and the file holds none: export the model with --adapters FOLDER",
                option="adapter",
            )
        if name not in self.adapters:
            raise OptionError(
                f"adapter must be one of {', '.join((BASE_ADAPTER, *self.adapters))}, not {name!r}", option="adapter"
            )
        return 1 + self.adapters.index(name)

    def adapter_input(self, name: str | None) -> dict[str, npt.NDArray[np.int64]]:
        """Return the input that chooses an adapter, without its batch axis; empty for a file without adapters.

        Raise OptionError as `adapter_number`.
        """
        number = self.adapter_number(name)
        return {ADAPTER_INPUT: np.array(number, np.int64)} if self.adapters else {}

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest: all fields, of their types and within their bounds, and no others.

        `manifest_checks` has the rules that concern several fields. A file of VERSION_WITHOUT_PRODUCTS has none stored.
        Raise ModelFileError if it is damaged, or of a version that this runtime does not read.
        """
        try:
            data = msgspec.json.decode(text)
            version = data["version"]
            if type(version) is not int:
                raise TypeError
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError, KeyError, TypeError) as error:
            raise ModelFileError("the file's tformer manifest is damaged: export the model again") from error
        if version > MANIFEST_VERSION:
            raise ModelFileError(
                f"the file's manifest has version {version} and this runtime reads version {MANIFEST_VERSION}: "
                "upgrade tformer"
            )
        if version == VERSION_WITHOUT_PRODUCTS:
            data.setdefault("stored_products", msgspec.to_builtins(StoredProducts()))
        elif version < MANIFEST_VERSION:
            raise ModelFileError(
                f"the file was written by an earlier tformer (its manifest has version {version}, this runtime reads "
                f"version {MANIFEST_VERSION}): export the model again"
            )
        return read_typed(cls, data, "the file's tformer manifest is damaged")
