"""The distance of an engine's next-token distributions from the source's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

WINDOWS, REFERENCE = "windows.npy", "reference.npy"  # ids (windows, length + 1), and the source's logits of the first
Windowed = Mapping[str, Sequence[float]]


def compare(folder: Path, logits_of: Callable[[np.ndarray], np.ndarray]) -> dict[str, list[float]]:
    """Return figures of each window: nats of its tokens, the divergence, and the share of equal top-1 tokens.

    folder: with WINDOWS and REFERENCE. logits_of: from ids (length,) to logits (length, V).
    """
    windows, reference = np.load(folder / WINDOWS), np.load(folder / REFERENCE, mmap_mode="r")
    figures: dict[str, list[float]] = {"loss": [], "divergence": [], "same": []}
    for ids, wanted in zip(windows, reference, strict=True):
        logits = np.asarray(logits_of(ids[:-1]))
        here, there = _log_softmax(logits), _log_softmax(wanted)
        figures["loss"].append(float(-here[np.arange(len(logits)), ids[1:]].mean()))
        figures["divergence"].append(float((np.exp(there) * (there - here)).sum(-1).mean()))
        figures["same"].append(float((logits.argmax(-1) == wanted.argmax(-1)).mean()))
    return figures


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def summary(figures: Windowed, source: Windowed) -> dict[str, float]:
    """Return the perplexity, its growth over the source's with the standard error, and the means of the other figures.

    Errors are those of windows: both sides read the same ones, so their differences vary less than their losses.
    """
    loss, base = np.array(figures["loss"]), np.array(source["loss"])
    grown, error = _mean(loss - base)
    divergence, divergence_error = _mean(np.array(figures["divergence"]))
    same, same_error = _mean(np.array(figures["same"]))
    return {
        "perplexity": float(np.exp(loss.mean())),
        "growth": float(np.expm1(grown)),
        "growth_error": float(np.exp(grown) * error),
        "divergence": divergence,
        "divergence_error": divergence_error,
        "same": same,
        "same_error": same_error,
    }


def _mean(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
