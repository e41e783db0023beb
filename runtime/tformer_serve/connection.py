"""A connection of HTTP/1, with four additions to uvicorn's protocol.

- A client may end its side after its request, and still reads the answer.
- A client that is answered before its body has arrived gets the answer, although it sends on.
- The head of a request has a limit, in whatever segments it arrives.
- A connection for which there is no memory ends, with a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import is_ssl

from tformer_serve.errors import ApiError, error_response, unreadable_request_error
from tformer_serve.logs import log
from tformer_serve.request_context import filler_of

MAX_HEAD_BYTES = 64 << 10  # of the path and the headers of a request
_LINGER_SECONDS = 30.0  # in which a client that has its answer may send the rest of its body
_PROBE_SECONDS = 1.0  # most answers are complete before
_MAX_PROBE_SECONDS = 16.0
_REPLY_SECONDS = 0.5  # of the system of a client that is gone


class Connection(H11Protocol):
    """A connection of a client."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn: _Parser = _Parser(h11.SERVER, MAX_HEAD_BYTES)
        self._client_has_ended = self._lingers = False
        self._timer: asyncio.TimerHandle | None = None  # of the end of lingering, or of the next probe

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._plain_transport = transport
        self.transport = _Transport(transport, self._close)  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self.transport.close = self._plain_transport.close  # type: ignore[method-assign]  # lets the connection go at once

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        try:
            super().data_received(data)
        except MemoryError:
            log("out_of_memory", logging.WARNING, of="connection")
            self._plain_transport.abort()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Return whether the connection stays open: the client has ended its side, and may wait for an answer.

        A client that has gone must be found by a probe, which HTTP/1.0 has only within a stream. In other
        requests of HTTP/1.0 the end of one side is the end of the request. A proxy ends its side when its own client
        has gone.
        """
        self._client_has_ended = True
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if self._lingers or not waits or is_ssl(self._plain_transport):  # TLS has no connections of one side
            return None
        if self.conn.their_http_version != b"1.1" and not self._is_within_a_stream():
            return None
        self._probe_later(_PROBE_SECONDS)
        return True

    def on_response_complete(self) -> None:
        if self._lingers:
            return
        super().on_response_complete()  # may begin the next request
        if self._client_has_ended and self.cycle.response_complete:
            self._plain_transport.close()

    def shutdown(self) -> None:
        if self._lingers:
            self._plain_transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, unless it has an answer, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(unreadable_request_error(self.conn.error_status or 400))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close()

    def _send_error(self, error: ApiError) -> None:
        headers, body = error_response(error)
        response = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self._plain_transport.write(self.conn.send(event) or b"")

    def _close(self) -> None:
        """Close the connection. A client that still sends may do so first: it would lose the answer otherwise."""
        transport = self._plain_transport
        may_send = self.conn.their_state is h11.SEND_BODY or self.conn.error_status is not None
        if self._client_has_ended or not may_send:
            transport.close()
        elif not self._lingers and not transport.is_closing():
            self._lingers = True
            if transport.can_write_eof():
                transport.write_eof()
            self.flow.resume_reading()
            self._timer = self.loop.call_later(_LINGER_SECONDS, transport.close)

    def _probe_later(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._probe, seconds)

    def _probe(self, waited: float) -> None:
        """Send bytes without a meaning to a client that has ended its side. If it is gone, its system sends a reset.

        A client that has closed its connection cannot be told from one that has ended its side otherwise.
        """
        if not self._end_if_reset():
            if filler := b"" if self.flow.write_paused else self._filler():
                self._plain_transport.write(filler)
            self._timer = self.loop.call_later(_REPLY_SECONDS, self._read_reply, waited)

    def _read_reply(self, waited: float) -> None:
        if not self._end_if_reset():
            self._probe_later(min(2 * waited, _MAX_PROBE_SECONDS))

    def _end_if_reset(self) -> bool:
        """Return whether the connection ends. If the client has reset it, end it."""
        if self._plain_transport.is_closing():
            return True
        error = self._plain_transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._plain_transport.abort()
        return bool(error)

    def _filler(self) -> bytes:
        """Return bytes that clients skip: an interim response before the response, and its own filler within."""
        event: h11.Event | None = None
        if self._is_within_a_stream():
            event = h11.Data(data=filler_of(self.cycle.scope))
        elif self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version == b"1.1":
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        return b"" if event is None else self.conn.send(event) or b""

    def _is_within_a_stream(self) -> bool:
        return self.conn.our_state is h11.SEND_BODY and bool(filler_of(self.cycle.scope))


class _Parser(h11.Connection):
    """Bounds all parts of a request but its body. h11 itself bounds only a part whose end has not arrived.

    error_status: of the response to a request that cannot be read; None before one.
    """

    error_status: int | None = None

    def next_event(self) -> Any:
        before = len(self._receive_buffer)
        try:
            event = super().next_event()
            content = len(event.data) if isinstance(event, h11.Data) else 0
            if before - len(self._receive_buffer) - content > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("the head of the request is too large", error_status_hint=431)
        except h11.RemoteProtocolError as error:
            self.error_status = error.error_status_hint
            raise
        return event


class _Transport:
    """A transport that is closed by a function."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
