"""The processor of this machine, and its load."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Return the processor, its cores and its load in a line."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    extras = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    return f"{os.cpu_count()} cores of {name} ({' '.join(extras)}), load {load()}"


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())
