"""Tests run beside each other, one process on each core: threads that share a core only wait for each other."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No test depends on how fast the machine is, or on what else it does.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_configure() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_finish() -> None:
    """What is imported stays: there is no use in looking through a million objects again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _torch_tells_nobody() -> None:
    """pytest listens to loggers that do not propagate, and torch writes pages on each trace for whoever listens."""
    from torch._logging._internal import trace_log

    trace_log.handlers.clear()
    trace_log.propagate = True


@pytest.fixture(scope="session", autouse=True)
def _operators_are_read_once() -> Iterator[None]:
    """torch.onnx reads its table of operators for each stage that it writes: half a second, some hundreds of times."""
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(opset_version: int = TORCHLIB_OPSET) -> ONNXRegistry:
        registry = copy.copy(read(opset_version))
        registry.functions = {name: [*known] for name, known in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield
