"""A program that matches names with regular expressions, as PEFT does: one request a line, one empty reply a line.

An expression of a stranger may need longer than the age of the universe for one name. So it first runs in this process,
which has a limit of processor time and which its parent can end. A request is JSON: "patterns", "names" and "seconds".
"""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any

FORMS = (  # in which PEFT matches an expression, by its methods and its settings
    r"{}",
    r"(.*\.)?({})$",
    r"(^|.*\.){}($|\..*)",
    r".*\.{}$",
    r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
)


def match_all(request: dict[str, Any]) -> None:
    """Match each name of a request with each pattern in each form."""
    for pattern in request["patterns"]:
        for form in FORMS:
            try:
                compiled = re.compile(form.replace("{}", pattern))
            except (re.error, RecursionError, OverflowError):
                continue  # PEFT refuses it
            for name in request["names"]:
                compiled.search(name)
                compiled.fullmatch(name)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    for line in sys.stdin:
        request = json.loads(line)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # its signal ends the process
        match_all(request)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        print("{}", flush=True)


if __name__ == "__main__":
    main()
