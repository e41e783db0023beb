"""Values of JSON as dataclasses, checked wholly: each field is there, of its type and within its bounds, and no other.

The schema is the type hints of the dataclass. msgspec reads them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import msgspec

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.base.validation import MAX_INT

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # a padding id may be negative
Name = Annotated[str, msgspec.Meta(min_length=1)]

T = TypeVar("T")


def read_typed(kind: type[T], data: Any, damaged: str) -> T:
    """Return plain values of JSON as a dataclass.

    data: lists become tuples, and mappings become dataclasses, where the type hints say so.
    damaged: the beginning of the error's sentence: what is damaged.
    Raise ModelFileError that names the place. Cost: linear in the size of the data.
    """
    try:
        value = msgspec.convert(data, kind, strict=True)
        _check_fields(asdict(value), data, "$")  # type: ignore[call-overload]
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ModelFileError(f"{damaged} ({error}): export the model again") from error
    return value


def _check_fields(fields: Any, data: Any, place: str) -> None:
    """Raise ValueError for a field that the data lacks or has in addition. msgspec fills in defaults and skips others.

    fields: the data as the dataclass writes them.
    """
    if isinstance(fields, dict) and isinstance(data, dict):
        for name in fields.keys() ^ data.keys():
            raise ValueError(f"{'missing' if name in fields else 'unknown'} field `{name}` - at `{place}`")
        for name, value in fields.items():
            _check_fields(value, data[name], f"{place}.{name}")
    elif isinstance(fields, (list, tuple)):
        for index, (value, other) in enumerate(zip(fields, data, strict=True)):
            _check_fields(value, other, f"{place}[{index}]")
