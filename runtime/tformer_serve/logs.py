"""Logs: one JSON object a line on standard error.

Prompts and answers are not logged. `--log-prompts` logs the bodies of requests.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("tformer_serve")


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON on one line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=True, default=str)


def log(event: str, /, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Log an event with its fields. error: to log with its traceback."""
    known = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, event, exc_info=error, extra={"fields": known})


def set_up_logs() -> None:
    """Send the logs of the server, and warnings of uvicorn, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("tformer_serve", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
