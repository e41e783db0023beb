"""The models of a server, by name: each is a file and its `AsyncModel`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tformer_runtime.async_model import AsyncModel
from tformer_runtime.base.errors import OptionError
from tformer_runtime.format.open_files import OpenFiles
from tformer_runtime.model import Model
from tformer_serve.capabilities import capabilities_of, missing_packages
from tformer_serve.errors import ApiError, names_in_words
from tformer_serve.logs import log

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@dataclass(frozen=True)
class ModelFile:
    """A file to serve, and the name by which clients call it."""

    name: str
    path: Path

    @classmethod
    def parse(cls, argument: str) -> ModelFile:
        """Return the file of NAME=FILE, or of FILE, whose stem is then the name. Raise OptionError for another name."""
        name, equals, path = argument.partition("=")
        if not equals:
            name, path = Path(argument).stem, argument
        if not _NAME.fullmatch(name):
            raise OptionError(
                f"{name!r} is not a name for a model: give one of letters, digits, '.', '_', '-', ':' and '/' as "
                "NAME=FILE"
            )
        return cls(name, Path(path))


@dataclass(eq=False)
class ServedModel:
    """A loaded model. max_batch_size: rows that are decoded together. uses: by requests that have not ended."""

    name: str
    model: Model
    max_batch_size: int
    uses: int = 0

    @cached_property
    def capabilities(self) -> dict[str, Any]:
        """The paths of the model, and facts for its form."""
        return capabilities_of(self.model.manifest)

    @property
    def files(self) -> OpenFiles:
        """The file of the model and its second file."""
        return self.model.engine.session.files

    def start(self, max_pending: int) -> None:
        """Start the thread that decodes. max_pending: requests that the server may open at once."""
        for sentence in missing_packages(self.model.manifest):
            log("missing package", logging.WARNING, model=self.name, message=sentence)
        self.aio = AsyncModel(self.model, self.max_batch_size, max_pending)

    async def close(self) -> None:
        """End all requests with an error and the thread, and free the weights."""
        await self.aio.close()
        self.model.close()


_HELD: ContextVar[list[ServedModel] | None] = ContextVar("held", default=None)  # by the request


class Models(Mapping[str, ServedModel]):
    """The models of a server, by name. For one event loop.

    Work on untrusted definitions has threads of its own, so that it delays neither the event loop nor the reading of
    other inputs: `templates` fills in chat templates, `constraints` compiles grammars.

    files: name → the file of a model.
    """

    def __init__(self, files: Sequence[ModelFile], max_batch_size: int, **settings: Any) -> None:
        """Load nothing yet. settings: of `Model.load`. Raise OptionError for two files of one name."""
        self.files = {file.name: file for file in files}
        if len(self.files) < len(files):
            names = [file.name for file in files]
            twice = next(name for name in names if names.count(name) > 1)
            raise OptionError(f"two files have the name {twice!r}: name them apart, as NAME=FILE")
        self._models: dict[str, ServedModel] = {}
        self._max_batch_size, self._settings, self._max_pending = max_batch_size, settings, 1
        self._retired: set[ServedModel] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self.templates = ThreadPoolExecutor(1, "templates")  # the process of templates fills in one at a time
        self.constraints = ThreadPoolExecutor(1, "constraints")
        self.closed = False

    @classmethod
    def load(cls, files: Sequence[ModelFile], max_batch_size: int, **settings: Any) -> Models:
        """Load files. Arguments and errors: see `Models` and `load_file`."""
        models = cls(files, max_batch_size, **settings)
        models._models = {name: models.load_file(name) for name in models.files}
        return models

    def load_file(self, name: str) -> ServedModel:
        """Load the file of a model, without serving it. Any thread may call it. Raise the errors of `Model.load`."""
        model = Model.load(self.files[name].path, **self._settings)
        return ServedModel(name, model, self._max_batch_size)

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def named(self, name: str) -> ServedModel:
        """Return the model that a request names, which stays open until its end. Raise ApiError if there is none."""
        if name not in self._models:
            known = names_in_words(list(self.files))
            message = f"there is no model {name[:200]!r}: this server has {known}"
            raise ApiError(404, message, "model_not_found", "model")
        self.hold(self._models[name])
        return self._models[name]

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Release the models that the block has held at its end."""
        held: list[ServedModel] = []
        token = _HELD.set(held)
        try:
            yield
        finally:
            _HELD.reset(token)
            for served in held:
                served.uses -= 1
                self._close_if_unused(served)

    def hold(self, served: ServedModel) -> None:
        """Keep a model open until the end of the request, which runs within `holding`."""
        held = _HELD.get()
        if held is not None:
            held.append(served)
            served.uses += 1

    def start(self, max_pending: int) -> None:
        """Start the threads that decode. max_pending: requests that the server may open at once."""
        self._max_pending = max_pending
        for served in self.values():
            served.start(max_pending)

    def add(self, served: ServedModel) -> None:
        """Serve a model from now on. The one of its name, if there is one, is closed after its last request."""
        served.start(self._max_pending)
        former = self._models.get(served.name)
        self._models[served.name] = served
        if former is not None:
            self.retire(former)

    def retire(self, served: ServedModel) -> None:
        """Close a model after its last request."""
        self._retired.add(served)
        self._close_if_unused(served)

    def _close_if_unused(self, served: ServedModel) -> None:
        if served.uses or served not in self._retired:
            return
        self._retired.discard(served)
        if self._models.get(served.name) is served:
            del self._models[served.name]
        task = asyncio.ensure_future(served.close())
        self._closings.add(task)  # the loop itself keeps no task
        task.add_done_callback(self._closings.discard)

    def failed(self) -> list[str]:
        """Return the names of the models whose threads an error has ended. A reload or another process heals them."""
        return [] if self.closed else [name for name, served in self.items() if served.aio.closed]

    async def changed(self) -> list[str]:
        """Return the names of the models whose files were changed in place. Loading the files again heals them.

        A thread looks: after a change of the times it reads a whole file.
        """
        files = [(name, served.files) for name, served in self.items()]
        return await asyncio.to_thread(lambda: [name for name, each in files if each.has_changed()])

    async def close(self) -> None:
        """End all requests with an error, and all threads."""
        self.closed = True
        await asyncio.gather(*(served.aio.close() for served in (*self.values(), *self._retired)), *self._closings)
        for executor in (self.templates, self.constraints):
            executor.shutdown(wait=False, cancel_futures=True)
