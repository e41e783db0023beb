"""The report of an export: for the caller, for `--report`, and as a table on standard error."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tformer_export.calibration.samples import CalibrationLines
from tformer_export.common.option_values import STATIC, THROUGHPUT
from tformer_export.quantize import Degradation, Mixture, OutputDegradation, Product
from tformer_export.shortlist import ShortlistMeasurement
from tformer_export.tune.tune import Tuning
from tformer_export.verify.report import ParityReport
from tformer_runtime.base.whole_files import replaced_file
from tformer_runtime.format.info import weight_bits_text
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.tasks import generates

MAX_SHOWN = 3  # attentions that were not recognised


def write_json(path: str | os.PathLike[str], report: dict[str, Any]) -> None:
    """Write the report as JSON, atomically. Raises OutputError if it cannot be written."""
    with replaced_file(Path(path)) as file:
        file.write((json.dumps(report, indent=2) + "\n").encode())


def tokenizer_gaps(manifest: Manifest) -> tuple[str, ...]:
    """Return a sentence for each tokenizer that has no token for ids of the model, or tokens of other ids."""
    generated = int(manifest.decode.logits.shape[-1]) if generates(manifest) and manifest.decode is not None else 0
    read = {spec.name: spec.vocabulary for spec in (manifest.encode.inputs if manifest.encode else ())}
    if manifest.decode is not None:
        read[manifest.decode.step.name] = manifest.decode.vocabulary
    sentences = []
    for name, number in manifest.tokenizer_of.items():
        ids = set(Tokenizer.from_str(manifest.tokenizers[number]).get_vocab().values())
        is_step = manifest.decode is not None and name == manifest.decode.step.name
        if is_step and (silent := generated - len(ids & {*range(generated)})):
            sentences.append(
                f"{silent} of the {generated} ids that the model generates have no token: they add no text to a "
                "result, as in transformers, and are among its token_ids"
            )
        size = read.get(name)
        if size and (beyond := sum(i >= size for i in ids)):
            sentences.append(
                f"{beyond} tokens are beyond the {size} ids that {name} takes: a text that needs one is refused"
            )
    return tuple(sentences)


@dataclass
class ExportReport:
    """The properties and measurements of an exported file.

    path: the file.
    source: the name of the model.
    task: its task, by transformers' names.
    target, precision, quantization, activation_scales, kv_cache: options of the export.
    max_length: the longest sequence; 0 for a single-pass model.
    parameters: the number of parameters of the model.
    size: bytes of the file, weights included.
    weight_bits: bits → the number of weights that the file stores in so many bits.
    parity: the comparison with the source.
    counts: name → count of recognised parts. "static_scales" and "row_scales" count inputs of quantised products.
    unrecognised: each softmax over positions that was not recognised as that of an attention, with its line and the
        reason. It is computed operation by operation.
    max_length_cause: why no sequence is longer, such as the line of the model that allows none; "" for a single-pass
        model.
    input_limits: name → the most positions of an input that the file reads once, where there is a limit.
    degradation: the loss of quality against the unquantised file; None without quantisation.
    mixture: the chosen mixture of bits, and the measured ones; None unless the quantisation is mixed.
    optimized_for: the goal of the kernels of quantised products and of tuning; empty without either.
    products: the quantised products, by name.
    calibration: the lines of `--calibration`; None without it, and for a series.
    tuning: the forms that were measured on this machine; None without tuning.
    seconds: name of a phase → its time.
    peak_memory: the peak resident memory of the process in bytes, the loaded model included.
    shortlist: its effect on its data; None without one.
    adapters: the names of the adapters among which requests choose.
    tokenizer_gaps: a sentence for each tokenizer that has other ids than the model.
    """

    path: str
    source: str
    task: str
    target: str
    precision: str
    quantization: str
    activation_scales: str
    kv_cache: str
    max_length: int
    parameters: int
    size: int
    parity: ParityReport
    counts: dict[str, int]
    weight_bits: dict[str, int] = field(default_factory=dict)
    unrecognised: tuple[str, ...] = ()
    max_length_cause: str = ""
    input_limits: dict[str, int] = field(default_factory=dict)
    degradation: Degradation | OutputDegradation | None = None
    mixture: Mixture | None = None
    optimized_for: str = ""
    products: dict[str, Product] = field(default_factory=dict)
    calibration: CalibrationLines | None = None
    tuning: Tuning | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    shortlist: ShortlistMeasurement | None = None
    adapters: tuple[str, ...] = ()
    tokenizer_gaps: tuple[str, ...] = ()

    @property
    def max_abs_error(self) -> float:
        """The largest difference of a logit between the unquantised file and the source."""
        return self.parity.max_abs_error

    @property
    def tokens_equal(self) -> bool:
        """Whether every greedy token that was compared is the source's."""
        return self.parity.tokens_equal == self.parity.tokens

    @property
    def _single_pass_text(self) -> str:
        if self.parity.forecast is not None:
            return "none: all steps are forecast at once"
        return f"none: a single-pass model ({self.task}); to generate, name the input that grows (--step-input)"

    @property
    def _feedback_text(self) -> str:
        return f"fed back step by step, {self.parity.forecast_allowed:.1e} allowed" if self.max_length else "in units"

    @property
    def _cache_text(self) -> str:
        count = self.counts.get("caches", 0)
        return f"{count} tensors" if self.kv_cache == "float" else f"{count} tensors in {self.kv_cache}"

    @property
    def _recomputed_text(self) -> str:
        if self.counts.get("at_one_length"):
            return f"the whole model, for {self.max_length} positions in each step: a lower maximum length is faster"
        return f"{self.counts['recomputed']} parts of the model, for all positions so far in each step"

    @property
    def _precision_text(self) -> str:
        if self.precision != "fp32":
            return self.precision
        quantized = self.quantization != "none" and self.optimized_for
        if quantized:
            return f"{self.quantization} for {self.optimized_for}"
        return self.precision if self.quantization == "none" else self.quantization

    @property
    def _lacks_few_rows_kernel(self) -> bool:
        """Whether the options include kernels for few rows and no product has one."""
        is_asked = self.quantization != "none" and self.optimized_for not in ("", THROUGHPUT)
        return is_asked and not any(product.few for product in self.products.values())

    @property
    def _parity_text(self) -> str:
        parity = self.parity
        symbol = "Δ" if parity.forecast is not None else "Δlogit"
        text = f"max |{symbol}| {self.max_abs_error:.1e} ({parity.relative_error:.1e} of the range"
        if parity.exact_error is not None:
            text += f", {parity.tolerance:.1e} allowed; {parity.exact_error:.1e} before rounding"
        return f"{text})" + (f" on {parity.device}" if parity.exact_error is not None else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the JSON report."""
        return {**asdict(self), "parity": self.parity.to_dict()}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, atomically."""
        write_json(path, self.to_dict())

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary as pairs of label and text."""
        counts = self.counts
        rows = [
            ("source", f"{self.source}, {self.parameters:,} parameters"),
            *([("adapters", ", ".join(self.adapters))] if self.adapters else []),
            ("file", ", ".join((self.path, f"{self.size / 1e6:.1f} MB", self.target, self._precision_text))),
            *([("weights", weight_bits_text(self.weight_bits))] if self.weight_bits else []),
            ("cached", f"{self._cache_text} a step, {counts.get('context', 0)} a request")
            if self.max_length
            else ("decoding", self._single_pass_text),
            ("fused", f"{counts.get('attentions', 0)} attentions, {counts.get('fused', 0)} of them with their cache"),
            *[("not fused", text) for text in dict.fromkeys(self.unrecognised[:MAX_SHOWN])],
            *([("recomputed", self._recomputed_text)] if counts.get("recomputed") else []),
            *([("maximum length", f"{self.max_length}, {self.max_length_cause}")] if self.max_length else []),
            *[(f"at most, {name}", f"{limit} positions") for name, limit in self.input_limits.items()],
            *[("tokenizer", sentence) for sentence in self.tokenizer_gaps],
            ("parity", self._parity_text),
        ]
        if (raw := self.parity.raw) is not None:
            counted = {"texts": raw.texts, "pairs": raw.pairs, "images": raw.images, "recordings": raw.recordings}
            compared = ", ".join(f"{count} {kind}" for kind, count in counted.items() if count)
            same = f"max |Δ| {raw.error:.1e} ({raw.relative:.1e} of the range)"
            if raw.tokens:
                same = f"{raw.tokens} tokens equal"
            rows.append(("from raw inputs", f"{same}, {compared}"))
        if self.parity.forecast is not None:
            rows.append(("forecast", f"max |Δ| {self.parity.forecast:.1e} of the range, {self._feedback_text}"))
        elif self.max_length:
            rows.append(("greedy tokens", f"{self.parity.tokens_equal} of {self.parity.tokens} equal"))
        if counts.get("packed_weights"):
            rows.append(("kept", f"{counts['packed_weights']} weights in the 4-bit integers of the source"))
        if counts.get("grouped"):
            rows.append(("experts", f"{counts['grouped']} products by group: a step reads the experts that it needs"))
        rows += [(name, f"max |Δ| {error:.1e}") for name, error in self.parity.extras.items()]
        if self.activation_scales == STATIC:
            both = counts.get("static_scales", 0) + counts.get("row_scales", 0)
            rows.append(
                ("static scales", f"{counts.get('static_scales', 0)} of {both} inputs of products, the others per row")
            )
        if self._lacks_few_rows_kernel:
            rows.append(("few rows", "no product of the decode stage has a kernel of its own for them"))
        if self.calibration is not None:
            rows.append(("calibration", str(self.calibration)))
        if self.degradation is not None:
            rows += self.degradation.rows()
        if self.mixture is not None:
            rows += self.mixture.rows()
        if self.shortlist is not None:
            rows += self.shortlist.rows()
        if self.tuning is not None:
            rows += self.tuning.table()
        rows.append(("peak memory", f"{self.peak_memory / 1e9:.1f} GB"))
        rows.append(("seconds", ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())))
        return rows
