"""An opened model file: the onnxruntime session, its manifest, and the device that it runs on.

All calls of onnxruntime go through this module. So a missing wheel, a missing device and each of onnxruntime's
unrelated error classes become an error of `base.errors` in one place.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tformer_runtime.backend import resident_pages
from tformer_runtime.backend.binding import Binding, Bindings, closed_error
from tformer_runtime.backend.forks import wait_before_forks
from tformer_runtime.backend.native_kernels import (
    LoadingProducts,
    NativeKernels,
    find_native_kernels,
    reason_without_kernels,
    wanted_kernels,
)
from tformer_runtime.backend.run_deadline import LOOP_SECONDS, check_run_seconds, deadline_of, has_loops
from tformer_runtime.backend.run_slots import RunSlots, cpu_run_slots
from tformer_runtime.backend.sampling_graph import add_greedy_choice, top_logits_model
from tformer_runtime.base.arrays import Array
from tformer_runtime.base.crash_reports import named_frame
from tformer_runtime.base.errors import (
    MORE_MEMORY,
    DeviceError,
    InputError,
    ModelFileError,
    OutOfMemoryError,
    TformerError,
    typed_memory_error,
)
from tformer_runtime.base.extras import import_onnxruntime, install_command
from tformer_runtime.base.validation import MAX_THREADS, check_bool, check_int, named_path
from tformer_runtime.format.digest import BackgroundCheck
from tformer_runtime.format.manifest import GREEDY_PLAN, Manifest
from tformer_runtime.format.manifest_checks import check_graph
from tformer_runtime.format.model_file import manifest_of, read_mapped_model
from tformer_runtime.format.onnx_fields import DATA_TYPE_BFLOAT16
from tformer_runtime.format.open_files import OpenFiles
from tformer_runtime.format.stage_split import Stage, extract_stage
from tformer_runtime.rewriting.derived_weights import with_derived_weights

logger = logging.getLogger("tformer")

SessionName = Stage | Literal["top_logits"]  # top_logits: `sampling_graph.top_logits_model`
DEVICES = ("auto", "cpu", "cuda")
MAX_OPENING_THREADS = 8  # each holds a matrix
# The weights that a greedy loop may read before the caller can do anything else: some milliseconds
MAX_GREEDY_BYTES, MIN_GREEDY_BYTES = 1 << 27, 1 << 22
_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_DTYPES = {"float": "float32", "double": "float64"}  # onnxruntime's names that are not numpy's
_EXTERNAL = re.compile(r"external (data|initializer)|GetFileLength|GetExtData", re.IGNORECASE)
_OUT_OF_RANGE = re.compile(r"idx=(-?\d+) must be within the inclusive range \[(-?\d+),(-?\d+)\]")


class Session:
    """A model file that is ready to run.

    path: the file.
    files: the file and its second file, as they were opened.
    manifest: the file's manifest.
    device: "cpu" or "cuda", as chosen when the file was opened.
    verified: whether the file was compared with its digest.
    captures_graphs: whether decode steps can be captured as CUDA graphs.
    captures: the number of graphs that were captured.
    max_greedy_steps: the greatest number of steps of one run of the decode stage, which feeds the likeliest tokens to
        itself; 1 if it cannot do so.
    added_inputs: name → dtype of the inputs of the graph that the file does not have.
    small_batch_limit: as in the manifest's decode stage; None if native kernels serve any number of rows.
    run_slots: the limit for runs at the same time; None on CUDA.

    On CUDA each of the two stages of a file has its own session, because a graph with an `If` cannot be captured.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str = "auto",
        threads: int | None = None,
        split_stages: bool | None = None,
        verify: bool = False,
        max_run_seconds: float | None = None,
        native_kernels: bool = True,
    ) -> None:
        """Open a file.

        device: "cpu", "cuda" or "auto". "auto" is CUDA if the file was exported for it and it is available, else the
            CPU.
        threads: threads of one operator; by default the manifest's number, or one per physical core. Waiting threads
            spin, which is fast on an idle machine. Choose fewer if other processes use the cores (see
            docs/design/runtime.md#sessions-and-threads).
        split_stages: whether each stage has its own session; by default on CUDA only.
        verify: whether the file is compared with its digest, in a thread while onnxruntime opens it.
        max_run_seconds: the deadline of a run on the CPU; by default none, or `LOOP_SECONDS` for a graph with loops.
        native_kernels: whether native kernels may replace operators on the CPU. The exporter checks the operators of a
            file, and so runs it without them.
        Raises ModelFileError, DeviceError, MissingExtraError; OptionError for an impossible number of threads.
        """
        if native_kernels:
            wanted_kernels()  # refused on every device
        self.path = named_path(path, ModelFileError, "the model file")
        self.files = OpenFiles(self.path)
        self.manifest: Manifest = manifest_of(self.path, self.files.metadata)
        self.threads = threads if threads is None else check_int("threads", threads, maximum=MAX_THREADS)
        self._ort = import_onnxruntime()
        self.device = self._resolve_device(device)
        self._run_options_by_graph: dict[int, Any] = {}
        self._bindings = Bindings()
        self.captures_graphs = False
        self.captures = 0
        self.small_batch_limit = self.manifest.decode.small_batch_limit if self.manifest.decode else None
        self._may_use_kernels = native_kernels
        self.verified = check_bool("verify", verify)
        self.max_run_seconds = check_run_seconds(max_run_seconds)
        self._named = named_frame(f"model {self.path}")
        check = BackgroundCheck(lambda: self.files.verify(self._opening_threads)) if verify else None
        try:
            self._sessions = self._named(self._load_on_a_device, split_stages, device == "auto")
        finally:
            if check is not None:
                check.finish()  # its error says why onnxruntime failed, if it did
        self.files.end_loading()
        logger.info("device: %s", self.device)
        wait_before_forks()
        self.run_slots: RunSlots | None = cpu_run_slots() if self.device == "cpu" else None
        self._check_graph()
        self._inputs = {stage: _shapes(session) for stage, session in self._sessions.items()}
        self._view_name = self._sessions["decode"].get_outputs()[0].name
        self._bfloat16_names = frozenset(
            name for session in self._sessions.values() for name in _bfloat16_tensors(session)
        )

    def _check_graph(self) -> None:
        """Raise ModelFileError if the graph has other tensors than the manifest describes."""
        sessions = [self._sessions["encode"], self._sessions["decode"]]
        try:
            inputs = {
                v.name: (_dtype(v.type), _shape(v))
                for session in sessions
                for v in session.get_inputs()
                if v.name not in self.added_inputs
            }
            outputs = [{v.name: (_dtype(v.type), _shape(v)) for v in session.get_outputs()} for session in sessions]
            check_graph(self.manifest, inputs, *outputs)
        except ModelFileError as error:
            raise ModelFileError(f"{self.path}: {error}") from error
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.path} is damaged: a name in its graph is not text ({error})") from error

    @property
    def kernels(self) -> str | None:
        """The native kernels that a file runs with, in words; None if onnxruntime's operators compute everything."""
        return None if self._kernels is None else self._kernels.description

    @property
    def reason_without_kernels(self) -> str:
        """Why onnxruntime's operators compute everything; "" if native kernels do."""
        if self._kernels is not None:
            return ""
        if not self._may_use_kernels:
            return "opened without them"
        return reason_without_kernels(self.manifest, self.device)

    @property
    def keeps_buffers(self) -> bool:
        """Whether decode steps must keep their buffers at the same addresses, as a captured graph requires."""
        return self.captures_graphs

    def input_shapes(self, stage: SessionName) -> Mapping[str, tuple[int | None, ...]]:
        """Return name → shape of each graph input of a stage's session, with None for free axes."""
        return self._inputs[stage]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._sessions

    def close(self) -> None:
        """Free the weights. Later runs raise UnsupportedCallError. It may be called again.

        Runs of other threads end as usual. Each keeps the weights until its end, so that nothing is waited for here.
        """
        self._sessions = {}  # first, so that no new run begins; a run holds the session that it uses
        self._bindings.close()
        self.files.close()
        if self.device == "cpu":
            resident_pages.trim_heap()

    def new_binding(self, stage: SessionName) -> Binding:
        """Return a new binding of a stage's session: the buffers that a call reads and writes."""
        return self._bindings.new(self._open_session(stage).io_binding())

    def _open_session(self, stage: SessionName) -> Any:
        """Return onnxruntime's session of a stage. Raise UnsupportedCallError after `close`."""
        session = self._sessions.get(stage)
        if session is None:
            raise closed_error()
        return session

    def run(self, binding: Binding, stage: SessionName, graph: int | None = None) -> None:
        """Run a stage on the buffers of `binding`. Several threads may call this at the same time.

        On the CPU a run waits while all slots are taken (`RunSlots`). Its deadline does not count that time.
        Raises ModelChangedError if the file was changed in place, before the run or during it.

        graph: the number of a CUDA graph. The first run captures the graph and may run the stage several times. Later
            runs replay it on the same buffers of the device, whatever is bound, and with the host inputs of the first
            run.
        """
        try:
            if self.run_slots is None:
                self._run_checked(binding, stage, graph)
                binding.native.synchronize_outputs()
            else:
                with self.run_slots:
                    self._run_checked(binding, stage, graph)
            self.files.check()
        except TformerError:
            raise
        except Exception as error:
            if (typed := typed_memory_error(error)) is not error:
                raise typed from error
            raise self._translate_error(error) from error

    def _run_checked(self, binding: Binding, stage: SessionName, graph: int | None) -> None:
        """Run a stage, unless a file has changed: a run that reads a file that was cut short ends the process."""
        self.files.check()
        self._named(self._run, binding, stage, graph)

    def _run(self, binding: Binding, stage: SessionName, graph: int | None) -> None:
        """Run a stage as `run` says, at once and with the errors of onnxruntime."""
        session, native = self._open_session(stage), binding.native
        if self._run_seconds is not None:
            options = self._ort.RunOptions()
            with deadline_of(options, self._run_seconds):
                session.run_with_iobinding(native, options)
        elif not self.captures_graphs:
            session.run_with_iobinding(native)  # run options cost 20 µs
        else:
            session.run_with_iobinding(native, self._run_options(-1 if graph is None else graph))

    def bind_input(self, binding: Binding, name: str, tensor: Any, rows: int | None = None) -> None:
        """Bind an input to a tensor, or to its first rows.

        A bfloat16 input reads a tensor of its bits (`format.dtypes`). The caller must keep this tensor alive, and also
        a tensor that is bound in part.
        """
        buffer = self._raw_buffer(name, tensor, rows)
        if buffer is not None:
            binding.native.bind_input(name, *buffer)
        else:
            binding.native.bind_ortvalue_input(name, tensor)

    def bind_inputs(self, binding: Binding, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Bind inputs to tensors, as `bind_input` does for one."""
        if self._bfloat16_names:
            for name, tensor in zip(names, tensors, strict=True):
                self.bind_input(binding, name, tensor)
            return
        bind = binding.native.bind_ortvalue_input
        for name, tensor in zip(names, tensors, strict=True):
            bind(name, tensor)

    def bind_output(self, binding: Binding, name: str, tensor: Any, rows: int | None = None) -> None:
        """Bind an output to a tensor, or to its first rows, which the run overwrites. bfloat16 is stored as for
        `bind_input`.
        """
        buffer = self._raw_buffer(name, tensor, rows)
        if buffer is not None:
            binding.native.bind_output(name, *buffer)
        else:
            binding.native.bind_ortvalue_output(name, tensor)

    def _raw_buffer(self, name: str, tensor: Any, rows: int | None) -> tuple[Any, ...] | None:
        """Return device, number of the device, type, shape and address of a tensor that must be bound by address."""
        if rows is None and name not in self._bfloat16_names:  # as most tensors are, and the calls below are slow
            return None
        shape = tensor.shape()
        dtype = DATA_TYPE_BFLOAT16 if name in self._bfloat16_names else tensor.element_type()
        if rows is not None and rows != shape[0]:
            shape = [rows, *shape[1:]]
        elif dtype != DATA_TYPE_BFLOAT16:
            return None
        return tensor.device_name(), 0, dtype, shape, tensor.data_ptr()

    def read_array(self, tensor: Any) -> Array:
        """Return the values of an output of `bind_new_outputs`; for bfloat16, a copy of its bits."""
        if tensor.element_type() != DATA_TYPE_BFLOAT16:
            array: Array = tensor.numpy()
            return array
        raw = ctypes.string_at(tensor.data_ptr(), tensor.tensor_size_in_bytes())
        return np.frombuffer(raw, np.uint16).reshape(tensor.shape())

    def device_tensor(self, array: Array) -> Any:
        """Return an OrtValue on the session's device. On the CPU it shares the array's memory, on CUDA it is a copy."""
        return self._ort.OrtValue.ortvalue_from_numpy(array, self.device)

    def bind_new_outputs(self, binding: Binding, outputs: Sequence[str]) -> None:
        """Let each run allocate outputs on the session's device. Those in bfloat16 are on the host."""
        bind = binding.native.bind_output
        for output in outputs:
            bind(output, "cpu" if output in self._bfloat16_names else self.device)

    def write_tensor(self, tensor: Any, array: Array) -> None:
        """Overwrite the values of a tensor in place. array: of the tensor's type and shape."""
        tensor.update_inplace(np.ascontiguousarray(array))

    def row_view(self, tensor: Any, begin: int, end: int) -> Any:
        """Return an OrtValue on the memory of some rows of a tensor, which the caller keeps alive."""
        shape = tensor.shape()
        address = tensor.data_ptr() + begin * (tensor.tensor_size_in_bytes() // shape[0])
        native = self.new_binding("decode").native
        dtype = tensor.element_type()
        native.bind_output(self._view_name, tensor.device_name(), 0, dtype, [end - begin, *shape[1:]], address)
        return native.get_outputs()[0]

    def _run_options(self, graph: int) -> Any:
        """Return the options of a run. graph: -1 for a run that is neither captured nor replayed."""
        if graph not in self._run_options_by_graph:
            options = self._ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph))
            # Stored when complete, because another thread may read it.
            return self._run_options_by_graph.setdefault(graph, options)
        return self._run_options_by_graph[graph]

    def host_tensor(self, array: Array) -> Any:
        """Return an OrtValue that shares the array's memory."""
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def _resolve_device(self, device: str) -> str:
        if device not in DEVICES:
            raise DeviceError(f"there is no device {device!r}: choose one of {', '.join(DEVICES)}")
        if device == "cuda":
            missing = find_missing_cuda()
            if missing:
                raise DeviceError(f"device cuda is not available: {missing}")
        elif device == "auto":
            # Other files have operators that CUDA lacks: they would copy tensors between both devices at each step.
            device = "cpu" if "cuda" not in self.manifest.devices or find_missing_cuda() else "cuda"
        return device

    def _load_on_a_device(self, split_stages: bool | None, falls_back: bool) -> dict[SessionName, Any]:
        try:
            return self._load(split_stages)
        except DeviceError:
            if not falls_back:
                raise
            self.device = "cpu"
            return self._load(split_stages)

    def _load(self, split_stages: bool | None) -> dict[SessionName, Any]:
        """Open and return the session of each stage, and of the top logits if steps are captured.

        Both stages may have the same session. On the CPU, native kernels compute products if this machine has any.
        """
        self.max_greedy_steps = 1
        self.added_inputs: dict[str, str] = {}
        kernels = find_native_kernels(self._ort) if self._may_use_kernels and self.device == "cpu" else None
        self._kernels: NativeKernels | None = None
        with contextlib.ExitStack() as stack:
            model, folder = read_mapped_model(stack.enter_context(self.files.mapped_path()))
            self._run_seconds = self.max_run_seconds or (LOOP_SECONDS if has_loops(model) else None)
            stack.enter_context(resident_pages.few_file_pages(self.path))
            if kernels is not None:
                products = stack.enter_context(LoadingProducts(kernels, self._opening_threads))
                is_float32 = self.manifest.precision == "fp32"
                decode, stored = self.manifest.decode, self.manifest.stored_products
                model = products.rewrite(model, folder, is_float32, self._run_seconds is None, decode, stored)
                if products.has_greedy_loop:
                    self.max_greedy_steps = max(1, MAX_GREEDY_BYTES // max(products.weight_bytes, MIN_GREEDY_BYTES))
                    self.added_inputs = {GREEDY_PLAN: "int64"}
                self._kernels = kernels if products.count or products.attentions else None
                if products.count and not products.has_small_batch_form:
                    self.small_batch_limit = None
            if self._kernels is None and logger.isEnabledFor(logging.INFO):
                logger.info("native kernels: none: %s", self.reason_without_kernels)
            model, folder = stack.enter_context(
                with_derived_weights(model, folder, self._opening_threads, self.manifest.stored_products)
            )
            sessions = self._open_stages(model, folder, split_stages)
        resident_pages.trim_heap()
        return sessions

    @property
    def _opening_threads(self) -> int:
        """The number of threads that make weights while the file is opened, and of those that hash it."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(self.threads or cores, MAX_OPENING_THREADS)

    def _open_stages(self, model: bytes, folder: Path, split_stages: bool | None) -> dict[SessionName, Any]:
        """Open the sessions of `_load`. folder: of the references of the model."""
        is_cuda = self.device == "cuda"
        stages: tuple[Stage, ...] = ("encode", "decode")
        if not self.manifest.staged or not (is_cuda if split_stages is None else split_stages):
            chooses = self._adds_greedy_choice and self.manifest.encode is None
            session = self._open_capturing(model, folder) if chooses else self._open(model, folder)
            sessions: dict[SessionName, Any] = dict.fromkeys(stages, session)
        else:
            decode = extract_stage(model, "decode")
            open_decode = self._open_capturing if self._adds_greedy_choice else self._open
            sessions = {
                "encode": self._open(extract_stage(model, "encode"), folder),
                "decode": open_decode(decode, folder),
            }
        if self.captures_graphs:
            assert self.manifest.decode is not None
            sessions["top_logits"] = self._open(top_logits_model(int(self.manifest.decode.logits.shape[-1])), folder)
        return sessions

    @property
    def _adds_greedy_choice(self) -> bool:
        """Whether the decode stage gets the nodes of `add_greedy_choice`."""
        return self.device == "cuda"

    def _open_capturing(self, model: bytes, folder: Path) -> Any:
        """Open a decode stage so that its runs are captured as CUDA graphs, if onnxruntime can capture the model.

        A captured graph cannot be stopped, so that runs with a deadline are not captured.
        """
        assert self.manifest.decode is not None
        if self._run_seconds is not None:
            return self._open(model, folder)
        try:
            session = self._open(add_greedy_choice(model, self.manifest.decode), folder, {"enable_cuda_graph": "1"})
        except ModelFileError as error:
            logger.info("no CUDA graphs: %s", error)
            return self._open(model, folder)
        self.captures_graphs = True
        return session

    def _open(self, model: bytes, folder: Path, settings: Mapping[str, str] | None = None) -> Any:
        """Open a model. folder: of its external weights. settings: of the CUDA provider."""
        options = self._ort.SessionOptions()
        defaults = self.manifest.session
        options.intra_op_num_threads = self.threads or defaults.threads or 0
        if not defaults.spinning:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # errors are raised, so that logging them is redundant
        # Planning which buffers results can share takes half of the time of opening, and gains nothing here.
        options.enable_mem_reuse = self.device == "cuda"
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(folder))
        providers: list[Any] = [_CPU]
        if self.device == "cuda":
            # By default onnxruntime's joined norms sum in half precision.
            providers.insert(0, (_CUDA, {"enable_skip_layer_norm_strict_mode": "1", **(settings or {})}))
        if self._kernels is not None:
            options.register_custom_ops_library(os.fspath(self._kernels.file))
        try:
            # No silent fallback: a provider that cannot start must not leave a CPU session in its place. Single nodes
            # (sizes and shapes) do belong on the CPU, so session.disable_cpu_ep_fallback would refuse every file.
            session = self._ort.InferenceSession(
                model,
                options,
                providers,
                enable_fallback=False,
                disabled_optimizers=defaults.disabled_optimizers if self.device == "cpu" else (),
            )
        except Exception as error:
            if self.device == "cpu" and self.manifest.precision == "bf16":
                missing = find_missing_cuda()
                raise DeviceError(
                    f"{self.path} computes in bfloat16, which onnxruntime does on CUDA alone"
                    + (f", and {missing}; export the model" if missing else ": run it there, or export the model")
                    + " with another precision"
                ) from error
            if self.device == "cuda" and "CUDA" in str(error) and not settings:
                raise DeviceError(f"device cuda is not available: {_first_line(error)}") from error
            raise self._translate_error(error) from error
        if self.device == "cuda" and _CUDA not in session.get_providers():
            raise DeviceError("device cuda is not available: onnxruntime's CUDA provider did not start on this machine")
        return session

    def _translate_error(self, error: Exception) -> TformerError:
        """Return the `TformerError` for an error of onnxruntime.

        onnxruntime's errors have no common base class (its own classes, ValueError, RuntimeError).
        """
        if isinstance(error, TformerError):
            return error
        if isinstance(typed := typed_memory_error(error, MORE_MEMORY), OutOfMemoryError):
            return typed
        text = str(error).strip()
        index = _OUT_OF_RANGE.search(text)
        if index:
            return InputError(
                f"{index[1]} is beyond one of the model's tables, which ends at {index[3]}: an id outside its "
                "vocabulary, or an input that is too long"
            )
        if _EXTERNAL.search(text):
            return ModelFileError(
                f"{self.path}: the file with its weights, {self.path.name}.data, is missing or not whole"
            )
        return ModelFileError(f"onnxruntime cannot run {self.path}: {_first_line(error)}")


def find_missing_cuda() -> str | None:
    """Return the reason why onnxruntime's CUDA provider cannot start, as a sentence; None if no reason is known."""
    ort = import_onnxruntime()
    if _CUDA not in ort.get_available_providers():
        return f"the installed onnxruntime holds no CUDA provider: {install_command('cuda')}"
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()  # finds NVIDIA's libraries in site-packages; prints the names of missing ones
    if os.name == "posix":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is no NVIDIA driver on this machine (libcuda.so.1)"
        provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
        missing = re.search(r"(lib(?:cu|nv)\w+\.so[.\d]*): cannot open", _load_error(provider))
        if missing:
            return f"NVIDIA's library {missing[1]} is not installed: {install_command('cuda')}"
    return None


def _shapes(session: Any) -> dict[str, tuple[int | None, ...]]:
    return {i.name: _shape(i) for i in session.get_inputs()}


def _shape(tensor: Any) -> tuple[int | None, ...]:
    """Return the shape of a graph's input or output, with None for free axes."""
    return tuple(d if isinstance(d, int) else None for d in tensor.shape)


def _dtype(kind: str) -> str:
    """Return the manifest's name of a type of onnxruntime, such as "tensor(float)"."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return _DTYPES.get(name, name)


def _bfloat16_tensors(session: Any) -> list[str]:
    return [v.name for v in (*session.get_inputs(), *session.get_outputs()) if v.type == "tensor(bfloat16)"]


def _first_line(error: Exception) -> str:
    """Return the first line of an error of onnxruntime, without its code."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error).strip())
    return text.splitlines()[0][:300] if text else type(error).__name__


def _load_error(library: Path) -> str:
    """Try to load a shared library and return the text of the error; empty if there is none."""
    try:
        ctypes.CDLL(os.fspath(library))
    except OSError as error:
        return str(error)
    return ""
