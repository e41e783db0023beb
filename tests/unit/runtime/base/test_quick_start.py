"""The environment and the garbage collection while the package is imported, and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tformer_runtime.base.quick_start import WAIT_LOG_CYCLES, WAIT_VARIABLE

# Notes the state at the import of numpy, which any import of the package begins.
PROGRAM = """
import gc, json, os, sys
if sys.argv[2] == "off":
    gc.disable()
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            states.append((os.environ.get(sys.argv[1]), gc.isenabled()))
states = []
sys.meta_path.insert(0, Watch())
if sys.argv[3] == "first":
    import numpy
import tformer_runtime.base.errors
states.append((os.environ.get(sys.argv[1]), gc.isenabled()))
print(json.dumps(states))
"""


@pytest.mark.parametrize(
    ("given", "collects", "numpy", "while_imported", "after"),
    [
        (None, "on", "later", [WAIT_LOG_CYCLES, False], [None, True]),
        (None, "off", "later", [WAIT_LOG_CYCLES, False], [None, False]),
        ("9", "on", "later", ["9", False], ["9", True]),
        (None, "on", "first", [None, True], [None, True]),
    ],
)
def test_import_changes_nothing_that_lasts(given, collects, numpy, while_imported, after):
    variables = {name: value for name, value in os.environ.items() if name != WAIT_VARIABLE}
    variables |= {} if given is None else {WAIT_VARIABLE: given}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, WAIT_VARIABLE, collects, numpy],
        capture_output=True, text=True, check=True, env=variables,
    )  # fmt: skip
    assert json.loads(process.stdout) == [while_imported, after]
