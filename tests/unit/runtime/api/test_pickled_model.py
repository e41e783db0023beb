"""A Model goes to a spawned process as the arguments of its loading."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest
from support.toy_models import Toy

from tformer_runtime import MemoryBudgetError, Model


def generate(model, text):
    return model.generate(text, max_new_tokens=6).text


def test_model_works_in_a_spawned_process(tmp_path):
    path = Toy(seed=27).write(tmp_path / "toy.onnx")
    model = Model.load(path, "cpu", threads=1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(generate, (model, "hello")) == generate(model, "hello")


def test_options_of_loading_are_kept(tmp_path):
    path = Toy(seed=27).write(tmp_path / "toy.onnx")
    copy = pickle.loads(pickle.dumps(Model.load(path, "cpu", threads=1, max_memory=1)))
    assert (copy.device, copy.engine.session.threads) == ("cpu", 1)
    with pytest.raises(MemoryBudgetError):
        generate(copy, "hello")
