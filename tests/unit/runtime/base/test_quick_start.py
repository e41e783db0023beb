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


COLLECTIONS = """
import gc, json, sys
if sys.argv[1] == "frozen":
    gc.freeze()
frozen_before = gc.get_freeze_count()
class Circle:
    ended = False
    def __init__(self):
        self.itself = self
    def __del__(self):
        Circle.ended = True
Circle()
import tformer_runtime
visited = []
def count(phase, info):
    if phase == "start":
        visited.append(len(gc.get_objects(info["generation"])))
gc.callbacks.append(count)
new_objects = [[] for _ in range(2000)]
gc.callbacks.remove(count)
gc.collect()
print(json.dumps([frozen_before, gc.get_freeze_count(), visited, Circle.ended]))
"""


@pytest.mark.parametrize("state", ["frozen", "usual"])
def test_collections_after_the_import(state):
    """They find the caller's garbage. They leave what it has frozen, and do not visit objects of the import."""
    process = subprocess.run([sys.executable, "-c", COLLECTIONS, state], capture_output=True, text=True, check=True)
    frozen_before, frozen, visited, circle_ended = json.loads(process.stdout)
    assert circle_ended
    if state == "frozen":
        assert 0.9 * frozen_before < frozen <= frozen_before  # some of them have ended
    else:
        assert frozen == 0
        assert visited
        assert max(visited) < 10_000  # of about 60,000 objects


END = """
import os, sys
from tformer_runtime.base.quick_start import freeze_objects
if sys.argv[1] == "freezes":
    freeze_objects()
class Circle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        os.write(1, b"visited")
Circle()
"""


@pytest.mark.parametrize(("freezes", "output"), [("freezes", ""), ("leaves", "visited")])
def test_the_end_of_a_command_has_no_collection(freezes, output):
    process = subprocess.run([sys.executable, "-c", END, freezes], capture_output=True, text=True, check=True)
    assert process.stdout == output
