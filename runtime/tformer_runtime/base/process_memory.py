"""Limits on the memory of the process, which the operating system keeps: of all data, and of the stack."""

from __future__ import annotations

import sys
from pathlib import Path

from tformer_runtime.base.errors import DeviceError, OptionError
from tformer_runtime.base.validation import check_int

MIN_STACK_BYTES = 256 << 10  # onnxruntime and torch end with a segmentation fault below 128 KiB, Python itself below 80


def limit_process_memory(num_bytes: int) -> None:
    """Limit the memory that this process allocates, from now on. A request beyond it ends with OutOfMemoryError.

    num_bytes: of all data that is not a mapped file, in bytes (RLIMIT_DATA of Linux).
    Raise OptionError for a limit below the memory in use, and on systems without such a limit.
    """
    check_int("max_process_memory", num_bytes, maximum=2**62)
    if sys.platform != "linux":
        raise OptionError("max_process_memory is a limit of Linux: run the program in a container with a limit")
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY and num_bytes > hard:
        raise OptionError(f"max_process_memory must be at most {hard:,} bytes here, the limit of this process")
    if num_bytes < (used := _bytes_in_use()):
        raise OptionError(f"max_process_memory must be more than the {used:,} bytes that the process has already")
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def require_stack() -> None:
    """Raise DeviceError if the limit of the stack is too low for onnxruntime. Threads have stacks of the same limit."""
    if sys.platform == "win32":
        return
    import resource

    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_STACK_BYTES:
        raise DeviceError(
            f"the stack of this process is limited to {limit >> 10} KiB, and {MIN_STACK_BYTES >> 10} KiB are the "
            "least: raise the limit (ulimit -s 8192)"
        )


def process_memory_left() -> int | None:
    """Return the bytes that this process may still allocate under the limits of the system; None without a limit."""
    if sys.platform != "linux":
        return None
    import resource

    kinds = {resource.RLIMIT_DATA: "VmData", resource.RLIMIT_AS: "VmSize"}
    limits = {name: resource.getrlimit(kind)[0] for kind, name in kinds.items()}
    left = [limit - _bytes_in_use(name) for name, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return max(min(left), 0) if left else None


def _bytes_in_use(name: str = "VmData") -> int:
    """Return the bytes of this process that a limit counts. name: of the count in the status of a process."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{name}:")), 0)
