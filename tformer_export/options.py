"""What is asked of a file: options of `export`, checked each alone, together, and against the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tformer_export.analysis.attention_weights import Wanted
from tformer_export.common.degradation_budget import COSINE, Budget
from tformer_export.common.kernel_choices import Forms, session_settings
from tformer_export.common.quantization import ACTIVATIONS, CACHES, GOALS, QUANTIZATIONS, ROWS, THROUGHPUT
from tformer_export.lowering.target import TARGETS
from tformer_export.passes.half_precision import HALVES
from tformer_export.sources import Source
from tformer_runtime.base.errors import OptionError
from tformer_runtime.format.manifest import Manifest

DEFAULT_HALF = "fp16"  # of files for CUDA


@dataclass(frozen=True)
class Asked:
    """Options of `export`, which says what they are.

    half: the half precision of the file, None for float32. calibration, shortlist: files of lines.
    """

    quantize: str
    optimize_for: str
    activations: str
    cache: str
    target: str
    half: str | None
    budget: Budget
    calibration: Path | None
    min_speed: float | None
    max_length: int | None
    alignments: Wanted | None
    hidden: Sequence[str]
    attention: bool
    shortlist: Path | None
    tune: bool

    @classmethod
    def of(
        cls,
        *,
        quantize: str,
        optimize_for: str,
        activations: str,
        cache: str,
        target: str,
        precision: str | None,
        max_degradation: float | str | Budget | None,
        calibration: str | os.PathLike[str] | None,
        min_speed: float | None,
        max_length: int | None,
        alignments: Wanted | None,
        hidden: str | Sequence[str],
        attention: bool,
        shortlist: str | os.PathLike[str] | None,
        tune: bool,
    ) -> Asked:
        """As `export` is given them. OptionError for what cannot be, or not together."""
        _check(quantize, optimize_for, cache, target, tune)
        if activations not in ACTIVATIONS:
            raise OptionError(f"activations is one of {', '.join(ACTIVATIONS)}, not {activations!r}")
        if activations != ROWS and quantize == "none":
            raise OptionError(
                f"{activations} activations are those of quantised products: quantize to int8 or int4 too"
            )
        return cls(
            quantize=quantize,
            optimize_for=optimize_for,
            activations=activations,
            cache=cache,
            target=target,
            half=_half(precision, target, quantize),
            budget=Budget.of(max_degradation),
            calibration=Path(calibration) if calibration is not None else None,
            min_speed=min_speed,
            max_length=max_length,
            alignments=alignments,
            hidden=[hidden] if isinstance(hidden, str) else list(dict.fromkeys(hidden)),
            attention=attention,
            shortlist=Path(shortlist) if shortlist is not None else None,
            tune=tune,
        )

    def __post_init__(self) -> None:
        if self.calibration is not None and not self.calibration.is_file():
            raise OptionError(f"there is no file {self.calibration} to calibrate with")
        if not self.fewer_bits and (self.calibration is not None or self.min_speed is not None):
            raise OptionError(
                "calibration and min_speed are for a quantised file: choose quantize='int8', 'int4' or 'mixed', or "
                "cache='int8'"
            )
        if self.shortlist is not None and not self.shortlist.is_file():
            raise OptionError(f"there is no file {self.shortlist} to learn a shortlist from")

    def of_model(self, source: Source) -> Asked:
        """What that means for a model. OptionError for what it cannot have."""
        once = source.step is None
        if self.shortlist is not None and (once or not set(source.example) - {source.step, *source.masks}):
            raise no_encoder()
        if self.shortlist is not None and self.target == "cuda":
            raise OptionError("a shortlist is for files that run on the CPU: leave out either it or the target cuda")
        if not once:
            return self
        if self.optimize_for != THROUGHPUT and not self.tune:  # which says for which batches, too
            raise OptionError(
                f"{self.optimize_for} chooses kernels for steps of two or three tokens, and a model that is run once "
                f"reads its input whole: leave it at {THROUGHPUT}"
            )
        if self.cache != "float":
            raise OptionError("a model that is run once has no cache: leave it at float")
        return replace(self, budget=self.budget.over(COSINE))

    def in_forms(self, manifest: Manifest, forms: Forms) -> Manifest:
        """The manifest of a file that was tuned, or is being."""
        return replace(manifest, optimized_for=self.optimize_for, forms=forms, session=session_settings(forms))

    @property
    def fewer_bits(self) -> bool:
        """Whether anything is quantised: weights, caches or both."""
        return self.quantize != "none" or self.cache != "float"

    @property
    def exact(self) -> bool:
        """Whether a row's result is the same alone and in any batch. Products of floats are not to the last digit, and
        what is rounded after them may be to the next integer."""
        floats = self.cache != "float" and self.quantize in ("none", "mixed")
        return self.optimize_for == THROUGHPUT and not floats


def no_encoder() -> OptionError:
    return OptionError(
        "a shortlist goes from the ids that an encoder reads to those that a decoder writes, and this model has not "
        "both: export it without --shortlist"
    )


def _check(quantize: str, optimize_for: str, cache: str, target: str, tune: bool) -> None:
    if quantize not in QUANTIZATIONS:
        raise OptionError(f"quantize is one of {', '.join(QUANTIZATIONS)}, not {quantize!r}")
    if optimize_for not in GOALS:
        raise OptionError(f"optimize_for is one of {', '.join(GOALS)}, not {optimize_for!r}")
    if optimize_for != THROUGHPUT and quantize == "none" and not tune:
        raise OptionError(
            f"{optimize_for} chooses among kernels of quantised products: quantize to int8 or int4 too, or tune"
        )
    if optimize_for != THROUGHPUT and target != "cpu":
        raise OptionError(
            f"{optimize_for} needs onnxruntime's own operator for few rows, as measured on the CPU: leave out either "
            f"it or the target {target}"
        )
    if target not in TARGETS:
        raise OptionError(f"target is one of {', '.join(TARGETS)}, not {target!r}")
    if cache not in CACHES:
        raise OptionError(f"cache is one of {', '.join(CACHES)}, not {cache!r}")
    if cache != "float" and target != "cpu":
        raise OptionError(
            f"caches in {cache} need onnxruntime's own operator, as measured on the CPU: leave out either them or the "
            f"target {target}"
        )
    if tune and target != "cpu":
        raise OptionError(
            f"tune measures on this machine's CPU, which says nothing of the target {target}: leave out either of them"
        )


def _half(precision: str | None, target: str, quantize: str) -> str | None:
    """The half precision that is asked for, or None for float32. OptionError for what cannot be had."""
    if precision is None:
        return DEFAULT_HALF if target == "cuda" and quantize == "none" else None
    if precision not in ("fp32", *HALVES):
        raise OptionError(f"precision is one of fp32, {', '.join(HALVES)}, not {precision!r}")
    if precision == "fp32":
        return None
    if target != "cuda":
        raise OptionError(
            f"{precision} is for the target cuda: onnxruntime has no products of it for CPUs, and would convert every "
            "weight at every step; to read less, quantise to int8 or int4"
        )
    if quantize != "none":
        raise OptionError(f"a quantised file computes in fp32 beside its integers: leave out {precision} or {quantize}")
    return precision
