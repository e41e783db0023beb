"""A deadline of each run of a graph, so that no graph runs for ever.

The nodes of a graph without loops run once each, or as often as a tensor is long (Scan), so that its time grows with
its tensors. A Loop may run as often as it likes: such a graph has a deadline in any case. onnxruntime looks at its flag
between two nodes and between two iterations, so that a run ends with the node that exceeds the deadline.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tformer_runtime.base.errors import DeadlineError
from tformer_runtime.base.validation import MAX_TIMEOUT_SECONDS, invalid_value

LOOP_SECONDS = 600.0  # the deadline of a run of a graph with loops, if the caller sets none
_LOOPS = ("Loop", "BeamSearch", "WhisperBeamSearch", "GreedySearch", "Sampling")
_TERMINATED = "terminate flag"  # in onnxruntime's error

# NodeProto.op_type (field 4) with one of the names. A varint may have more bytes than it needs.
_LOOP_NODES = re.compile(
    b"|".join(
        rb"(?:\x22|\xa2\x80*\x00)(?:%b|%b\x80*\x00)%b" % (re.escape(bytes([n])), re.escape(bytes([n | 0x80])), name)
        for n, name in ((len(name), name.encode()) for name in _LOOPS)
    )
)


def has_loops(model: bytes) -> bool:
    """Return whether a model has operators that run their nodes any number of times. Cost: one pass over the bytes."""
    return any(name.encode() in model for name in _LOOPS) and _LOOP_NODES.search(model) is not None


def check_run_seconds(value: Any) -> float | None:
    """Return a deadline as float; None for none. Raise OptionError for another value."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_TIMEOUT_SECONDS:
        raise invalid_value("max_run_seconds", f"more than 0 and at most {MAX_TIMEOUT_SECONDS:,}", value)
    return float(value)


@contextmanager
def deadline_of(options: Any, seconds: float) -> Iterator[None]:
    """End a run in the `with` block after so many seconds, with a DeadlineError.

    options: onnxruntime's RunOptions of this run alone. Cost: 0.1 ms, for a thread.
    """
    timer = threading.Timer(seconds, lambda: setattr(options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if options.terminate and _TERMINATED in str(error):
            raise DeadlineError(
                f"the model did not end a run within {seconds:g} s and was stopped: give shorter inputs, or allow more "
                "with --max-run-seconds (max_run_seconds=…) if you trust the file"
            ) from error
        raise
    finally:
        timer.cancel()
