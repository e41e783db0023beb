"""A program that fills in Jinja templates: one request a line on standard input, one reply a line on standard output.

A template is a program of a stranger. Jinja's sandbox keeps it from calling out, but not from running for ever or from
filling the memory. So it runs in this process, which has limits and which its parent can end (`chat_template`).

A request is JSON: "template", "seconds" of processor time, and "variables" to fill in; without variables the reply is
the names that the template reads. A reply is JSON with "text", "names", "refused" (the template's own refusal) or
"error". The program imports nothing of the package, so that it starts within 0.1 s.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 512 << 20  # of the process


class Generation(Extension):
    """Replace {% generation %} … {% endgeneration %}, which marks text for training, by its content.

    Its variables end with it, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class RefusedError(Exception):
    """A conversation that the template refuses, by raise_exception."""


def refuse(message: object) -> None:
    raise RefusedError(str(message))


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with the extensions of transformers' apply_chat_template."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = to_json  # Jinja's own filter escapes HTML
    made.globals |= {"raise_exception": refuse, "strftime_now": now}
    return made


@functools.lru_cache(maxsize=4)
def compiled(template: str) -> Any:
    return environment().from_string(template)


def reply_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request."""
    try:
        template = compiled(request["template"])
        if "variables" not in request:
            return {"names": sorted(find_undeclared_variables(environment().parse(request["template"])))}
        return {"text": str(template.render(**request["variables"]))}
    except RefusedError as error:
        return {"refused": " ".join(str(error).split())}
    except MemoryError:
        return {"error": f"it needs more than {MAX_BYTES >> 20} MB of memory"}
    except Exception as error:  # Jinja's own, or any error of an expression in the template
        return {"error": str(error).splitlines()[0] if str(error).strip() else type(error).__name__}


def main() -> None:
    if sys.platform != "win32":
        import resource

        kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        limits = [limit for limit in resource.getrlimit(kind) if limit != resource.RLIM_INFINITY]
        limit = min([MAX_BYTES, *limits])
        resource.setrlimit(kind, (limit, limit))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it does
    for line in sys.stdin:
        request = json.loads(line)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        reply = json.dumps(reply_to(request))
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
