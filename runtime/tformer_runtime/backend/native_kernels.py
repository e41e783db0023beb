"""Optional native kernels for products, attention and norms: the library of the wheel `tformer-kernels`.

The library registers operators with onnxruntime, which take the place of standard operators when a file is loaded
(`rewriting.product_rewrite`). Results of quantised products have the same bits; the others differ in their last bits.
Without the library, or on a processor that it has no path for, files run as they are. Figures:
docs/design/native-kernels.md.

The environment variable TFORMER_KERNELS chooses: `0` for no kernels; the name of a path, which then computes all
operators that the kernels know, if the processor has it; `products` to leave all but products to onnxruntime; `apart`
to run each operator by itself, which has the same results. Several of them have commas between them. Another value is
an OptionError.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.base.errors import MissingExtraError, OptionError
from tformer_runtime.base.extras import import_onnxruntime, install_command
from tformer_runtime.format.manifest import DecodeStage, Manifest
from tformer_runtime.format.onnx_graph import Tensor, tensor_array
from tformer_runtime.format.stored_forms import StoredProducts
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.format.weight_forms import MIDDLE
from tformer_runtime.rewriting.float_product import FloatProduct
from tformer_runtime.rewriting.product_rewrite import PACKED_PRODUCT, replace_products
from tformer_runtime.rewriting.quantized_product import QuantizedProduct
from tformer_runtime.rewriting.stored_weights import read_rows_of_6_bits

VARIABLE = "TFORMER_KERNELS"
OFF, PRODUCTS_ALONE, APART = "0", "products", "apart"
VERSION = 9  # of the library's functions and operators
FLOAT_BITS = 32
ALL_BITS = (8, 4, FLOAT_BITS)
# Path of the library → bits of the weights for which whole steps were measured to be faster than with onnxruntime's
# operators, on processors whose best path it is
BITS_OF_PATH: dict[str, tuple[int, ...]] = {
    "amx": (),
    "avx512vnni": (8, 4, FLOAT_BITS),
    "avxvnni": (4,),
    "avx2": (),
    "neoni8mm": (),
    "neondot": (),
    "scalar": (),
}
ATTENTION_PATHS = ("avx512vnni",)  # for which attention was measured to be faster than onnxruntime's
BITS_OF_QUANTIZATION = {"none": FLOAT_BITS, "int8": 8, "int4": 4}  # of most matrices; a mixture has several
LIBRARY_NAME = "libtformer_kernels.so"  # on Linux and macOS


class NativeKernels:
    """A loaded library, and the path that it computes with on this processor.

    file: the library.
    path: name of the path, such as "avx512vnni".
    bits: bits of the weights that it multiplies.
    attention_path: the place of the path in the library; None if attention is left to onnxruntime.
    makes_chains: whether operators may become chains.
    paths: the names of all paths that this processor has.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        file: Path,
        path: str,
        bits: tuple[int, ...],
        attention_path: int | None,
        makes_chains: bool,
        paths: Sequence[str],
    ) -> None:
        self.file, self.path, self.bits, self.paths = file, path, bits, tuple(paths)
        self.attention_path, self.makes_chains = attention_path, makes_chains
        pointer, integer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint32
        self._pack8, self._pack4 = library.tformer_kernels_pack8, library.tformer_kernels_pack4
        self._release = library.tformer_kernels_release
        self._pack8.argtypes = [
            ctypes.c_char_p, pointer, integer, integer, ctypes.c_uint8, size, size, pointer, pointer, pointer, size,
        ]  # fmt: skip
        self._pack4.argtypes = [ctypes.c_char_p, pointer, pointer, size, size, size, pointer, pointer, pointer, size]
        self._pack_float = library.tformer_kernels_pack_float
        self._pack_float.argtypes = [ctypes.c_char_p, pointer, integer, integer, size, size, pointer, pointer, size]
        self._pack8.restype = self._pack4.restype = self._pack_float.restype = integer
        self._release.argtypes, self._release.restype = [integer], ctypes.c_int32
        self._knows = library.tformer_kernels_knows
        self._knows.argtypes, self._knows.restype = [integer], ctypes.c_int32
        self._new_packer, self._wait = library.tformer_kernels_new_packer, library.tformer_kernels_wait
        self._close_packer = library.tformer_kernels_close_packer
        self._new_packer.argtypes, self._new_packer.restype = [count], pointer
        self._wait.argtypes, self._wait.restype = [pointer], integer
        self._close_packer.argtypes, self._close_packer.restype = [pointer], None

    @property
    def description(self) -> str:
        """The kernels in words, such as "native kernels avx512vnni"."""
        return f"native kernels {self.path}"

    @contextmanager
    def packer(self, threads: int) -> Iterator[Packer]:
        """Pack in the background within the `with` block. threads: how many pack, the one that waits included."""
        pointer = self._new_packer(threads)
        if pointer is None:
            raise MemoryError
        try:
            yield Packer(pointer, lambda: int(self._wait(pointer)))
        finally:
            self._close_packer(pointer)

    def pack(self, product: QuantizedProduct, files: WeightFiles, packer: Packer | None = None) -> int | None:
        """Pack the weights of a product and return their handle; None if the kernels refuse them.

        The array in the file is read once. With a packer the handle is returned at once, and is of no matrix after
        `Packer.wait` if the kernels refuse the weights then. The handle must be given to `release`.
        """
        weights, scale, bias = product.weights, product.scale, product.bias
        of_6_bits = weights.lower is not None
        stored = read_rows_of_6_bits(weights, files) if of_6_bits else tensor_array(weights.tensor, files.read)
        codes = _contiguous(weights.codes, files)
        if stored is None or stored.size == 0 or (weights.codes is not None and codes is None):
            return None
        path, bias_pointer = self.path.encode(), None if bias is None else bias.ctypes.data
        mapped = stored.nbytes if not of_6_bits and weights.tensor.raw is None else 0
        if packer is not None:
            packer.keep(stored, codes)
        sizes = weights.spec.inner, weights.spec.columns
        rest = *sizes, scale.ctypes.data, bias_pointer, packer and packer.pointer, mapped
        if codes is not None:
            handle = self._pack4(path, stored.ctypes.data, codes.ctypes.data, weights.spec.block, *rest)
        else:
            bytes_of_column = stored[0].nbytes
            strides = (bytes_of_column, 1) if weights.has_columns else (1, bytes_of_column)
            handle = self._pack8(path, stored.ctypes.data, *strides, MIDDLE if weights.is_raised else 0, *rest)
        if packer is not None and of_6_bits:  # the rows fill memory
            packer.wait()
        return int(handle) if handle > 0 else None

    def pack_float(self, product: FloatProduct, files: WeightFiles, packer: Packer | None = None) -> int | None:
        """Do as `pack` does, for a float32 product."""
        stored = tensor_array(product.tensor, files.read)
        if stored is None or stored.size == 0:
            return None
        length = stored.shape[1]  # of a stored row
        inner, columns = stored.shape[::-1] if product.is_transposed else stored.shape
        strides = (1, length) if product.is_transposed else (length, 1)
        bias = None if product.bias is None else product.bias.ctypes.data
        mapped = stored.nbytes if product.tensor.raw is None else 0
        if packer is not None:
            packer.keep(stored)
        rest = inner, columns, bias, packer and packer.pointer, mapped
        handle = self._pack_float(self.path.encode(), stored.ctypes.data, *strides, *rest)
        return int(handle) if handle > 0 else None

    def has_matrix(self, handle: int) -> bool:
        """Return whether a handle is of a matrix."""
        return bool(self._knows(handle))

    def release(self, handle: int) -> None:
        """Give a handle back. Sessions that multiply with its matrix keep the matrix until they are closed."""
        self._release(handle)


class Packer:
    """Packs in the background, and keeps the arrays that it reads. Valid within `NativeKernels.packer`."""

    def __init__(self, pointer: int, wait: Callable[[], int]) -> None:
        """pointer: of the library's packer. wait: for the library, as `Packer.wait`."""
        self.pointer, self._wait = pointer, wait
        self._sources: list[Array | None] = []

    def keep(self, *sources: Array | None) -> None:
        """Keep arrays until they are packed. Call it first: an error afterwards leaves them to the packer's threads."""
        self._sources += sources

    def wait(self) -> int:
        """Return when all matrices are packed, and how many of them the kernels have refused so far.

        The handles of those are of no matrix.
        """
        refused = self._wait()
        self._sources.clear()
        return refused


class LoadingProducts:
    """The packed products of one file. Leave the `with` block when the sessions are open.

    count: the number of products that kernels compute.
    attentions: the number of attentions that kernels compute.
    weight_bytes: the bytes of the packed weights.
    has_greedy_loop: whether the decode stage can run several steps at once.
    has_small_batch_form: whether a session has onnxruntime's kernels for few rows.
    """

    def __init__(self, kernels: NativeKernels, threads: int = 1) -> None:
        """Pack nothing yet. threads: how many pack, the one that waits included."""
        self.kernels, self.count, self.attentions, self.has_small_batch_form = kernels, 0, 0, False
        self.has_greedy_loop = False
        self._threads = threads
        self._handles: dict[tuple[Any, ...], int | None] = {}  # None for a product that the kernels refuse
        self._sizes: dict[int, int] = {}  # handle → bytes

    def __enter__(self) -> LoadingProducts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._sizes:
            self.kernels.release(handle)

    @property
    def weight_bytes(self) -> int:
        return sum(self._sizes.values())

    def rewrite(
        self,
        model: bytes,
        folder: Path,
        is_float32: bool = True,
        makes_chains: bool = False,
        decode: DecodeStage | None = None,
        stored: StoredProducts | None = None,
    ) -> bytes:
        """Return the model with operators of the kernels, if `count` or `attentions` is more than 0 then.

        is_float32: whether the model's floats are float32.
        makes_chains: whether operators may become chains, which onnxruntime cannot stop in the middle.
        decode: the decode stage, if it may run several steps at once.
        stored: the records of quantised products.

        Matrices are packed while the graph is rewritten. If the kernels refuse any of them at last, the graph is
        rewritten again without these.

        Sessions need the library's operators (`register_custom_ops_library`). Errors: see `replace_products`.
        """
        path = self.kernels.attention_path if is_float32 else None
        chains = self._threads if makes_chains and self.kernels.makes_chains else 0
        with self.kernels.packer(self._threads) as packer:
            pack = partial(self._pack, packer=packer)
            pack_float = partial(self._pack_float, packer=packer) if FLOAT_BITS in self.kernels.bits else None
            refused = 0
            while True:
                rewritten = replace_products(model, folder, pack, pack_float, path, chains, decode, stored)
                found = packer.wait()  # each time: a rewriting may reach matrices that one without memory did not reach
                if found == refused:
                    break
                refused = found
                self._forget_refused()
        model, self.count, self.attentions = rewritten.model, rewritten.products, rewritten.attentions
        self.has_greedy_loop = rewritten.has_greedy_loop
        self.has_small_batch_form = PACKED_PRODUCT.encode() in model
        return model

    def _pack(self, product: QuantizedProduct, files: WeightFiles, packer: Packer) -> int | None:
        """Pack weights once for all stages, branches and sessions that read them."""
        weights = product.weights
        if weights.bits not in self.kernels.bits:
            return None
        bias = None if product.bias is None else product.bias.tobytes()
        key = weights, product.scale.tobytes(), bias
        num_bytes = weights.spec.inner * weights.spec.columns * weights.bits // 8
        return self._once(key, num_bytes, lambda: self.kernels.pack(product, files, packer))

    def _pack_float(self, product: FloatProduct, files: WeightFiles, packer: Packer) -> int | None:
        """Do as `_pack` does, for a float32 product."""
        bias = None if product.bias is None else product.bias.tobytes()
        key = product.tensor, product.is_transposed, bias
        return self._once(key, product.tensor.byte_count, lambda: self.kernels.pack_float(product, files, packer))

    def _once(self, key: tuple[Any, ...], num_bytes: int, pack: Callable[[], int | None]) -> int | None:
        if key not in self._handles:
            handle = self._handles[key] = pack()
            if handle is not None:
                self._sizes[handle] = num_bytes
        return self._handles[key]

    def _forget_refused(self) -> None:
        for key, handle in self._handles.items():
            if handle is not None and not self.kernels.has_matrix(handle):
                self._handles[key] = None
                del self._sizes[handle]


def _contiguous(tensor: Tensor | None, files: WeightFiles) -> Array | None:
    array = tensor_array(tensor, files.read) if tensor is not None else None
    return None if array is None else np.ascontiguousarray(array)


def wanted_kernels() -> str:
    """Return the value of TFORMER_KERNELS, "" if it is not set. Raise OptionError for a value with no meaning."""
    wanted = os.environ.get(VARIABLE, "")
    parts = [part for part in wanted.split(",") if part]
    paths = [part for part in parts if part in BITS_OF_PATH]
    if wanted == OFF or (all(part in (*BITS_OF_PATH, PRODUCTS_ALONE, APART) for part in parts) and len(paths) < 2):
        return wanted
    raise OptionError(
        f"{VARIABLE} must be {OFF}, for no kernels, or one of {', '.join(BITS_OF_PATH)}, and with it or alone "
        f"{PRODUCTS_ALONE} or {APART}, with commas between them, not {wanted!r}"
    )


def find_native_kernels(onnxruntime: Any) -> NativeKernels | None:
    """Return the kernels for this processor; None if there are none, or if TFORMER_KERNELS is 0.

    Raise OptionError for another value of TFORMER_KERNELS than those that it can have.
    """
    return load_kernels(onnxruntime, wanted_kernels())


def kernels_for(manifest: Manifest) -> NativeKernels | None:
    """Return the kernels that a file would run with on the CPU of this machine, without opening it."""
    wanted_kernels()  # refused for a file without kernels too
    if manifest.target == "cuda":
        return None
    try:
        kernels = find_native_kernels(import_onnxruntime())
    except MissingExtraError:
        return None
    if kernels is None or (manifest.quantization == "none" and manifest.precision != "fp32"):
        return None
    if manifest.lacks_records:
        return None
    bits = BITS_OF_QUANTIZATION.get(manifest.quantization)
    return kernels if bits is None or bits in kernels.bits else None


def reason_without_kernels(manifest: Manifest, device: str = "cpu") -> str:
    """Return why a file runs without native kernels, such as "switched off by TFORMER_KERNELS=0".

    device: on which it runs.
    """
    if device == "cuda" or manifest.target == "cuda":
        return "a file for CUDA has CUDA's operators"
    try:
        kernels = _find_kernels(import_onnxruntime(), wanted_kernels())
    except MissingExtraError:
        return "onnxruntime is not installed"
    if isinstance(kernels, str):
        return kernels
    if manifest.lacks_records:
        return "an earlier tformer wrote the file, without records of its products: export the model again"
    bits = BITS_OF_QUANTIZATION.get(manifest.quantization)
    if bits is not None and bits not in kernels.bits:
        return f"not measured to be faster for weights of {bits} bits on this processor ({kernels.path})"
    return "the file has no product that they compute"


@cache
def load_kernels(onnxruntime: Any, wanted: str) -> NativeKernels | None:
    """Return the kernels of a path; None if the library or the processor does not have it.

    wanted: as in TFORMER_KERNELS; empty for the path that is fastest here.
    """
    kernels = _find_kernels(onnxruntime, wanted)
    return None if isinstance(kernels, str) else kernels


def _find_kernels(onnxruntime: Any, wanted: str) -> NativeKernels | str:
    """Return the kernels as `load_kernels` does, or the reason why there are none."""
    if wanted == OFF:
        return f"switched off by {VARIABLE}={OFF}"
    loaded = _load_library()
    if isinstance(loaded, str):
        return loaded
    library, file = loaded
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(os.fspath(file))
        if not library.tformer_kernels_registered():
            return f"this onnxruntime has another interface than {file} expects"
        places = _supported_paths(library)
    except Exception as error:  # damaged, for another system, or onnxruntime's errors, which have no common class
        return f"{file} cannot be loaded: {error}"
    parts = [part for part in wanted.split(",") if part]
    chosen = [part for part in parts if part not in (PRODUCTS_ALONE, APART)]
    path = chosen[0] if chosen else next(iter(places))
    bits = ALL_BITS if chosen else BITS_OF_PATH.get(path, ())
    if path not in places:
        return f"this processor lacks {path}, which {VARIABLE} names: it has {', '.join(places)}"
    if not bits:
        return f"not measured to be faster on this processor ({path}); {VARIABLE}={path} switches them on"
    has_attention = PRODUCTS_ALONE not in parts and (bool(chosen) or path in ATTENTION_PATHS)
    attention_path = places[path] if has_attention else None
    return NativeKernels(library, file, path, bits, attention_path, APART not in parts, list(places))


@cache
def _load_library() -> tuple[ctypes.CDLL, Path] | str:
    """Return the library and its file, or the reason why there is none of this version."""
    file = _library_file()
    if file is None:
        return f"tformer-kernels is not installed ({install_command('fast')})"
    try:
        library = ctypes.CDLL(os.fspath(file))
        version = library.tformer_kernels_version()
    except (OSError, AttributeError) as error:  # damaged, or for another system
        return f"{file} cannot be loaded: {error}"
    if version != VERSION:
        return f"{file} has another version than this runtime: install both again (pip install -U 'tformer[fast]')"
    return library, file


def _reference(array: Array) -> Any:
    """Return a reference to the numbers of a writable array for a call. It takes a quarter of the time of `.ctypes`."""
    return ctypes.byref(ctypes.c_char.from_buffer(array.data))


class NativeRanking:
    """`decoding.beam_ranking.rank_beams` by the library. Cost: one pass over the logits of the beams."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_uint64
        self._rank = library.tformer_kernels_rank_beams
        self._rank.argtypes = [pointer, size, size, pointer, pointer, pointer, size, size, size, pointer, pointer]
        self._rank.restype = ctypes.c_int64

    def __call__(self, logits: F32, norms: F32, rows: Ints, scores: F32, width: int) -> tuple[F32, F32, Ints, Ints]:
        if logits.strides[1] != logits.itemsize:
            logits = np.ascontiguousarray(logits)
        shape = len(rows), width
        numbers, places = np.empty((2, *shape), np.float32), np.empty((2, *shape), np.int64)
        refusal = self._rank(
            logits.ctypes.data, logits.strides[0] // logits.itemsize, logits.shape[1], _reference(norms),
            _reference(np.ascontiguousarray(rows)), _reference(np.ascontiguousarray(scores)), *rows.shape, width,
            _reference(numbers), _reference(places),
        )  # fmt: skip
        if refusal:
            raise MemoryError
        return numbers[0], numbers[1], places[0], places[1]


def find_native_ranking() -> NativeRanking | None:
    """Return the ranking of beams by the library; None without it, or if TFORMER_KERNELS is 0."""
    loaded = _load_library() if wanted_kernels() != OFF else ""
    return None if isinstance(loaded, str) else NativeRanking(loaded[0])


def _supported_paths(library: ctypes.CDLL) -> dict[str, int]:
    """Return the places of the paths that this processor has, the best first."""
    library.tformer_kernels_path.restype = ctypes.c_char_p
    places: dict[str, int] = {}
    index = 0
    while (name := library.tformer_kernels_path(index)) is not None:
        if library.tformer_kernels_supports(name):
            places[name.decode()] = index
        index += 1
    return places


def _library_file() -> Path | None:
    """Return the library of the installed wheel, or the one that `make kernels` has built in this checkout."""
    try:
        import tformer_kernels

        folders = [Path(folder) for folder in tformer_kernels.__path__]
    except ImportError:
        folders = []
    folders.append(Path(__file__).parents[2] / "kernels" / "tformer_kernels")
    return next((folder / LIBRARY_NAME for folder in folders if (folder / LIBRARY_NAME).is_file()), None)
