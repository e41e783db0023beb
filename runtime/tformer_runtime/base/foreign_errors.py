"""Errors of packages in other languages. A panic of Rust is a BaseException that `except Exception` misses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tformer_runtime.base.errors import TformerError


@contextmanager
def foreign_errors(replacement: Callable[[BaseException], TformerError]) -> Iterator[None]:
    """Replace any error, a panic too, by an error for the user. Errors of this project and interruptions stay."""
    try:
        yield
    except (TformerError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise replacement(error) from error
