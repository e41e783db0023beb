"""What an export found and measured: for the caller, for `--report`, and as a table on standard error."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tformer_export.common.quantization import THROUGHPUT
from tformer_export.quantize import Degradation, Mixture, OutputDegradation, Product
from tformer_export.shortlist import Measured
from tformer_export.tune.tune import Tuning
from tformer_export.verify.report import ParityReport


def write_json(path: str | os.PathLike[str], report: dict[str, Any]) -> None:
    """Written beside its place and renamed."""
    target = Path(path)
    beside = target.with_name(target.name + ".partial")
    beside.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    beside.replace(target)


@dataclass
class ExportReport:
    """seconds: stage → time. found: what the compiler recognised, by name. size: the file's bytes, weights included.
    peak_memory: the most that the process has held resident since it began, bytes; the loaded model is part of it.

    activations: what scales the numbers that products read; found tells how many of them are "fixed" and "by_row".
    cache: what keys and values of earlier positions are held in.
    degradation: what quantisation cost, against the unquantised file; None without quantisation. mixture: of bits, and
    those that were tried; None unless quantisation is mixed. products: what is quantised, by name. optimized_for: which
    kernels quantised products have, and what was tuned for; empty without either. tuning: the forms that were measured
    on this machine, and those that were kept; None where the defaults were taken as they are.
    shortlist: what it does on its data; None without one.
    """

    path: str
    source: str
    task: str
    target: str
    precision: str
    quantization: str
    activations: str
    cache: str
    max_length: int
    parameters: int
    size: int
    parity: ParityReport
    found: dict[str, int]
    degradation: Degradation | OutputDegradation | None = None
    mixture: Mixture | None = None
    optimized_for: str = ""
    products: dict[str, Product] = field(default_factory=dict)
    tuning: Tuning | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    shortlist: Measured | None = None

    @property
    def max_abs_error(self) -> float:
        """The largest difference of a logit between the unquantised file and the source."""
        return self.parity.max_abs_error

    @property
    def tokens_equal(self) -> bool:
        """Whether every greedy token that was compared is the source's."""
        return self.parity.tokens_equal == self.parity.tokens

    @property
    def _once(self) -> str:
        if self.parity.forecast is not None:
            return "none: all steps are forecast at once"
        return f"none: it is run once for an input ({self.task}); to generate, name the input that grows (--step)"

    @property
    def _fed_back(self) -> str:
        return f"fed back step by step, {self.parity.forecast_allowed:.1e} allowed" if self.max_length else "in units"

    @property
    def _caches(self) -> str:
        count = self.found.get("caches", 0)
        return f"{count} tensors" if self.cache == "float" else f"{count} tensors in {self.cache}"

    @property
    def _numbers(self) -> str:
        if self.precision != "fp32":
            return self.precision
        quantised = self.quantization != "none" and self.optimized_for
        return f"{self.quantization} for {self.optimized_for}" if quantised else self.quantization

    @property
    def _lacks_few(self) -> bool:
        """Whether kernels for few rows were asked for and no product has one."""
        asked = self.quantization != "none" and self.optimized_for not in ("", THROUGHPUT)
        return asked and not any(product.few for product in self.products.values())

    @property
    def _parity(self) -> str:
        parity = self.parity
        what = "Δ" if parity.forecast is not None else "Δlogit"
        text = f"max |{what}| {self.max_abs_error:.1e} ({parity.relative_error:.1e} of the range"
        if parity.exact_error is not None:
            text += f", {parity.tolerance:.1e} allowed; {parity.exact_error:.1e} before rounding"
        return f"{text})" + (f" on {parity.device}" if parity.exact_error is not None else "")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "parity": self.parity.to_dict()}

    def write(self, path: str | os.PathLike[str]) -> None:
        """As JSON, written beside its place and renamed."""
        write_json(path, self.to_dict())

    def rows(self) -> list[tuple[str, str]]:
        """The summary, as label and text."""
        found = self.found
        rows = [
            ("source", f"{self.source}, {self.parameters:,} parameters"),
            ("file", ", ".join((self.path, f"{self.size / 1e6:.1f} MB", self.target, self._numbers))),
            ("cached", f"{self._caches} a step, {found.get('context', 0)} a request")
            if self.max_length
            else ("decoding", self._once),
            ("fused", f"{found.get('attentions', 0)} attentions, {found.get('fused', 0)} of them with their cache"),
            *([("maximum length", f"{self.max_length}")] if self.max_length else []),
            ("parity", self._parity),
        ]
        if (raw := self.parity.raw) is not None:
            counted = {"texts": raw.texts, "pairs": raw.pairs, "images": raw.images, "sounds": raw.sounds}
            compared = ", ".join(f"{count} {what}" for what, count in counted.items() if count)
            same = f"max |Δ| {raw.error:.1e} ({raw.relative:.1e} of the range)"
            if raw.tokens:
                same = f"{raw.tokens} tokens equal"
            rows.append(("from raw inputs", f"{same}, {compared}"))
        if self.parity.forecast is not None:
            rows.append(("forecast", f"max |Δ| {self.parity.forecast:.1e} of the range, {self._fed_back}"))
        elif self.max_length:
            rows.append(("greedy tokens", f"{self.parity.tokens_equal} of {self.parity.tokens} equal"))
        if found.get("grouped"):
            rows.append(("experts", f"{found['grouped']} products by group: a step reads the experts that it needs"))
        rows += [(name, f"max |Δ| {error:.1e}") for name, error in self.parity.extras.items()]
        if self.activations == "fixed":
            both = found.get("fixed", 0) + found.get("by_row", 0)
            rows.append(
                ("fixed scales", f"{found.get('fixed', 0)} of {both} values that products read, the others by row")
            )
        if self._lacks_few:
            rows.append(("few rows", "no product of the decode stage has a kernel of its own for them"))
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
