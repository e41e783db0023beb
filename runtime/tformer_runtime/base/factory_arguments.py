"""Keyword arguments of a factory, compared with its signature before it is called; the nearest name of an unknown."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal

import msgspec

_PLAIN = (int, float, str, bool, NoneType)


def nearest_name(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that is nearest to an unknown one; None if no name is near."""
    return next(iter(difflib.get_close_matches(name, list(allowed), 1)), None)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest allowed name, if there is one."""
    near = nearest_name(name, allowed)
    return f" (nearest: {near})" if near else ""


def wrong_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any], *, complete: bool = True) -> str | None:
    """Return why a factory cannot be called with keyword arguments; None if its signature and annotations allow them.

    complete: whether no further arguments will be given.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return None
    hints = _hints(factory)
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    listed = typing.get_args(hints.get(rest)) if rest else ()  # of **rest: Unpack[a TypedDict]
    for kind in listed:
        hints |= _hints(kind)
        named |= dict.fromkeys(_hints(kind), None)
    takes_all = rest is not None and not listed
    unknown = [] if takes_all else [name + nearest(name, named) for name in arguments if name not in named]
    empty = inspect.Parameter.empty
    missing = (
        [name for name, default in named.items() if default is empty and name not in arguments] if complete else []
    )
    reasons = [f"it has no argument {', '.join(unknown)}"] if unknown else []
    reasons += [f"it lacks the argument {', '.join(missing)}"] if missing else []
    reasons += [
        f"{name} must be {inspect.formatannotation(hints[name])}, not {value!r:.80}"
        for name, value in arguments.items()
        if _is_plain(hints.get(name)) and not _fits(value, hints[name]) and value != named.get(name)
    ]
    if unknown or missing:
        reasons.append(f"its arguments are {', '.join(named) or 'none'}")
    return "; ".join(reasons) or None


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of arguments."""
    try:
        made = isinstance(factory, type) and not typing.is_typeddict(factory)
        return typing.get_type_hints(factory.__init__ if made else factory)
    except Exception:  # annotations are any expressions of the user's
        return {}


def _is_plain(hint: Any) -> bool:
    """Return whether an annotation decides about values of JSON or TOML."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, UnionType):
        return all(map(_is_plain, typing.get_args(hint)))
    return hint in _PLAIN or origin is Literal


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True
