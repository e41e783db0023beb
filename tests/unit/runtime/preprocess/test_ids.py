"""Ids of any integer type are checked by the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.toy_models import Toy

from tformer_runtime import InputError
from tformer_runtime.format.manifest import BATCH_AXIS, RequestInput
from tformer_runtime.preprocess.inputs import Inputs

SHAPES = {"a number": (1,), "a map": (2, 3), "a sequence": ("time",)}


@pytest.mark.parametrize("vocabulary", [10, None])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ids_are_checked_by_the_vocabulary(shape, dtype, vocabulary):
    spec = RequestInput("ids", dtype, (BATCH_AXIS, *shape), "ids", vocabulary=vocabulary)
    manifest = Toy().manifest()
    inputs = Inputs(replace(manifest, encode=replace(manifest.encode, inputs=(spec,)), decode=None))
    sizes = tuple(size if isinstance(size, int) else 5 for size in shape)
    known = np.arange(np.prod(sizes), dtype=np.uint8).reshape(sizes)
    for ids in (known, known[::-1], known.T.copy().T, known.tolist(), known.astype(np.uint64)):
        np.testing.assert_array_equal(inputs.single_pass_arrays(ids)["ids"], ids)
    for unknown in (-1, *((10,) if vocabulary else ())):
        wrong = known.astype(np.int64)
        wrong.flat[-1] = unknown
        with pytest.raises(InputError, match=rf"id {unknown} \(number {wrong.size} of the input\)"):
            inputs.single_pass_arrays(wrong)
