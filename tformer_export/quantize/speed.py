"""The speed of a quantised file, measured with the kernels with which the runtime opens it on this machine."""

from __future__ import annotations

from collections.abc import Callable

from tformer_runtime.backend.native_kernels import kernels_for, reason_without_kernels
from tformer_runtime.engine.engine import Engine


def measured_as_run(before: Engine, after: Engine, ratio: Callable[[Engine, Engine], float]) -> tuple[float, str]:
    """Return how many times as fast as before a file is, and the kernels with which both ran, in words.

    before, after: engines without native kernels. Where the runtime uses native kernels, both files are opened again.
    ratio: measures two engines.
    Memory: that of two more sessions, where there are native kernels.
    """
    if all(kernels_for(engine.manifest) is None for engine in (before, after)):
        return ratio(before, after), f"onnxruntime's operators ({reason_without_kernels(after.manifest)})"
    before, after = (Engine(engine.session.path, "cpu", manifest=engine.manifest) for engine in (before, after))
    try:
        reason = after.session.reason_without_kernels
        return ratio(before, after), after.session.kernels or f"onnxruntime's operators ({reason})"
    finally:
        before.close()
        after.close()


def speed_text(speed: float, kernels: str) -> str:
    """Return a speed in words, for a report."""
    return f"{speed:.1f} × the unquantised file, one row, with {kernels}{': slower' * (speed < 1)}"
