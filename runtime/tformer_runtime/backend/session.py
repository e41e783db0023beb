"""An opened model file: the onnxruntime session, its manifest, and the device that it runs on.

All that this package asks of onnxruntime goes through here, so that a missing wheel, a missing device and each of
onnxruntime's unrelated kinds of error become one of our own sentences in one place.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tformer_runtime.backend import resident_pages
from tformer_runtime.backend.sampling_graph import top_logits_model, with_choice
from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import (
    DeviceError,
    InputError,
    MissingExtraError,
    ModelFileError,
    OutOfMemoryError,
    TformerError,
)
from tformer_runtime.format.dtypes import ONNX_BFLOAT16
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.format.model_file import mapped, read_manifest
from tformer_runtime.format.stage_split import Stage, cut

logger = logging.getLogger("tformer")

Part = Stage | Literal["head"]  # what has a session of its own: `sampling_graph.top_logits_model` too
DEVICES = ("auto", "cpu", "cuda")
_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_EXTERNAL = re.compile(r"external (data|initializer)|GetFileLength|GetExtData", re.IGNORECASE)
_NO_MEMORY = re.compile(r"allocate memory|bad.alloc|AllocateRaw|out of memory", re.IGNORECASE)
_OUT_OF_RANGE = re.compile(r"idx=(-?\d+) must be within the inclusive range \[(-?\d+),(-?\d+)\]")


class Session:
    """A model file that is ready to run.

    path: the file.  manifest: what it offers.  device: "cpu" or "cuda", whichever was chosen.
    captures: whether decode steps can be captured as CUDA graphs.

    On CUDA the two stages of a file are sessions of their own, for a graph with an `If` cannot be captured.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str = "auto",
        threads: int | None = None,
        apart: bool | None = None,
    ) -> None:
        """Open a file.

        device: "cpu", "cuda" or "auto": CUDA if the file was made for it and it can be had, else the CPU.
        threads: threads of one operator, by default what the manifest says, or one per physical core. They spin while
            they wait, which pays on a machine of one's own; give fewer where others use the cores. (6 layers, d=512,
            int8, 8 rows, one of two cores busy: 13.4 ms per step with two threads, 6.9 with one. One row, when quiet:
            1.1 against 1.7.)
        apart: whether the stages are to be sessions of their own; by default on CUDA.
        Raises ModelFileError, DeviceError, MissingExtraError.
        """
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(path)
        self.threads = threads
        self._ort = _onnxruntime()
        self.device = self._choose(device)
        self._options: dict[int, Any] = {}  # of a run, by its graph
        self.captures = False
        try:
            self._sessions = self._load(apart)
        except DeviceError:
            if device != "auto":
                raise
            self.device = "cpu"
            self._sessions = self._load(apart)
        logger.info("device: %s", self.device)
        self._inputs = {stage: _shapes(session) for stage, session in self._sessions.items()}
        self._bits = frozenset(name for session in self._sessions.values() for name in _in_bfloat16(session))

    @property
    def keeps_buffers(self) -> bool:
        """Whether decode steps are to find their buffers where they were, as a captured graph does."""
        return self.captures

    def inputs(self, stage: Part) -> Mapping[str, tuple[int | None, ...]]:
        """Name → shape of each graph input of a stage's session, free axes as None."""
        return self._inputs[stage]

    def binding(self, stage: Part) -> Any:
        """A new onnxruntime IOBinding of a stage's session: the buffers that one kind of call reads and writes."""
        return self._sessions[stage].io_binding()

    def run(self, binding: Any, stage: Part, graph: int | None = None) -> None:
        """Run a stage on what `binding` holds. Any number of threads may be in here at once.

        graph: the number of a CUDA graph, which the first run captures and each other replays: on the very same buffers
        of the device, whatever is bound. What the stage reads on the host is what it was then. The first run may run
        the stage several times.
        """
        try:
            if not self.captures:
                self._sessions[stage].run_with_iobinding(binding)  # options cost 30 µs
            else:
                self._sessions[stage].run_with_iobinding(binding, self._run_options(-1 if graph is None else graph))
            if self.device != "cpu":
                binding.synchronize_outputs()
        except Exception as error:
            if _NO_MEMORY.search(str(error)):
                raise OutOfMemoryError(
                    "there is not enough memory to run the model: give shorter inputs, or fewer at once "
                    f"({_first_line(error)})"
                ) from error
            raise self._translated(error) from error

    def bind_input(self, binding: Any, name: str, tensor: Any) -> None:
        """Have a run read an input from a tensor. What the graph has in bfloat16 is held as its bits
        (`format/dtypes.py`), and kept alive by the caller."""
        if name in self._bits:
            place = tensor.device_name(), 0, ONNX_BFLOAT16, tensor.shape(), tensor.data_ptr()
            binding.bind_input(name, *place)
        else:
            binding.bind_ortvalue_input(name, tensor)

    def bind_output(self, binding: Any, name: str, tensor: Any) -> None:
        """The same of an output, which a run writes."""
        if name in self._bits:
            place = tensor.device_name(), 0, ONNX_BFLOAT16, tensor.shape(), tensor.data_ptr()
            binding.bind_output(name, *place)
        else:
            binding.bind_ortvalue_output(name, tensor)

    def array(self, tensor: Any) -> Array:
        """What an output that was made anew holds; of bfloat16, a copy of its bits."""
        if tensor.element_type() != ONNX_BFLOAT16:
            array: Array = tensor.numpy()
            return array
        raw = ctypes.string_at(tensor.data_ptr(), tensor.tensor_size_in_bytes())
        return np.frombuffer(raw, np.uint16).reshape(tensor.shape())

    def tensor(self, array: Array) -> Any:
        """An OrtValue on the session's device. On the CPU it *is* the array's memory, elsewhere a copy."""
        return self._ort.OrtValue.ortvalue_from_numpy(array, self.device)

    def give(self, binding: Any, output: str) -> None:
        """Have an output made anew by each run, on the session's device; on the host if no other way leads there."""
        binding.bind_output(output, "cpu" if output in self._bits else self.device)

    def write(self, tensor: Any, array: Array) -> None:
        """Put other numbers of the same type and shape into a tensor, where it is."""
        tensor.update_inplace(np.ascontiguousarray(array))

    def _run_options(self, graph: int) -> Any:
        """graph: -1 for a run that is neither captured nor replayed."""
        if graph not in self._options:
            options = self._ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph))
            return self._options.setdefault(graph, options)  # when all is set: another thread may look
        return self._options[graph]

    def host_tensor(self, array: Array) -> Any:
        """An OrtValue that is the array's own memory."""
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def _choose(self, device: str) -> str:
        if device not in DEVICES:
            raise DeviceError(f"there is no device {device!r}: choose one of {', '.join(DEVICES)}")
        if device == "cuda":
            missing = cuda_missing()
            if missing:
                raise DeviceError(f"device cuda cannot be had: {missing}")
        elif device == "auto":
            # A file made for the CPU holds operators that CUDA has not, and would run on both by turns.
            device = "cpu" if self.manifest.target == "cpu" or cuda_missing() else "cuda"
        return device

    def _load(self, apart: bool | None) -> dict[Part, Any]:
        """Stage → its session, which may be one for both; and what finds heads, if steps leave their logits there."""
        model, folder = mapped(self.path)
        cuda = self.device == "cuda"
        stages: tuple[Stage, ...] = ("encode", "decode")
        if not self.manifest.staged or not (cuda if apart is None else apart):
            chooses = self._chooses and self.manifest.encode is None
            session = self._capturing(model, folder) if chooses else self._open(model, folder)
            loaded: dict[Part, Any] = dict.fromkeys(stages, session)
        else:
            decode = cut(model, "decode")
            loaded = {
                "encode": self._open(cut(model, "encode"), folder),
                "decode": self._capturing(decode, folder) if self._chooses else self._open(decode, folder),
            }
        if self.captures:
            assert self.manifest.decode is not None
            loaded["head"] = self._open(top_logits_model(int(self.manifest.decode.logits.shape[-1])), folder)
        for file in (self.path, self.path.with_name(f"{self.path.name}.data")):
            resident_pages.forget(file)
        resident_pages.trim()
        return loaded

    @property
    def _chooses(self) -> bool:
        """Whether the decode stage is given the greedy choice too."""
        return self.device == "cuda"

    def _capturing(self, model: bytes, folder: Path) -> Any:
        """A session whose runs can be captured as CUDA graphs, if onnxruntime finds nothing in it that cannot."""
        assert self.manifest.decode is not None
        try:
            session = self._open(with_choice(model, self.manifest.decode), folder, {"enable_cuda_graph": "1"})
        except ModelFileError as error:
            logger.info("no CUDA graphs: %s", error)
            return self._open(model, folder)
        self.captures = True
        return session

    def _open(self, model: bytes, folder: Path, settings: Mapping[str, str] | None = None) -> Any:
        """settings: of the CUDA provider."""
        options = self._ort.SessionOptions()
        asked = self.manifest.session
        options.intra_op_num_threads = self.threads or asked.threads or 0
        if not asked.spinning:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # what goes wrong is raised, so there is nothing to log besides
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(folder))
        providers: list[Any] = [(_CUDA, dict(settings)) if settings else _CUDA, _CPU]
        providers = providers if self.device == "cuda" else [_CPU]
        try:
            # No silent fallback: a provider that cannot start must not leave a CPU session in its place. Single nodes
            # (sizes and shapes) do belong on the CPU, so session.disable_cpu_ep_fallback would refuse every file.
            session = self._ort.InferenceSession(
                model,
                options,
                providers,
                enable_fallback=False,
                disabled_optimizers=asked.disabled_optimizers if self.device == "cpu" else (),
            )
        except Exception as error:
            if self.device == "cpu" and self.manifest.precision == "bf16":
                missing = cuda_missing()
                raise DeviceError(
                    f"{self.path} computes in bfloat16, which onnxruntime does on CUDA alone"
                    + (f", and {missing}; export the model" if missing else ": run it there, or export the model")
                    + " with another precision"
                ) from error
            if self.device == "cuda" and "CUDA" in str(error) and not settings:
                raise DeviceError(f"device cuda cannot be had: {_first_line(error)}") from error
            raise self._translated(error) from error
        if self.device == "cuda" and _CUDA not in session.get_providers():
            raise DeviceError("device cuda cannot be had: onnxruntime's CUDA provider did not start on this machine")
        return session

    def _translated(self, error: Exception) -> TformerError:
        """onnxruntime's errors have no common base (its own kinds, ValueError, RuntimeError): make them ours."""
        if isinstance(error, TformerError):
            return error
        text = str(error).strip()
        index = _OUT_OF_RANGE.search(text)
        if index:
            return InputError(
                f"{index[1]} is beyond one of the model's tables, which ends at {index[3]}: an id outside its "
                "vocabulary, or an input that is too long"
            )
        if _EXTERNAL.search(text):
            return ModelFileError(
                f"{self.path}: the file with its weights, {self.path.name}.data, is missing or not whole beside it"
            )
        return ModelFileError(f"onnxruntime cannot run {self.path}: {_first_line(error)}")


def cuda_missing() -> str | None:
    """What keeps onnxruntime's CUDA provider from starting, as a sentence; None if nothing is known to."""
    ort = _onnxruntime()
    if _CUDA not in ort.get_available_providers():
        return "the installed onnxruntime holds no CUDA provider; pip install tformer[cuda]"
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()  # finds NVIDIA's libraries in site-packages; it prints what it does not find
    if os.name == "posix":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is no NVIDIA driver on this machine (libcuda.so.1)"
        provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
        found = re.search(r"(lib(?:cu|nv)\w+\.so[.\d]*): cannot open", _load_error(provider))
        if found:
            return f"NVIDIA's library {found[1]} is not installed; pip install tformer[cuda]"
    return None


def _shapes(session: Any) -> dict[str, tuple[int | None, ...]]:
    return {i.name: tuple(d if isinstance(d, int) else None for d in i.shape) for i in session.get_inputs()}


def _in_bfloat16(session: Any) -> list[str]:
    return [v.name for v in (*session.get_inputs(), *session.get_outputs()) if v.type == "tensor(bfloat16)"]


def _first_line(error: Exception) -> str:
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error).strip())
    return text.splitlines()[0][:300] if text else type(error).__name__


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime is not installed; pip install tformer[cpu]") from error
    return onnxruntime


def _load_error(library: Path) -> str:
    try:
        ctypes.CDLL(os.fspath(library))
    except OSError as error:
        return str(error)
    return ""
