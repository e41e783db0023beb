"""Graph inputs that are the same at every run. They are created once, and every run binds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Ints
from tformer_runtime.format.dtypes import storage_dtype
from tformer_runtime.format.manifest import COLUMN_IDS, COLUMN_WEIGHT, STAGE_INPUT
from tformer_runtime.format.manifest_checks import graph_inputs

MIN_SLOT_INDICES = 256


class StaticInputs:
    """OrtValues and arrays of the constant inputs. This object keeps them alive, as a binding need not do so.

    context: names of the decode stage's inputs for the context, in the order of encode's outputs.
    placeholders: for every graph input an OrtValue to bind if the stage does not read the input.
    one_column_inputs: OrtValues for encode in the place of the projection's columns.
    decode_flag: value of STAGE_INPUT that selects the decode stage.
    """

    def __init__(self, session: Session) -> None:
        """Create the inputs. `Session` has compared the graph with the manifest."""
        self.session = session
        decode = session.manifest.decode
        self.context = decode.context if decode is not None else ()
        self._slot_indices: Ints = np.arange(MIN_SLOT_INDICES)
        self.placeholders = self._make_placeholders()
        self.one_column_inputs = self._make_one_column_inputs()
        stage = session.input_shapes("decode").get(STAGE_INPUT, ())
        self.decode_flag = session.device_tensor(np.ones([size or 1 for size in stage], np.bool_))

    def slot_indices(self, count: int) -> Ints:
        """Return (count,), 0 … count - 1. The array behind it doubles when it must: max_length may be of any size."""
        indices = self._slot_indices
        if count > len(indices):
            indices = self._slot_indices = np.arange(max(count, 2 * len(indices)))
        return indices[:count]

    def _make_placeholders(self) -> dict[str, Any]:
        """Return zeros for every input, empty if it has a free axis. STAGE_INPUT is false, which selects encode."""
        dtypes = {name: spec.dtype for name, spec in graph_inputs(self.session.manifest)} | self.session.added_inputs
        inputs = {**self.session.input_shapes("encode"), **self.session.input_shapes("decode")}
        shapes = {name: [0 if d is None else d for d in shape] for name, shape in inputs.items()}
        arrays = {name: np.zeros(shape, storage_dtype(dtypes[name])) for name, shape in shapes.items()}
        return {name: self.session.device_tensor(array) for name, array in arrays.items()}

    def _make_one_column_inputs(self) -> dict[str, Any]:
        decode = self.session.manifest.decode
        shortlist = decode.shortlist if decode else None
        if shortlist is None:
            return {}
        arrays = {COLUMN_IDS: np.zeros(1, np.int64), COLUMN_WEIGHT: np.zeros((shortlist.inner, 1), shortlist.dtype)}
        return {name: self.session.device_tensor(array) for name, array in arrays.items()}
