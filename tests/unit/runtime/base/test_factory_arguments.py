"""Arguments of a factory: unknown, missing and of a wrong type, with the nearest name and the allowed ones."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

import pytest

from tformer_runtime.base.factory_arguments import nearest, wrong_arguments


class Options(TypedDict, total=False):
    pool: str
    layers: int


class Module:
    def __init__(
        self, width: int, *, dropout: float = 0.1, norm: Literal["pre", "post"] = "pre", **options: Unpack[Options]
    ) -> None: ...


def takes_all(width: int, **rest: Any) -> None: ...


def unknown_annotation(width: Nowhere, dropout: float = 0.1) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("factory", "arguments", "reason"),
    [
        (Module, {"width": 8, "dropout": 0, "pool": "mean", "norm": "post"}, None),
        (Module, {"wdith": 8}, "it has no argument wdith (nearest: width); it lacks the argument width"),
        (Module, {"width": 8, "pol": "mean"}, "it has no argument pol (nearest: pool)"),
        (
            Module,
            {"width": 8, "zzz": 1},
            "it has no argument zzz; its arguments are width, dropout, norm, pool, layers",
        ),
        (Module, {"width": 8.5}, "width must be int, not 8.5"),
        (Module, {"width": True}, "width must be int, not True"),
        (Module, {"width": 8, "dropout": "0.1"}, "dropout must be float, not '0.1'"),
        (Module, {"width": 8, "layers": "2"}, "layers must be int, not '2'"),
        (Module, {"width": 8, "norm": "prr"}, "norm must be Literal['pre', 'post'], not 'prr'"),
        (takes_all, {"width": 8, "anything": 1}, None),
        (takes_all, {"anything": 1}, "it lacks the argument width"),
        (unknown_annotation, {"width": "any"}, None),
        (len, {"obj": 1}, "it has no argument obj"),
        (dict, {"any": 1}, None),
    ],
)
def test_reason_names_the_argument(factory, arguments, reason):
    found = wrong_arguments(factory, arguments)
    assert found is None if reason is None else reason in found


def test_arguments_may_be_completed_later():
    assert wrong_arguments(Module, {"dropout": 0.5}, complete=False) is None
    assert "wdith" in wrong_arguments(Module, {"wdith": 8}, complete=False)


def test_nearest_name():
    assert nearest("warmpu", ["steps", "warmup"]) == " (nearest: warmup)"
    assert nearest("xyz", ["steps", "warmup"]) == ""
