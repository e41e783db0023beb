"""A check of every refusal that a test causes: it has none of the words of torch's traces or of this project."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tformer_runtime.base.errors import TformerError

FOREIGN = re.compile(
    r"\b(?:aten|prims?|tformer)(?:\.|::)\w+"  # operations of a trace
    r"|\b[suz]\d+\b|SymInt"  # sizes of a trace
    r"|tformer_export[/\\]|adapter\.py|torch\.ops|FakeTensor"  # lines and classes that the user did not write
)


@pytest.fixture(autouse=True)
def refusals_have_the_users_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which an error has a word that the user did not write."""
    texts: list[str] = []
    make = TformerError.__init__

    def note(self: TformerError, reason: str, *args: object, **kwargs: object) -> None:
        texts.append(reason)
        make(self, reason, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TformerError, "__init__", note)
    yield
    foreign = [text for text in texts if FOREIGN.search(text)]
    assert not foreign, foreign
