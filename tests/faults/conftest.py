"""Fixtures: the preloaded library."""

from __future__ import annotations

import sys

import pytest

from faults.processes import compiled_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """Return the path of the library of shim.c."""
    if not sys.platform.startswith("linux"):
        pytest.skip("LD_PRELOAD and /proc/self/fd are of Linux")
    library = compiled_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("there is no C compiler (cc), which makes the library of faults")
    return library
