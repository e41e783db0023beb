"""Runs of the encode stage. Bindings are used again, because a session of both stages has many inputs to bind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tformer_runtime.backend.binding import Binding
from tformer_runtime.base.arrays import Array
from tformer_runtime.engine.static_inputs import StaticInputs


class EncodeCalls:
    """The bindings of the encode stage: as many as threads have run it at the same time.

    Between runs they hold no array of a request.
    """

    def __init__(self, static_inputs: StaticInputs) -> None:
        self._session, self._static_inputs = static_inputs.session, static_inputs
        self._unused: list[Binding] = []  # with a placeholder for every input

    def clear(self) -> None:
        """Drop the bindings."""
        self._unused.clear()

    def run(self, arrays: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Any]:
        """Run the stage. Return name of an output → OrtValue on the session's device. Errors: see `Session.run`.

        arrays: of some inputs. The others get placeholders.
        """
        session = self._session
        inputs = [name for name in arrays if name in session.input_shapes("encode")]
        try:
            binding = self._unused.pop()
        except IndexError:
            binding = session.new_binding("encode")
            for name in session.input_shapes("encode"):
                self._bind_placeholder(binding, name)
        for name in inputs:
            session.bind_input(binding, name, session.device_tensor(arrays[name]))
        session.bind_new_outputs(binding, outputs)
        session.run(binding, "encode")
        values = dict(zip(outputs, binding.native.get_outputs(), strict=True))
        binding.native.clear_binding_outputs()
        for name in inputs:
            self._bind_placeholder(binding, name)
        self._unused.append(binding)
        return values

    def _bind_placeholder(self, binding: Binding, name: str) -> None:
        inputs = self._static_inputs
        tensor = inputs.one_column_inputs.get(name, inputs.placeholders[name])
        self._session.bind_input(binding, name, tensor)
