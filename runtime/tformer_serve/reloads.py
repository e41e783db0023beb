"""Loading the files of a server again, while it serves.

A new file is loaded and verified next to the old one. Requests that have begun finish with the old model, and later
ones get the new model. If the new file cannot be served, the old model stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

from tformer_runtime.base.errors import ModelFileError, TformerError, error_summary, typed_memory_error
from tformer_serve.logs import log
from tformer_serve.metrics import Metrics
from tformer_serve.registry import Models, ServedModel

Outcome = Literal["reloaded", "unchanged", "failed"]


@dataclass(frozen=True)
class Reload:
    """What became of a model. digest: of the file that is served now; None if it has none. error: why it failed."""

    model: str
    outcome: Outcome
    digest: str | None
    error: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the JSON of a response."""
        facts = {"id": self.model, "object": "model.reload", "outcome": self.outcome, "digest": self.digest}
        return facts if self.error is None else {**facts, "error": self.error}


class Reloader:
    """Loads the files of models again. For one event loop."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self._models, self._metrics = models, metrics
        self._turn = asyncio.Lock()

    async def reload(self, reason: str) -> list[Reload]:
        """Load the files that are not those that are served, one after another. Log and count each.

        A call that comes during another one begins after it.
        """
        async with self._turn:
            log("reloading", reason=reason)
            return [await self._reload(name) for name in self._models.files if name in self._models]

    async def _reload(self, name: str) -> Reload:
        path, served, began_at = self._models.files[name].path, self._models[name], time.monotonic()
        error: BaseException | None = None
        try:
            outcome = await self._replace(name, served)
        except Exception as raised:
            outcome, error = "failed", raised
        result = Reload(name, outcome, self._models[name].files.digest, None if error is None else _sentence(error))
        foreseen = error is None or isinstance(error, (TformerError, MemoryError))
        log(
            "reload",
            logging.INFO if error is None else logging.ERROR,
            None if foreseen else error,
            model=name,
            file=str(path),
            outcome=outcome,
            digest=result.digest,
            seconds=round(time.monotonic() - began_at, 3),
            message=result.error,
        )
        self._metrics.add_reload(name, outcome)
        return result

    async def _replace(self, name: str, served: ServedModel) -> Outcome:
        models = self._models
        if not served.aio.closed and await asyncio.to_thread(served.files.are_current):
            return "unchanged"
        new = await asyncio.to_thread(models.load_file, name)
        try:
            _check_task(served, new)
            if models.closed:
                raise ModelFileError("the server is stopping")
        except BaseException:
            new.model.close()
            raise
        models.add(new)
        return "reloaded"


def _check_task(served: ServedModel, new: ServedModel) -> None:
    """Raise ModelFileError for a model that cannot answer the requests of the one that is served."""
    task, lost = (
        new.model.manifest.task,
        [path for path in served.capabilities["paths"] if path not in new.capabilities["paths"]],
    )
    if task != served.model.manifest.task or lost:
        which = f"the task {task!r}" if not lost else f"the task {task!r} and no {', '.join(lost)}"
        raise ModelFileError(
            f"{new.model.engine.session.path} has {which}, and {served.name} serves {served.model.manifest.task!r}: "
            "start the server again to serve another kind of model"
        )


def _sentence(error: BaseException) -> str:
    error = typed_memory_error(error)
    return str(error) if isinstance(error, TformerError) else f"an error that was not foreseen, {error_summary(error)}"
