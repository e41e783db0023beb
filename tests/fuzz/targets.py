"""The targets by name."""

from __future__ import annotations

import os
import signal

from fuzz.files import FILES
from fuzz.quantised_files import QUANTISED
from fuzz.signals import SIGNALS
from fuzz.target import Target
from fuzz.texts import TEXTS_TARGETS

TARGETS: dict[str, Target] = {target.name: target for target in (*FILES, QUANTISED, *SIGNALS, *TEXTS_TARGETS)}


def _fail(case: bytes) -> None:
    """Do what no product may do, to see that it is seen."""
    match case:
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"hang":
            while True:
                pass
        case b"grow":
            bytearray(b"x") * (700 << 20)
        case b"raise":
            raise KeyError(case)


SELF_TEST = Target("self-test", lambda: [b"fine"], lambda data, _: data, _fail)
ALL_TARGETS = {**TARGETS, SELF_TEST.name: SELF_TEST}
