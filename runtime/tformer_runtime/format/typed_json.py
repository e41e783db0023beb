"""Values of JSON as structs, checked wholly: each field is there, of its type and within its bounds, and no other.

The schema is the type hints of the struct, a `msgspec.Struct`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import asdict

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.base.validation import MAX_INT

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # a padding id may be negative
Name = Annotated[str, msgspec.Meta(min_length=1)]

MAX_LEVELS = 100

T = TypeVar("T", bound=msgspec.Struct)


def read_typed(kind: type[T], data: Any, damaged: str) -> T:
    """Return plain values of JSON as a struct.

    data: lists become tuples, and mappings become structs, where the type hints say so.
    damaged: the beginning of the error's sentence: what is damaged.
    Raise ModelFileError that names the place. Cost: linear in the size of the data.
    """
    try:
        value = msgspec.convert(data, kind, strict=True)
        _check_fields(value, data, "$")
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ModelFileError(f"{damaged} ({error}): export the model again") from error
    return value


def _check_fields(value: Any, data: Any, place: str, levels: int = MAX_LEVELS) -> None:
    """Raise ValueError for a field that the data lacks or has in addition. msgspec fills in defaults and skips others.

    value: the data as `msgspec.convert` returns it.
    levels: of nesting that are allowed. Code that reads a value by recursion relies on it.
    """
    if not levels:
        raise ValueError(f"more than {MAX_LEVELS} levels of nesting")
    if isinstance(value, msgspec.Struct):
        value = asdict(value)
        for name in value.keys() ^ data.keys():
            raise ValueError(f"{'missing' if name in value else 'unknown'} field `{name}` - at `{place}`")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_fields(item, data[name], f"{place}.{name}", levels - 1)
    elif isinstance(value, (list, tuple)):
        for index, (item, other) in enumerate(zip(value, data, strict=True)):
            _check_fields(item, other, f"{place}[{index}]", levels - 1)
