"""Import of optional dependencies when they are first needed, with the install command if one is missing."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tformer_runtime.base.errors import MORE_MEMORY, MissingExtraError, typed_memory_error

MIN_ONNXRUNTIME = (1, 30)  # the first that has all operators of files, such as attention that is not causal


def import_optional(name: str, purpose: str, extra: str) -> Any:
    """Import and return an optional module. Raise MissingExtraError if it is not installed or cannot be loaded.

    purpose: the beginning of the error's sentence, such as "reading sound needs soundfile".
    extra: the extra of the package tformer that installs the module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{purpose}: pip install 'tformer[{extra}]'") from error
    except (ImportError, OSError) as error:  # OSError: the module is installed, but its C library is not
        if (typed := typed_memory_error(error, MORE_MEMORY)) is not error:
            raise typed from error
        raise MissingExtraError(
            f"{purpose}, which is installed and cannot be loaded ({error}): install it anew, pip install "
            f"--force-reinstall 'tformer[{extra}]'"
        ) from error


def import_onnxruntime() -> Any:
    """Import and return onnxruntime. Raise MissingExtraError if it is not installed, not whole, or too old.

    The wheels onnxruntime and onnxruntime-gpu have the same files. If both are installed and one is removed, a folder
    without a module is left, which Python imports as an empty package.
    """
    module = import_optional("onnxruntime", "running a file needs onnxruntime", "cpu")
    if not hasattr(module, "SessionOptions"):
        raise MissingExtraError(
            "onnxruntime is installed in part, as after two of its packages were installed and one was removed: pip "
            "uninstall -y onnxruntime onnxruntime-gpu, then pip install 'tformer[cpu]' or 'tformer[cuda]'"
        )
    version = getattr(module, "__version__", "")
    numbers = re.match(r"(\d+)\.(\d+)", version)  # builds of others may have a version of another form
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < MIN_ONNXRUNTIME:
        least = ".".join(map(str, MIN_ONNXRUNTIME))
        raise MissingExtraError(
            f"onnxruntime {version} is installed, and files need {least} or later: pip install --upgrade "
            f"'onnxruntime>={least}', or onnxruntime-gpu"
        )
    return module
