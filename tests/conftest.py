"""Settings of all tests: each process of pytest-xdist is bound to one core, because threads that share a core wait for
each other.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No test depends on the speed or the load of the machine.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything: read when huggingface_hub is imported
# One thread of OpenMP for each process, read when torch is imported: two on one core take five times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: a collection would visit a million objects that stay alive."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _disable_torch_trace_log() -> None:
    """Remove the handlers of the trace log. torch formats pages of text for each trace if the log has a handler, and
    pytest adds a handler to loggers that do not propagate.
    """
    from torch._logging._internal import trace_log

    trace_log.handlers.clear()
    trace_log.propagate = True


@pytest.fixture(scope="session", autouse=True)
def _cache_torchlib_registry() -> Iterator[None]:
    """Cache the operator table of torch.onnx, which takes half a second to read and is read for each stage."""
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read_registry = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(opset_version: int = TORCHLIB_OPSET) -> ONNXRegistry:
        registry = copy.copy(read_registry(opset_version))
        registry.functions = {name: [*overloads] for name, overloads in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield
