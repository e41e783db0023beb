"""The options of `export`: one table for the Python API, the checks, the command line and the documentation.

Each field of `Quantization`, `Task` (`common/task.py`), `ExtraOutputs` and `ExportOptions` holds its help text, its
allowed values and its form on the command line. `export` takes the first three as one argument each. Checks of single
options and of combinations are here. `ExportOptions.for_model` checks them against a model.

To add an option:

1. Add the field to its dataclass, with `option(…)`. Allowed values are a tuple in `common/option_values.py`. The flag
   of `tformer-export` and its help, which is also in the documentation, are made of it.
2. If the text of the flag is not yet the value, convert it in `cli._options`. For a new form of text, add a `Kind` to
   `common/option_table.py` and its case to `cli._click_option`.
3. Check the value and its combinations in `__post_init__`, and what depends on the model in `for_model`.
4. A field of `ExportOptions` is also an argument of `api.export`, which documents it and passes it on. A field of
   `Task` is also a field of `SourceOverrides` in `sources/finish.py`, which `SourceOverrides.of` sets and `finish`
   applies.
   Fields of `Quantization` and `ExtraOutputs` need neither.
5. Read the option where it has its effect: `build.py` passes the options, or single ones, to the phases. Add a phase of
   its own to `phases`.
6. If the user should see it, add it to `ExportReport`, and to the manifest if the runtime needs it.
7. Describe it in `docs/exporting.md`, or in the page of its subject.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
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
    from tformer_export.normalise.attention_weights import AttentionSelection
    from tformer_export.sources import Source

Adapters = Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]]

ADAPTERS_FLAG = "--adapters"
DEFAULT_HALF = "fp16"  # of files for CUDA
PRECISIONS = ("fp32", *HALF_PRECISIONS)


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a file: of its weights, of the inputs of its products, and of its cache.

    Raises OptionError for values that do not exist or do not go together.
    """

    weights: str = option(
        "none",
        "Store weights as 8-bit or 4-bit integers. mixed chooses 4, 6 or 8 bits or float for each matrix: the fewest "
        "bits within --max-degradation, or the least loss within --max-bits.",
        flag="--quantize",
        choices=QUANTIZATIONS,
    )
    activation_scales: str = option(
        PER_ROW,
        "Choose how the inputs of quantised matrix products are scaled to integers. per-row: each row has its own "
        "scale. static: scales are learnt from the calibration data, or from random ids. This is faster for many rows, "
        "but values beyond the range of those data are clipped.",
        flag="--activation-scales",
        choices=ACTIVATION_SCALES,
    )
    kv_cache: str = option(
        "float",
        "Store cached keys and values as floats or as 8-bit integers. int8 takes a quarter of the memory. It makes "
        "steps after long prompts faster, and the reading of prompts slower.",
        flag="--kv-cache",
        choices=KV_CACHES,
    )
    calibration: str | os.PathLike[str] | None = option(
        None,
        "Fit the integers to the data in this file (GPTQ), and measure the quality on a quarter of them. Lines are "
        "texts, names of image files, JSON, or a source, a tab and a target. A forecaster takes a series (CSV, .npy).",
        "file",
        flag="--calibration",
        metavar="FILE",
    )
    max_degradation: float | str | DegradationBudget | None = option(
        None,
        "Refuse a quantised file if more than this share of tokens changes (1% or 0.01), or if the perplexity grows by "
        "more than this factor (1.02x). A single-pass model has a share only: of inputs whose class changes, or the "
        "loss of mean cosine similarity. The default for mixed is 1.01x, or 1% for a single-pass model.",
        flag="--max-degradation",
        metavar="SHARE",
    )
    max_bits: float | None = option(
        None,
        "With mixed, let the matrices take at most this many bits for each weight, with their scales, such as 4.8. Of "
        "the mixtures that fit, the file has the largest.",
        "number",
        flag="--max-bits",
        metavar="BITS",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.activation_scales != PER_ROW and self.weights == "none":
            raise OptionError(
                f"{self.activation_scales} activation scales are for quantised products: quantize to int8 or int4 too"
            )
        if self.calibration is not None and not Path(self.calibration).is_file():
            raise OptionError(f"there is no file {self.calibration} to calibrate with")
        if self.max_bits is not None and (self.weights != "mixed" or not 0 < self.max_bits < math.inf):
            raise OptionError("max_bits is a number of bits, such as 4.8, for quantization 'mixed' alone")
        budget = DegradationBudget.of(self.max_degradation)
        unused = "calibration" if self.calibration is not None else "max_degradation" if budget.is_set else None
        if not self.quantizes and unused is not None:
            raise OptionError(
                f"{unused} is for a quantised file: choose quantization 'int8', 'int4' or 'mixed', or an int8 kv_cache"
            )

    @classmethod
    def of(cls, value: str | Quantization) -> Quantization:
        """Return a `Quantization`, or make one from the name of a form of weights.

        Raises OptionError for other values.
        """
        if isinstance(value, Quantization):
            return value
        if value not in QUANTIZATIONS:
            raise OptionError(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}, or a Quantization, not {value!r}",
                option="quantization",
            )
        return cls(value)

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantised: weights, the cache or both."""
        return self.weights != "none" or self.kv_cache != "float"


@dataclass(frozen=True)
class ExtraOutputs:
    """Outputs of a file in addition to the logits. Each step computes them, even if no caller requests them."""

    cross_attentions: AttentionSelection | None = option(
        None,
        "Output the weights of cross-attention: the mean over all layers, over the last layer (last), or over given "
        "layers and layer:head pairs, counted from 0 (2,3:0).",
        "layers",
        flag="--cross-attentions",
        metavar="[LAYERS]",
    )
    hidden_states: str | Sequence[str] = option(
        (),
        "Output the result of this submodule, such as encoder.layers.0; repeatable.",
        "names",
        flag="--hidden-states",
        metavar="NAME",
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
    """The options of one export. Raises OptionError for values that do not exist or do not go together."""

    quantization: Quantization = Quantization()
    extra_outputs: ExtraOutputs = ExtraOutputs()
    target: str = option(
        "cpu",
        "Choose the device that runs the file. web uses operators with WebGPU kernels, and computes quantised products "
        "in float. portable uses standard ONNX operators only.",
        flag="--target",
        choices=TARGET_NAMES,
    )
    precision: str | None = option(
        None,
        "Choose the floats of matrix products and caches. fp16 and bf16 need --target cuda. fp16 is the default there "
        "for a file that is not quantised; bf16 is for values beyond the range of fp16. Logits are always fp32.",
        flag="--precision",
        choices=PRECISIONS,
    )
    optimize_for: str = option(
        THROUGHPUT,
        "Choose the kernels of quantised matrix products. throughput: the result of a row is the same alone and in any "
        "batch, and the file takes the least memory. latency: steps of one or two rows (up to three with 4 bits) are "
        "faster. They round differently from larger batches, and the decoder's weights are in memory twice.",
        flag="--optimize-for",
        choices=OPTIMIZATION_GOALS,
    )
    max_length: int | None = option(
        None,
        "Set the longest sequence, in tokens or steps.  [default: the limit of the model, at most 512]",
        "length",
        flag="--max-length",
    )
    shortlist: str | os.PathLike[str] | None = option(
        None,
        "Learn from the lines of this file, in the form of --calibration, which target ids are likely for a source, "
        "and compute only their logits. For an encoder-decoder that reads ids.",
        "file",
        flag="--shortlist",
        metavar="FILE",
    )
    adapters: Adapters = option(
        (),
        "Put these PEFT adapters (LoRA) into the file next to the model: folders, or org/name of the Hugging Face hub. "
        "NAME=FOLDER chooses a name; by default it is that of the folder. Each request chooses an adapter by its name.",
        "names",
        flag=ADAPTERS_FLAG,
        metavar="FOLDER ...",
    )
    golden: str | os.PathLike[str] | None = option(
        None,
        "Write seeded requests and their results to this file, by which a runtime in another language proves that it "
        "reads the model right.",
        "file",
        flag="--golden",
        metavar="OUT.json",
    )
    tune: bool = option(
        False,
        "Measure on this machine which implementations of operators are the fastest, and use them in the file.",
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
        if self.quantization.activation_scales != PER_ROW and self.target == "web":
            raise OptionError(
                f"products of the target web read floats, without {self.quantization.activation_scales} activation "
                "scales: leave out either of them"
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
        if self.adapters and self.shortlist is not None:
            raise OptionError("a shortlist is learned from the model without its adapters: leave out either of them")
        if self.shortlist is not None and not Path(self.shortlist).is_file():
            raise OptionError(f"there is no file {self.shortlist} to learn a shortlist from")

    def for_model(self, source: Source) -> ExportOptions:
        """Return these options for a model. Raises OptionError for options that the model cannot have."""
        if source.packed_weights:
            self._check_packed()
        from tformer_export.normalise.attention_weights import check_has_attentions  # --help needs no torch

        is_single_pass = source.step_input is None
        check_has_attentions(source, self.extra_outputs.cross_attentions, self.extra_outputs.attentions)
        if self.shortlist is not None and (is_single_pass or not set(source.caller_inputs) - {source.step_input}):
            raise no_encoder()
        if self.shortlist is not None and self.target in ("cuda", "web"):
            raise OptionError(
                f"a shortlist is for files that run on the CPU: leave out either it or the target {self.target}"
            )
        if self.shortlist is not None and not any(
            not value.is_floating_point()
            for name, value in source.example.items()
            if name in source.caller_inputs and name != source.step_input
        ):
            raise no_source_ids()
        if source.series is not None:
            self.budget.with_unit(COSINE)  # numbers have no perplexity
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

    def _check_packed(self) -> None:
        """Raise OptionError for options that change or replace weights which the source stores in 4-bit integers."""
        asked = {
            f"--quantize {self.quantization.weights}": self.quantization.weights != "none",
            f"--target {self.target}": self.target != "cpu",
            "--tune": self.tune,
            "--shortlist": self.shortlist is not None,
        }
        if wrong := [flag for flag, is_asked in asked.items() if is_asked]:
            raise OptionError(
                "the weights of this model are 4-bit integers already, which the file keeps and computes with on the "
                f"CPU: leave out {', '.join(wrong)}, or give the unquantised model"
            )

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
        return self.optimize_for == THROUGHPUT and self.target != "web" and not floats


def no_encoder() -> OptionError:
    return OptionError(
        "a shortlist goes from the ids that an encoder reads to those that a decoder writes, and this model has not "
        "both: export it without --shortlist"
    )


def no_source_ids() -> OptionError:
    return OptionError(
        "a shortlist goes from the ids of a source to those of its target, and the encoder of this model reads no ids: "
        "export it without --shortlist"
    )


def phases(options: ExportOptions) -> list[str]:
    """Return the names of the phases of an export in their order. Some run twice."""
    names = ["load", "capture", "analysis", "staging", "lowering", "passes"]
    names += ["tune"] if options.tune else []
    names += ["verify"]
    names += ["half"] if options.half is not None else []
    names += ["calibrate", "search", "quantize", "measure"] if options.quantization.quantizes else []
    names += ["shortlist"] if options.shortlist is not None else []
    names += ["golden"] if options.golden is not None else []
    return [*names, "write"]
