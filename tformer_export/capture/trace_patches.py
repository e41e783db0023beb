"""Patches of torch and Python's functions while a model is traced. They hold for the whole process.

The caller holds TORCH_PATCH_LOCK.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx import proxy as tracing
from torch.fx.experimental import proxy_tensor
from torch.fx.proxy import TracerBase

from tformer_export.capture.size_arithmetic import size_arithmetic_kept
from tformer_export.common.source_lines import is_users_file

ROOT = 0.5
KNOWN_ELEMENTS = 64  # of a constant tensor whose numbers Python may read
LOGARITHMS = {"log": torch.log, "log2": torch.log2, "log10": torch.log10}


class SizeFractionError(TypeError):
    """forward makes a whole number of a fraction of a size, or of its root."""


@contextmanager
def functions_of_sizes() -> Iterator[None]:
    """Patch the functions of `math` and methods that numpy calls: a root or logarithm of a size is traced with it.

    Otherwise they would give the number for the example's size, or fail. `math.ceil(size / 4)` is a division of whole
    numbers. `int()` of a fraction of a size has to give the number for the example: it fails. `(size < 40) == True`
    decides the condition: torch compares without a guard for the size.
    """
    number: Any = torch.SymInt
    fraction: Any = torch.SymFloat
    condition: Any = torch.SymBool
    equals, divide = condition.__eq__, number.__truediv__
    rounds = {name: getattr(fraction, name) for name in ("__int__", "__ceil__", "__floor__")}
    fraction.__int__ = _refuse_number
    fraction.__ceil__ = lambda value: _rounded(value, rounds["__ceil__"], up=True)
    fraction.__floor__ = lambda value: _rounded(value, rounds["__floor__"], up=False)
    number.__truediv__ = lambda size, other: _ratio(divide(size, other), size, other)
    condition.__eq__ = lambda value, other: bool(value) == other if isinstance(other, bool) else equals(value, other)
    originals = {name: getattr(math, name) for name in ("sqrt", *LOGARITHMS)}
    functions: dict[str, Callable[..., Any]] = {"sqrt": lambda size: size**ROOT}
    functions |= {name: _logarithm(function) for name, function in LOGARITHMS.items()}
    for name, function in functions.items():
        setattr(math, name, _for_sizes(originals[name], function))
        setattr(number, name, function)
    try:
        yield
    finally:
        condition.__eq__, number.__truediv__ = equals, divide
        for name, original in rounds.items():
            setattr(fraction, name, original)
        for name, original in originals.items():
            setattr(math, name, original)
            delattr(number, name)


def _refuse_number(value: torch.SymFloat) -> int:
    if value.node.is_constant():
        return int(value.node.guard_float("", 0))
    raise SizeFractionError("it makes a whole number of a fraction of a size")


def _ratio(value: Any, size: torch.SymInt, other: Any) -> Any:
    """Note on a fraction its numerator and its denominator, if both are whole numbers."""
    if isinstance(value, torch.SymFloat) and isinstance(other, (int, torch.SymInt)):
        value.whole_numbers = size, other  # type: ignore[attr-defined]
    return value


def _rounded(value: Any, original: Callable[[Any], Any], up: bool) -> Any:
    if (parts := getattr(value, "whole_numbers", None)) is None:
        return original(value)
    size, other = parts
    return (size + other - 1) // other if up else size // other


def _logarithm(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def of_size(size: torch.SymInt, *base: float) -> torch.Tensor:
        whole = torch.scalar_tensor(size, dtype=torch.float64)  # type: ignore[arg-type]
        result = function(whole)
        return result / math.log(*base) if base else result

    return of_size


def _for_sizes(original: Callable[..., Any], of_size: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, *rest: (of_size if isinstance(value, torch.SymInt) else original)(value, *rest)


@contextmanager
def functions_with_free_sizes() -> Iterator[None]:
    """Patch functions of torch that a trace with free sizes cannot follow to others with the same results."""
    meshgrid, max_pool = torch.functional.meshgrid, torch.max_pool1d

    def indexed(*tensors: Any, indexing: str | None = None) -> Any:
        return meshgrid(*tensors, indexing=indexing or "ij")

    def pooled(
        x: torch.Tensor, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> torch.Tensor:
        size, padding, dilation = (torch.nn.modules.utils._single(value) for value in (size, padding, dilation))
        stride = torch.nn.modules.utils._single(stride) or size
        row = (1, *size), (1, *stride), (0, *padding), (1, *dilation), ceil_mode
        return torch.max_pool2d(x.unsqueeze(-2), *row).squeeze(-2)

    torch.functional.meshgrid = torch.meshgrid = indexed
    torch.max_pool1d = pooled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.functional.meshgrid = torch.meshgrid = meshgrid
        torch.max_pool1d = max_pool


@contextmanager
def rows_left() -> Iterator[None]:
    """Leave torch.vmap if a trace fails inside it, where it stays otherwise."""
    before = torch._C._functorch.maybe_current_level() or 0
    try:
        yield
    finally:
        while (torch._C._functorch.maybe_current_level() or 0) > before:
            torch._C._functorch._vmap_decrement_nesting()


@contextmanager
def causal_mask_hints_kept() -> Iterator[None]:
    """Patch torch.nn's Transformer layers, which read a mask's values to detect a causal mask.

    The detection gives attention a hint that changes no result. A trace has no values, so the hint is the caller's
    `is_causal` for a while.
    """
    layers = torch.nn.modules.transformer
    original = layers._detect_is_causal_mask
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        layers._detect_is_causal_mask = original


@contextmanager
def copies_of_functions_run() -> Iterator[None]:
    """Let copies of torch's functions in users' modules run, instead of the function of torch with their arguments.

    Such a copy asks `has_torch_function` first, as the original does. While a mode of torch traces, the answer is yes.
    The copy then hands its arguments to the function of torch, which may not have all of them.
    """
    replaced = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" or not isinstance(module, ModuleType):
            continue
        for function in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            if vars(module).get(function) is getattr(torch.overrides, function):
                replaced.append((module, function))
    for module, function in replaced:
        setattr(module, function, lambda *_: False)
    try:
        yield
    finally:
        for module, function in replaced:
            setattr(module, function, getattr(torch.overrides, function))


@contextmanager
def small_constants_known() -> Iterator[None]:
    """Let torch.export know the numbers in small tensors that forward makes of numbers.

    Python may then read them, as in `h, w = torch.tensor(image.shape[2:]) // 8`. torch knows tensors of one element.
    """
    limit = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = KNOWN_ELEMENTS
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit


@contextmanager
def data_detached() -> Iterator[None]:
    """Patch `tensor.data`, which a trace does not follow, to the tensor without its gradient."""
    original: Any = torch._C.TensorBase.data
    torch.Tensor.data = property(lambda tensor: tensor.detach(), original.__set__)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data  # the property of the base class is visible again


@contextmanager
def lines_of_helpers_recorded() -> Iterator[None]:
    """Patch the stack that a trace records for each operation: keep the user's helper functions.

    torch keeps the frames of functions with the name `forward` alone, so a refusal would name the line of forward that
    calls a helper.
    """
    original, captured = TracerBase._filter_traceback_frames, vars(tracing)["CapturedTraceback"]
    TracerBase._filter_traceback_frames = lambda _, frames: frames  # type: ignore[method-assign,assignment]
    tracing.CapturedTraceback = _FramesOfForward  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = original  # type: ignore[method-assign]
        tracing.CapturedTraceback = captured  # type: ignore[attr-defined]


class _FramesOfForward:
    """The frames of forward, and those of the user's functions that it calls.

    torch would look up the line of code of each of a hundred frames, for each operation, and then drop most of them.
    """

    def __init__(self, frames: list[FrameType]) -> None:
        self._frames = frames

    @staticmethod
    def extract() -> _FramesOfForward:
        frames: list[FrameType] = []
        num_inside = 0  # the outermost forward, and all that it calls
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            is_forward = frame.f_code.co_name == "forward"
            if is_forward or _is_users_file(frame.f_code.co_filename):
                frames.append(frame)
            if is_forward:
                num_inside = len(frames)
            frame = frame.f_back
        return _FramesOfForward(frames[:num_inside])

    def summary(self) -> traceback.StackSummary:
        """Return the frames, the outermost first."""
        return traceback.StackSummary.from_list(
            [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name, None) for f in reversed(self._frames)]
        )


_is_users_file = functools.lru_cache(is_users_file)


@contextmanager
def results_not_described() -> Iterator[None]:
    """Patch a trace that computes with numbers: its nodes describe neither their results nor the weights they read.

    For each description of a tensor with numbers torch makes a mode, which keeps the stack, and an empty tensor.
    """
    set_meta, extract_val = proxy_tensor.set_meta, proxy_tensor.extract_val
    proxy_tensor.set_meta = lambda proxy, val: proxy
    proxy_tensor.extract_val = lambda val, include_real=False: None
    try:
        yield
    finally:
        proxy_tensor.set_meta, proxy_tensor.extract_val = set_meta, extract_val


@contextmanager
def repeated_work_left_out() -> Iterator[None]:
    """Patch what a trace does many times with the same result, in most of the time of an export."""
    with size_arithmetic_kept(), kept_results_not_made_again():
        yield


@contextmanager
def kept_results_not_made_again() -> Iterator[None]:
    """Patch what torch does when it keeps the result of an operation on tensors without data, for equal calls later.

    It makes the result again from what it kept, and compares the dispatch keys of both. With free sizes this takes as
    long as the operation, and the keys are equal: a trace for an export has no gradients and no kinds of tensors whose
    keys differ. torch notes no condition on a size meanwhile, so that none is missed. A torch with other functions is
    left as it is.
    """
    mode: Any = fake_tensor.FakeTensorMode
    describe, make = (
        getattr(mode, name, None) for name in ("_get_output_info_for_cache_entry", "_output_from_cache_entry")
    )
    if describe is None or make is None or [*inspect.signature(describe).parameters][-1] != "output":
        yield
        return
    described = threading.local()  # other threads may trace as well

    def describe_only(*arguments: Any) -> Any:
        described.result = arguments[-1]
        try:
            return describe(*arguments)
        finally:
            del described.result

    def make_or_give(*arguments: Any) -> Any:
        return described.result if hasattr(described, "result") else make(*arguments)

    mode._get_output_info_for_cache_entry, mode._output_from_cache_entry = describe_only, make_or_give
    try:
        yield
    finally:
        mode._get_output_info_for_cache_entry, mode._output_from_cache_entry = describe, make


@contextmanager
def composites_registered_fast() -> Iterator[None]:
    """Patch what `run_decompositions` does for torch's composite operators, which is the same for all programs.

    It lists them once for each library of operators, and registers twenty kernels for each of them. Each registration
    makes annotations of types again.
    """
    utils, original = torch._export.utils, torch._ops.OperatorBase.py_impl
    materialize = utils._materialize_cpp_cia_ops

    def py_impl(operator: Any, key: Any) -> Any:
        if (
            not isinstance(key, torch._C.DispatchKey)
            or key is torch._C.DispatchKey.Python
            or key in operator.py_kernels
        ):
            return original(operator, key)

        def register(kernel: Any) -> Any:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
            return kernel

        return register

    utils._materialize_cpp_cia_ops = functools.cache(materialize)
    torch._ops.OperatorBase.py_impl = py_impl  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        utils._materialize_cpp_cia_ops = materialize
        torch._ops.OperatorBase.py_impl = original  # type: ignore[method-assign]
