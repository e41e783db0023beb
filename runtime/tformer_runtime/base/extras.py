"""Import of optional dependencies when they are first needed, with the install command if one is missing."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from tformer_runtime.base.errors import MORE_MEMORY, MissingExtraError, typed_memory_error

TELEMETRY_OFF = {  # environment variables of packages that send data unasked → the value with which they send nothing
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime 1.29 and later; else it also writes a device id under HOME
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # versions of Python and torch, which go with each download
}
MIN_ONNXRUNTIME = (1, 30)  # the first that has all operators of files, such as attention that is not causal
_BUILDS = {"cpu": "onnxruntime", "gpu": "onnxruntime-gpu", "cuda": "onnxruntime-gpu"}  # extra → package


def onnxruntime_packages() -> list[str]:
    """Return the installed packages that hold the module onnxruntime. Cost: reads the lists of all files."""
    from importlib.metadata import packages_distributions  # takes 20 ms to import

    return sorted(set(packages_distributions().get("onnxruntime", [])))


def install_command(*extras: str) -> str:
    """Return the command that installs extras of the package tformer.

    The packages of onnxruntime write the same files, so that two of them break each other: the extra "export" names one
    only if there is none, "cpu" stands for the installed one, and "cuda" removes another first.
    """
    installed = onnxruntime_packages() if {"export", *_BUILDS} & set(extras) else []
    if "export" in extras and not installed:
        extras = (*extras, "cpu")
    if "cpu" in extras and "onnxruntime-gpu" in installed:
        extras = tuple("gpu" if extra == "cpu" else extra for extra in extras)
    wanted = {_BUILDS[extra] for extra in extras if extra in _BUILDS}
    others = [package for package in installed if package not in wanted]
    command = f"pip install 'tformer[{','.join(extras)}]'"
    return f"pip uninstall -y {' '.join(others)}, then {command}" if wanted and others else command


def disable_telemetry() -> None:
    """Turn off the telemetry of packages that are not imported yet, in this process and its children.

    A setting that the environment has stays.
    """
    for variable, value in TELEMETRY_OFF.items():
        os.environ.setdefault(variable, value)


def import_optional(name: str, purpose: str, extra: str) -> Any:
    """Import and return an optional module. Raise MissingExtraError if it is not installed or cannot be loaded.

    purpose: the beginning of the error's sentence, such as "reading audio needs soundfile".
    extra: the extra of the package tformer that installs the module.
    """
    disable_telemetry()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{purpose}: {install_command(extra)}") from error
    except (ImportError, OSError) as error:  # OSError: the module is installed, but its C library is not
        if (typed := typed_memory_error(error, MORE_MEMORY)) is not error:
            raise typed from error
        raise MissingExtraError(
            f"{purpose}, which is installed and cannot be loaded ({error}): install it again, "
            f"{install_command(extra).replace('pip install', 'pip install --force-reinstall')}"
        ) from error


def import_onnxruntime() -> Any:
    """Import and return onnxruntime. Raise MissingExtraError if it is not installed, not whole, or too old.

    No module imports onnxruntime in another way, because its telemetry is turned off here.

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
            f"onnxruntime {version} is installed, and files need {least} or later: "
            f"{install_command('cpu').replace('pip install', 'pip install --upgrade')}"
        )
    return module
