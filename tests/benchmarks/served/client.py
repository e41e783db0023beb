"""An HTTP client of little cost, which notes the time of each event of a stream.

A client of a library takes as long for an event as the server that it measures. This one reads the responses of the
measured servers alone: HTTP/1.1, with a length or in chunks. It parses no JSON while it measures.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]"


class ClientError(Exception):
    """A connection that broke, or a response that is no HTTP."""


class StaleError(ClientError):
    """A connection that ended before any byte of the response."""


def head_of(path: str, body: bytes, stays_open: bool = True) -> bytes:
    """Return the head of a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + ("\r\n" if stays_open else "Connection: close\r\n\r\n")).encode()


@dataclass
class Answer:
    """A response. Times are by `time.perf_counter`.

    began_at, ended_at: when the request was sent, and when the response was complete.
    event_times: of each event of a stream.
    body: without the frames of chunks.
    """

    status: int = 0
    headers: bytes = b""
    began_at: float = 0.0
    ended_at: float = 0.0
    event_times: list[float] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    @property
    def events(self) -> list[bytes]:
        """The data of the events, without the last one, [DONE]."""
        parts = [part.strip() for part in bytes(self.body).split(_EVENT_END)]
        return [part[len(b"data: ") :] for part in parts if part.startswith(b"data: ") and part != _DONE]


class Connection(asyncio.Protocol):
    """A connection that stays open. It has one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._done: asyncio.Future[Answer] | None = None
        self._read = bytearray()
        self._left: int | None = None  # bytes of the body, or of the present chunk; None before the headers
        self._in_chunks = False

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def post(self, path: str, body: bytes, stays_open: bool = True) -> Answer:
        """Return the whole response. Raise ClientError if the connection ends before."""
        assert self.transport is not None
        self._answer, self._left, self._read = Answer(began_at=time.perf_counter()), None, bytearray()
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(head_of(path, body, stays_open) + body)
        return await self._done

    def close(self) -> None:
        """Leave at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            kind = ClientError if self._read or self._answer.status else StaleError
            self._done.set_exception(kind(f"the connection ended after {len(self._answer.body)} bytes: {error}"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._read += data
        try:
            while self._read and self._step(now):
                pass
        except ValueError as error:
            if self._done is not None and not self._done.done():
                self._done.set_exception(ClientError(f"no HTTP: {error}"))
            self.close()

    def _step(self, now: float) -> bool:
        """Read one part of what was received. Return whether there may be another part."""
        if self._left is None:
            return self._read_head(now)
        if self._in_chunks and not self._left:
            return self._read_chunk_size(now)
        part = bytes(self._read[: self._left])
        had = len(self._answer.body)
        self._answer.body += part
        self._answer.event_times += [now] * self._answer.body.count(_EVENT_END, max(had - 1, 0))
        self._left -= len(part)
        del self._read[: len(part)]
        if self._in_chunks:
            return bool(self._read)
        if not self._left:
            self._end(now)
        return False

    def _read_head(self, now: float) -> bool:
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._read[:end])
        del self._read[: end + 4]
        self._answer.headers, self._answer.status = head, int(head.split(b" ", 2)[1])
        lines = head.lower().split(b"\r\n")
        self._in_chunks = b"transfer-encoding: chunked" in lines
        lengths = [line.split(b":")[1] for line in lines if line.startswith(b"content-length:")]
        self._left = 0 if self._in_chunks else int(lengths[0])
        if not self._in_chunks and not self._left:
            self._end(now)
        return True

    def _read_chunk_size(self, now: float) -> bool:
        if self._read[:2] == b"\r\n":  # the end of the chunk before
            del self._read[:2]
        end = self._read.find(b"\r\n")
        if end <= 0:
            return False
        size = int(self._read[:end], 16)
        if not size:
            if len(self._read) < end + 4:
                return False
            self._end(now)
            return False
        del self._read[: end + 2]
        self._left = size
        return True

    def _end(self, now: float) -> None:
        self._answer.ended_at = now
        if b"connection: close" in self._answer.headers.lower():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)
