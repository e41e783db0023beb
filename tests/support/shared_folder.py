"""The folder that all test processes of a run share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the run. Hold a FileLock while a file is written there: other processes look for it."""
    base_temp = tmp_path_factory.getbasetemp()
    return base_temp.parent if "PYTEST_XDIST_WORKER" in os.environ else base_temp
