"""The system refuses memory at the n-th large allocation: requests end with a typed error, and later ones are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.toy_models import Toy

from tformer_runtime import Model

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"] * 4
PROGRAM = f"""
import ctypes, gc, json, sys
from tformer_runtime import Model, TformerError
shim = ctypes.CDLL(None)
shim.fault_refuse_memory.argtypes = [ctypes.c_size_t, ctypes.c_long]
shim.fault_allocations.restype = ctypes.c_long
model = Model.load(sys.argv[1], "cpu", threads=1)
words, options = {WORDS!r}, json.loads(sys.argv[2])
expected = [result.token_ids for result in model.generate_batch(words, **options)]
nth, errors = 0, {{}}
while True:
    nth += 1
    results = model.generate_batch(words, **options)
    shim.fault_refuse_memory(int(sys.argv[3]), nth)
    try:
        for _ in results: pass
        error = None
    except TformerError as caught:
        error = type(caught).__name__
    finally:
        count = shim.fault_allocations()
        shim.fault_refuse_memory(0, 0)
    results.close()
    if error is None and count < nth:
        break
    errors[error] = errors.get(error, 0) + 1
    gc.collect()
    assert model.memory()["used_bytes"] == model.budget.reserved_bytes == 0, nth
    again = [result.token_ids for result in model.generate_batch(words, **options)]
    assert again == expected, nth
print(json.dumps(errors))
"""


@pytest.mark.parametrize(
    ("options", "large"),  # bytes of a large allocation: the buffers of caches, contexts and logits of such a batch
    [
        ({"batch_size": 32}, 8_000),
        ({"batch_size": 16, "workers": 2}, 8_000),
        pytest.param({"batch_size": 16, "num_beams": 4}, 30_000, marks=pytest.mark.thorough),
    ],
)
def test_request_that_gets_no_memory_ends_with_a_typed_error(shim, tmp_path, options, large):
    path = Toy(seed=27, layers=2).write(tmp_path / "toy.onnx")
    environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(path), json.dumps(options), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert errors.get("OutOfMemoryError", 0) > 0, errors
    assert set(errors) <= {"OutOfMemoryError", "null"}, errors
    assert Model.load(path, "cpu")  # the file was never at fault
