"""The buffers that a call of onnxruntime reads and writes, which a closed session takes away from their owners."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tformer_runtime.base.errors import UnsupportedCallError


def closed_error() -> UnsupportedCallError:
    """Return the error of a call of a closed model."""
    return UnsupportedCallError("the model is closed: load the file again with Model.load()")


class Binding:
    """An IOBinding of onnxruntime, until its session is closed.

    An IOBinding keeps its session alive. Conversations, prefixes and unfinished streams hold bindings as long as their
    owners like, so that a session could not go without them.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(self, native: Any) -> None:
        self._native: Any = native

    @property
    def native(self) -> Any:
        """The IOBinding. It is kept alive by whoever uses it. Raise UnsupportedCallError if the session is closed."""
        native = self._native
        if native is None:
            raise closed_error()
        return native

    def release(self) -> None:
        """Drop the IOBinding. A run that uses it at this moment ends with it."""
        self._native = None


class Bindings:
    """The bindings of a session that are alive. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may close the session
        self._alive: weakref.WeakSet[Binding] = weakref.WeakSet()
        self._closed = False

    def new(self, native: Any) -> Binding:
        """Return a binding. Raise UnsupportedCallError after `close`."""
        binding = Binding(native)
        with self._lock:
            if self._closed:
                raise closed_error()
            self._alive.add(binding)
        return binding

    def close(self) -> None:
        """Release all bindings, and refuse new ones."""
        with self._lock:
            self._closed = True
            bindings = list(self._alive)
        for binding in bindings:
            binding.release()
