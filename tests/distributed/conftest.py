"""A cluster of Ray, which the tests of a session share, and small model files."""

from __future__ import annotations

import pytest
from support.ray_clusters import ray_cluster
from support.toy_models import Toy
from support.toy_tasks import TEXT_TASKS, write


@pytest.fixture(scope="session")
def cluster():
    with ray_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Return kind → model file. "letters" generates letters from letters."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {**TEXT_TASKS, "places": {"output": "places"}}
    paths = {name: write(folder / f"{name}.onnx", **how) for name, how in kinds.items()}
    return {**paths, "letters": Toy(seed=27).write(folder / "letters.onnx")}
