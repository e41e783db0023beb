"""A cluster of Ray, which the tests of a session share, and small model files."""

from __future__ import annotations

import pytest
from support.ray_clusters import ray_cluster
from support.toy_models import Toy
from support.toy_tasks import WORDS, write

from tformer_runtime.format import manifest as m


@pytest.fixture(scope="session")
def cluster():
    with ray_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Return kind → model file. "letters" generates letters from letters."""
    folder = tmp_path_factory.mktemp("models")
    spans = m.OutputMeaning(("O", "B-A", "I-A", "B-B", "I-B", "I-C"))
    mask = m.OutputMeaning(settings={"mask": WORDS.index("old")})
    kinds = {
        "vector": {},
        "states": {},
        "places": {},
        "scores": {},
        "spans": {"output": "states", "task": "token-classification", "output_meaning": spans},
        "answers": {
            "output": "places",
            "task": "question-answering",
            "output_meaning": m.OutputMeaning(settings={"first": 1}),
        },
        "masks": {"output": "states", "task": "fill-mask", "output_meaning": mask},
    }
    paths = {name: write(folder / f"{name}.onnx", **{"output": name, **how}) for name, how in kinds.items()}
    return {**paths, "letters": Toy(seed=27).write(folder / "letters.onnx")}
