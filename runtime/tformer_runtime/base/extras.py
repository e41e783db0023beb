"""Optional dependencies, which are imported when they are needed, and named where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from tformer_runtime.base.errors import MissingExtraError


def library(name: str, needs: str, extra: str) -> Any:
    """A module of an extra. needs: the beginning of a sentence, what needs it. OSError is raised by one that is there,
    and a library in C beneath it is not."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{needs}: pip install 'tformer[{extra}]'") from error
    except (ImportError, OSError) as error:
        raise MissingExtraError(
            f"{needs}, which is installed and cannot be loaded ({error}): install it anew, pip install "
            f"--force-reinstall 'tformer[{extra}]'"
        ) from error
