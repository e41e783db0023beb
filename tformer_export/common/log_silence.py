"""Silence of loggers for a while: torch.onnx and torch.export report their progress and doubts on loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK

TRACE_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence loggers with these names: their errors are raised as well, and explained.

    Levels are process-wide, so exports of other threads wait.
    """
    with TORCH_PATCH_LOCK:
        loggers = [logging.getLogger(name) for name in names]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
