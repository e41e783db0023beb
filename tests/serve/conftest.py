"""Servers of tiny models, which tests share, and the same models for comparison."""

from __future__ import annotations

import pytest
from support.served_tasks import write_tasks
from support.servers import RunningServer, write_chat_model
from support.toy_models import Toy

from tformer_runtime import Model


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Return name → file: an encoder-decoder, a decoder-only model of letters, and a model with a chat template."""
    folder = tmp_path_factory.mktemp("serve")
    return {
        "pronounce": Toy(seed=27, extras=True).write(folder / "pronounce.onnx"),
        "letters": Toy(seed=5, encoder=False).write(folder / "letters.onnx"),
        "chat": write_chat_model(folder / "chat.onnx"),
    }


@pytest.fixture(scope="session")
def references(files):
    """Return name → a model that no server has."""
    return {name: Model.load(path, "cpu", threads=1) for name, path in files.items()}


@pytest.fixture(scope="module")
def server(files):
    with RunningServer(files) as running:
        yield running


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    """Return name → file of tasks that do not generate."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def task_models(task_files):
    """Return name → a model that no server has."""
    return {name: Model.load(path, "cpu", threads=1) for name, path in task_files.items()}


@pytest.fixture(scope="session")
def task_server(task_files, files):
    with RunningServer({**task_files, "letters": files["letters"]}) as running:
        yield running
