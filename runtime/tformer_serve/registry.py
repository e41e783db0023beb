"""The models of a server, by name: each is a file and its `AsyncModel`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tformer_runtime.async_model import AsyncModel
from tformer_runtime.base.errors import OptionError
from tformer_runtime.model import Model
from tformer_serve.abilities import abilities_of, missing_packages
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
                f"{name!r} is no name for a model: give one of letters, digits, '.', '_', '-', ':' and '/' as NAME=FILE"
            )
        return cls(name, Path(path))


@dataclass
class ServedModel:
    """A loaded model. max_batch_size: rows that are decoded together."""

    name: str
    model: Model
    max_batch_size: int
    created: int

    @cached_property
    def abilities(self) -> dict[str, Any]:
        """The paths of the model, and facts for its form."""
        return abilities_of(self.model.manifest)

    def start(self, max_pending: int) -> None:
        """Start the thread that decodes. max_pending: requests that the server may open at once."""
        for sentence in missing_packages(self.model.manifest):
            log("missing package", logging.WARNING, model=self.name, message=sentence)
        self.aio = AsyncModel(self.model, self.max_batch_size, max_pending)


class Models(Mapping[str, ServedModel]):
    """The models of a server, by name.

    Work on untrusted definitions has threads of its own, so that it delays neither the event loop nor the reading of
    other inputs: `templates` fills in chat templates, `constraints` compiles grammars.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {served.name: served for served in models}
        self.templates = ThreadPoolExecutor(1, "templates")  # the process of templates fills in one at a time
        self.constraints = ThreadPoolExecutor(1, "constraints")
        self.closed = False

    @classmethod
    def load(cls, files: Sequence[ModelFile], max_batch_size: int, **settings: Any) -> Models:
        """Load files. settings: of `Model.load`. Raise its errors, and OptionError for two files of one name."""
        names = [file.name for file in files]
        for name in names:
            if names.count(name) > 1:
                raise OptionError(f"two files have the name {name!r}: name them apart, as NAME=FILE")
        loaded = []
        for file in files:
            model = Model.load(file.path, **settings)
            loaded.append(ServedModel(file.name, model, max_batch_size, _modified(file.path)))
        return cls(loaded)

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def named(self, name: str) -> ServedModel:
        """Return the model that a request names. Raise ApiError if there is none."""
        if name not in self._models:
            known = names_in_words(list(self._models))
            message = f"there is no model {name[:200]!r}: this server has {known}"
            raise ApiError(404, message, "model_not_found", "model")
        return self._models[name]

    def start(self, max_pending: int) -> None:
        """Start the threads that decode."""
        for served in self.values():
            served.start(max_pending)

    def failed(self) -> list[str]:
        """Return the names of the models whose threads an error has ended. Only another process heals them."""
        return [] if self.closed else [name for name, served in self.items() if served.aio.closed]

    async def close(self) -> None:
        """End all requests with an error, and all threads."""
        self.closed = True
        await asyncio.gather(*(served.aio.close() for served in self.values()))
        for executor in (self.templates, self.constraints):
            executor.shutdown(wait=False, cancel_futures=True)


def _modified(path: Path) -> int:
    """Return the time of the latest change of a file, in seconds of Unix."""
    try:
        return int(path.stat().st_mtime)
    except OSError:  # such as a file that was removed after it was loaded
        return 0
