"""Settings of all tests: each process of pytest-xdist is bound to one core, because threads that share a core wait for
each other.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tformer_runtime.base.extras import disable_telemetry

# No test depends on the speed or the load of the machine.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything: read when huggingface_hub is imported
# One thread of OpenMP for each process, read when torch is imported: two on one core take five times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
disable_telemetry()  # tests import onnxruntime themselves
YOUNG_OBJECTS = 10_000  # before a collection: an export makes 600,000, and Python would collect 800 times


def pytest_configure() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_finish() -> None:
    gc.set_threshold(YOUNG_OBJECTS)
    _freeze_objects()


def pytest_runtest_setup() -> None:
    """Exclude what the tests so far have imported and cached as well, once it has cost a collection of all objects."""
    if _num_full_collections() > _collections_at_freeze:
        _freeze_objects()


_collections_at_freeze = 0


def _freeze_objects() -> None:
    """Exclude all objects from garbage collection: a collection would visit a million objects that stay alive."""
    global _collections_at_freeze
    gc.collect()
    gc.freeze()
    _collections_at_freeze = _num_full_collections()


def _num_full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


@pytest.fixture(scope="session", autouse=True)
def _disable_torch_trace_log() -> None:
    """Remove the handlers of the trace log. torch formats pages of text for each trace if the log has a handler, and
    pytest adds a handler to loggers that do not propagate.
    """
    from torch._logging._internal import trace_log

    trace_log.handlers.clear()
    trace_log.propagate = True
