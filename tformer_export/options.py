"""The options of `export`: one table for the Python API, the checks, the command line and the documentation.

Each field of `Quantization`, `Task` (`common/task.py`), `ExtraOutputs` and `ExportOptions` holds its help text, its
allowed values and its form on the command line. `export` takes the first three as one argument each. Checks of single
options and of combinations are here. `ExportOptions.for_model` checks them against a model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tformer_export.common.degradation_budget import COSINE, DegradationBudget
from tformer_export.common.option_table import check_choices, option
from tformer_export.common.option_values import (
    ACTIVATION_SCALES,
    HALF_PRECISIONS,
    KV_CACHES,
    OPTIMIZATION_GOALS,
    PER_ROW,
    QUANTIZATIONS,
    TARGET_NAMES,
    THROUGHPUT,
)
from tformer_runtime.base.errors import OptionError

if TYPE_CHECKING:  # --help needs neither torch nor onnx
    from tformer_export.analysis.attention_weights import AttentionSelection
    from tformer_export.sources import Source

DEFAULT_HALF = "fp16"  # of files for CUDA
PRECISIONS = ("fp32", *HALF_PRECISIONS)


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a file: of its weights, of the inputs of its products, and of its cache.

    OptionError for values that do not exist or do not go together.
    """

    weights: str = option(
        "none",
        "Store weights as 8-bit or 4-bit integers. mixed chooses 4 bits, 8 bits or float for each matrix: the fewest "
        "bits within --max-degradation.",
        flag="--quantize",
        choices=QUANTIZATIONS,
    )
    activation_scales: str = option(
        PER_ROW,
        "Scales of the inputs of quantised products. per-row: each row has its own. static: learnt from the "
        "calibration data, or from random ids; faster for many rows, but rows louder than those data are clipped.",
        flag="--activation-scales",
        choices=ACTIVATION_SCALES,
    )
    kv_cache: str = option(
        "float",
        "Store cached keys and values as floats or as 8-bit integers. int8 takes a quarter of the memory and makes "
        "steps after long prompts faster and prompts slower.",
        flag="--kv-cache",
        choices=KV_CACHES,
    )
    calibration: str | os.PathLike[str] | None = option(
        None,
        "Fit the integers to these data, with GPTQ, and measure on a quarter of them: lines of text, of names of "
        "images, of source, tab and target, or of JSON; or a series.",
        "file",
        flag="--calibration",
        metavar="FILE",
    )
    max_degradation: float | str | DegradationBudget | None = option(
        None,
        "Refuse a file that changes more than this share of tokens (1% or 0.01), or that multiplies the perplexity by "
        "more (1.02x). For a single-pass model: the share of rows whose class changes, or the loss of mean "
        "cosine. The default for mixed is 1.01x, or 1% for a single-pass model.",
        flag="--max-degradation",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.activation_scales != PER_ROW and self.weights == "none":
            raise OptionError(
                f"{self.activation_scales} activation scales are for quantised products: quantize to int8 or int4 too"
            )
        if self.calibration is not None and not Path(self.calibration).is_file():
            raise OptionError(f"there is no file {self.calibration} to calibrate with")
        if not self.quantizes and self.calibration is not None:
            raise OptionError(
                "calibration is for a quantised file: choose quantization 'int8', 'int4' or 'mixed', or an int8 "
                "kv_cache"
            )
        DegradationBudget.of(self.max_degradation)

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantised: weights, the cache or both."""
        return self.weights != "none" or self.kv_cache != "float"


@dataclass(frozen=True)
class ExtraOutputs:
    """Outputs of a file in addition to the logits. Each step computes them, even if no caller requests them."""

    cross_attentions: AttentionSelection | None = option(
        None,
        "Output the weights of cross-attention: the mean of all layers (True), of the last layer (last), or of layers "
        "and heads such as 2,3:0, counted from 0.",
        "layers",
        flag="--cross-attentions",
        metavar="[LAYERS]",
    )
    hidden_states: str | Sequence[str] = option(
        (), "Output the result of this submodule; repeatable.", "names", flag="--hidden-states", metavar="NAME"
    )
    attentions: bool = option(
        False,
        "Output the weights of all attentions, for a single-pass model.",
        "switch",
        flag="--attentions",
    )

    @property
    def submodules(self) -> list[str]:
        """The names in `hidden_states`, each once."""
        return [self.hidden_states] if isinstance(self.hidden_states, str) else list(dict.fromkeys(self.hidden_states))


@dataclass(frozen=True)
class ExportOptions:
    """The options of one export. OptionError for values that do not exist or do not go together."""

    quantization: Quantization = Quantization()
    extra_outputs: ExtraOutputs = ExtraOutputs()
    target: str = option(
        "cpu",
        "The device of the file. portable has standard ONNX operators alone.",
        flag="--target",
        choices=TARGET_NAMES,
    )
    precision: str | None = option(
        None,
        "Floats of products and caches. fp16 and bf16 are for CUDA: fp16 is the default of a file that is not "
        "quantised, and bf16 is for values beyond fp16's range. Logits are fp32 in any case.",
        flag="--precision",
        choices=PRECISIONS,
    )
    optimize_for: str = option(
        THROUGHPUT,
        "Kernels of quantised products. throughput: a row's result is the same alone and in any batch, and memory is "
        "least. latency: steps of one or two rows (up to three with 4 bits) are faster. They round otherwise "
        "than larger batches, and the decoder's weights are held twice.",
        flag="--optimize-for",
        choices=OPTIMIZATION_GOALS,
    )
    max_length: int | None = option(
        None,
        "The longest sequence; by default the most that the model allows, up to 512.",
        "length",
        flag="--max-length",
    )
    shortlist: str | os.PathLike[str] | None = option(
        None,
        "Learn from lines, as of --calibration, which ids belong to a source, and compute the logits of these alone. "
        "For a model with an encoder that reads ids.",
        "file",
        flag="--shortlist",
        metavar="FILE",
    )
    tune: bool = option(
        False,
        "Measure on this machine which forms of operators are the fastest, and keep them.",
        "switch",
        flag="--tune",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.max_length is not None and (isinstance(self.max_length, bool) or self.max_length < 2):
            raise OptionError(f"max_length must be a whole number of at least 2, not {self.max_length!r}")
        kv_cache, weights = self.quantization.kv_cache, self.quantization.weights
        if self.optimize_for != THROUGHPUT and weights == "none" and not self.tune:
            raise OptionError(
                f"{self.optimize_for} chooses among kernels of quantised products: quantize to int8 or int4 too, or "
                "tune"
            )
        if self.optimize_for != THROUGHPUT and self.target != "cpu":
            raise OptionError(
                f"{self.optimize_for} needs onnxruntime's own operator for few rows, as measured on the CPU: leave out "
                f"either it or the target {self.target}"
            )
        if kv_cache != "float" and self.target != "cpu":
            raise OptionError(
                f"caches in {kv_cache} need onnxruntime's own operator, as measured on the CPU: leave out either them "
                f"or the target {self.target}"
            )
        if self.tune and self.target != "cpu":
            raise OptionError(
                f"tune measures on this machine's CPU, which says nothing of the target {self.target}: leave out "
                "either of them"
            )
        if self.precision not in (None, "fp32"):
            if self.target != "cuda":
                raise OptionError(
                    f"{self.precision} is for the target cuda: onnxruntime has no products of it for CPUs, and would "
                    "convert every weight at every step; to read less, quantise to int8 or int4"
                )
            if weights != "none":
                raise OptionError(
                    f"a quantised file computes in fp32 with its integers: leave out {self.precision} or {weights}"
                )
        if self.shortlist is not None and not Path(self.shortlist).is_file():
            raise OptionError(f"there is no file {self.shortlist} to learn a shortlist from")

    def for_model(self, source: Source) -> ExportOptions:
        """Return these options for a model. Raises OptionError for options that the model cannot have."""
        is_single_pass = source.step_input is None
        if self.shortlist is not None and (
            is_single_pass or not set(source.example) - {source.step_input, *source.masks}
        ):
            raise no_encoder()
        if self.shortlist is not None and self.target == "cuda":
            raise OptionError("a shortlist is for files that run on the CPU: leave out either it or the target cuda")
        if not is_single_pass:
            return self
        if self.optimize_for != THROUGHPUT and not self.tune:  # with tune it names the batches to measure, too
            raise OptionError(
                f"{self.optimize_for} chooses kernels for steps of two or three tokens, and a single-pass model "
                f"reads its input whole: leave it at {THROUGHPUT}"
            )
        if self.quantization.kv_cache != "float":
            raise OptionError("a single-pass model has no cache: leave kv_cache at float")
        return replace(self, quantization=replace(self.quantization, max_degradation=self.budget.with_unit(COSINE)))

    @property
    def half(self) -> str | None:
        """The half precision of the file; None for float32."""
        if self.precision is None:
            return DEFAULT_HALF if self.target == "cuda" and self.quantization.weights == "none" else None
        return None if self.precision == "fp32" else self.precision

    @property
    def budget(self) -> DegradationBudget:
        return DegradationBudget.of(self.quantization.max_degradation)

    @property
    def exact(self) -> bool:
        """Whether a row's result is the same alone and in any batch.

        Products of floats differ in the last digit, so that a value that is rounded after them may differ by one.
        """
        floats = self.quantization.kv_cache != "float" and self.quantization.weights in ("none", "mixed")
        return self.optimize_for == THROUGHPUT and not floats


def no_encoder() -> OptionError:
    return OptionError(
        "a shortlist goes from the ids that an encoder reads to those that a decoder writes, and this model has not "
        "both: export it without --shortlist"
    )


def phases(options: ExportOptions) -> list[str]:
    """Return the names of the phases of an export in their order. Some run twice."""
    names = ["load", "capture", "analysis", "staging", "lowering", "passes"]
    names += ["tune"] if options.tune else []
    names += ["verify"]
    names += ["half"] if options.half is not None else []
    names += ["calibrate", "search", "quantize", "measure"] if options.quantization.quantizes else []
    names += ["shortlist"] if options.shortlist is not None else []
    return [*names, "write"]
