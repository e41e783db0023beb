"""What the stages of a file read that is the same at every run: made once, and bound by whoever runs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Ints
from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.dtypes import held_as
from tformer_runtime.format.manifest import COLUMNS, GATHER, LAST, STAGE, TOTAL, WEIGHT


class Feeds:
    """context: names of the decode stage's inputs for the context, in the order of encode's outputs. slots: the numbers
    of all. unread: for every graph input what is bound where a stage does not read it. one_column: what encode reads in
    the place of columns of the projection. decodes: what tells the graph to decode.

    They are held here, for a binding need not keep alive what is bound.
    """

    def __init__(self, session: Session) -> None:
        """ModelFileError if the graph is not what the manifest tells."""
        self.session = session
        self.context = self._check_context()
        self.slots: Ints = np.arange(session.manifest.max_length, dtype=np.int64)
        self.unread = self._stand_ins()
        self.one_column = self._of_one_column()
        stage = session.inputs("decode").get(STAGE, ())
        self.decodes = session.tensor(np.ones([size or 1 for size in stage], np.bool_))

    def _check_context(self) -> tuple[str, ...]:
        decode, outputs = self.session.manifest.decode, self.session.manifest.encoded
        if decode is None:
            return ()
        names = decode.context
        if len(names) != len(outputs) or any(name not in self.session.inputs("decode") for name in names):
            raise ModelFileError(
                f"{self.session.path}: its manifest lists {len(outputs)} context tensors and its graph does not read "
                "them all: export the model again"
            )
        return names

    def _stand_ins(self) -> dict[str, Any]:
        """Nothing, for every input. STAGE is false, for encode."""
        manifest = self.session.manifest
        dtypes = {STAGE: "bool"}
        if manifest.encode:
            dtypes |= {i.name: i.dtype for i in manifest.encode.inputs}
            dtypes |= {name: o.dtype for name, o in zip(self.context, manifest.encode.outputs, strict=False)}
        if manifest.decode:
            dtypes |= {name: "int32" if name in (LAST, TOTAL) else "int64" for name in manifest.decode.controls}
            dtypes |= {manifest.decode.step.name: manifest.decode.step.dtype}
            dtypes |= {c.past: c.dtype for c in manifest.decode.caches}
            if manifest.decode.shortlist:
                dtypes |= {GATHER: "int64", COLUMNS: "int64", WEIGHT: manifest.decode.shortlist.dtype}
        inputs = {**self.session.inputs("encode"), **self.session.inputs("decode")}
        shapes = {name: [0 if d is None else d for d in shape] for name, shape in inputs.items()}
        try:
            return {name: self.session.tensor(np.zeros(shape, held_as(dtypes[name]))) for name, shape in shapes.items()}
        except KeyError as error:
            raise ModelFileError(
                f"{self.session.path}: its graph reads {error}, of which its manifest tells nothing: "
                "export the model again"
            ) from error

    def _of_one_column(self) -> dict[str, Any]:
        decode = self.session.manifest.decode
        held = decode.shortlist if decode else None
        if held is None:
            return {}
        arrays = {COLUMNS: np.zeros(1, np.int64), WEIGHT: np.zeros((held.inner, 1), held.dtype)}
        return {name: self.session.tensor(array) for name, array in arrays.items()}
