"""Logs: one JSON object a line on standard error.

Prompts and answers are not logged. `--log-prompts` logs the bodies of requests, and the messages of errors.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("tformer_serve")


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON on one line."""

    def __init__(self, quotes_prompts: bool = False) -> None:
        """quotes_prompts: whether tracebacks have the messages of errors, which may quote a prompt."""
        super().__init__()
        self._quotes_prompts = quotes_prompts

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            whole, error = self._quotes_prompts, record.exc_info
            fields["traceback"] = self.formatException(error) if whole else _without_messages(error[1])
        return json.dumps(fields, ensure_ascii=True, default=str)


def _without_messages(error: BaseException | None) -> str:
    """Return the traceback of an error and of its causes, with the types of the errors alone."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        parts.append("".join([*traceback.format_tb(error.__traceback__), type(error).__qualname__]))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(reversed(parts))


def log(event: str, /, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Log an event with its fields. error: to log with its traceback."""
    known = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, event, exc_info=error, extra={"fields": known})


def set_up_logs(quotes_prompts: bool = False) -> None:
    """Send the logs of the server, and warnings of uvicorn, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(quotes_prompts))
    for name, level in (("tformer_serve", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
