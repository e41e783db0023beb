"""Ray: its start, and workers that compute tasks and may die.

A worker is an actor that holds a model. If its process or its machine dies, another one takes its place, and computes
its task again. A task whose workers die several times ends the job: it may be what kills them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tformer_runtime.base.errors import DeviceError, TformerError, UnsupportedCallError, error_summary
from tformer_runtime.base.extras import import_optional

MAX_DEATHS = 3  # of workers, with one task or before their first
_POLL_SECONDS = 30.0


class Named(Protocol):
    """A task. name: no other task has it."""

    @property
    def name(self) -> str: ...


TaskT = TypeVar("TaskT", bound=Named)


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """Yield the module ray, connected to the cluster of RAY_ADDRESS, to that of this machine, or to a new one.

    Raise MissingExtraError without Ray, DeviceError if the cluster cannot be reached.
    """
    ray = import_optional("ray", "--ray needs Ray", "ray")
    # Ray prints pages about each process that dies.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if ray.is_initialized():
            yield ray
        else:
            with _started(ray):
                yield ray


@contextlib.contextmanager
def _started(ray: Any) -> Iterator[None]:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise DeviceError(f"Ray cannot start, or cannot reach its cluster: {error_summary(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def fitting_workers(ray: Any, cpus: int, gpus: int) -> int:
    """Return how many workers the machines of the cluster hold together. Raise DeviceError if none holds one."""
    places = 0
    for node in ray.nodes():
        if node["Alive"]:
            has: Mapping[str, float] = node["Resources"]
            by_gpus = has.get("GPU", 0) // gpus if gpus else has.get("CPU", 0)
            places += int(min(has.get("CPU", 0) // cpus, by_gpus))
    if not places:
        raise DeviceError(
            f"no machine of the cluster has {cpus} CPUs{f' and {gpus} GPU' if gpus else ''} for a worker: give fewer "
            "--threads, or other machines"
        )
    return places


class Workers(Generic[TaskT]):
    """Workers that compute tasks. A context manager, which ends them.

    An actor has the methods `load`, before its first task, and `run` of a task. Errors that they raise end the job.
    """

    def __init__(self, ray: Any, new_actor: Callable[[], Any], count: int, warn: Callable[[str], None]) -> None:
        """
        new_actor: makes an actor. count: of the workers.
        warn: writes a sentence about a worker that died.
        """
        self._ray, self._new_actor, self._count, self._warn = ray, new_actor, count, warn
        self._running: dict[Any, tuple[Any, TaskT | None]] = {}  # reference of a call → its actor, and its task
        self._idle: list[Any] = []
        self._deaths: Counter[str] = Counter()  # by the name of the task; "" before the first task

    def __enter__(self) -> Workers[TaskT]:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in [*self._idle, *(actor for actor, _ in self._running.values())]:
            self._end(actor)

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it has died, or the cluster has
            self._ray.kill(actor)

    def results(self, tasks: Sequence[TaskT]) -> Iterator[tuple[TaskT, Any]]:
        """Yield each task with its result, once, as soon as it is computed."""
        waiting = deque(tasks)
        for _ in range(min(self._count, len(tasks))):
            self._start()
        while waiting or any(task is not None for _, task in self._running.values()):
            while self._idle and waiting:
                task = waiting.popleft()
                actor = self._idle.pop()
                self._running[actor.run.remote(task)] = actor, task
            done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL_SECONDS)
            for reference in done:
                actor, finished = self._running.pop(reference)
                result = self._result(reference, actor, finished)
                if result is _DIED:
                    if finished is not None:
                        waiting.appendleft(finished)
                    self._start()
                    continue
                self._idle.append(actor)
                if finished is not None:
                    yield finished, result

    def _start(self) -> None:
        actor = self._new_actor()
        self._running[actor.load.remote()] = actor, None

    def _result(self, reference: Any, actor: Any, task: TaskT | None) -> Any:
        """Return the result of a call; _DIED if its worker has died. Raise the error that the call raised."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            self._end(actor)
            cause = error.cause
            if isinstance(cause, TformerError):
                raise cause from None
            raise
        except errors.RayError as error:
            self._end(actor)
            self._count_death(task, error)
            return _DIED

    def _count_death(self, task: TaskT | None, error: Exception) -> None:
        name = task.name if task is not None else ""
        self._deaths[name] += 1
        work = f"computed {name}" if task is not None else "loaded the model"
        if self._deaths[name] >= MAX_DEATHS:
            raise UnsupportedCallError(
                f"{MAX_DEATHS} workers died while they {work} ({error_summary(error)}): they may need more "
                "memory, fewer --workers or a smaller --batch-size"
            ) from error
        self._warn(f"a worker died while it {work}; another one takes its place")


_DIED = object()
