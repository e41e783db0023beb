"""`HttpProtocol`: HTTP/1.1 by httptools, with a limit for the head of a request.

httptools is a parser in C, which takes a third less of the processor than h11 for a whole request of a small model. It
has no limit of its own.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # of the path and the headers of a request, as uvicorn has it for h11


class HttpProtocol(HttpToolsProtocol):
    """A connection. A request whose head is too large is answered with 400, and the connection ends."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._begin_head()

    def _begin_head(self) -> None:
        self._in_head = True
        self._received_bytes = 0  # of the head, without those that came with the end of another request
        self._parsed_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:  # httptools collects a header before it calls on_header
            self._received_bytes += len(data)
            if self._received_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers of a body are no headers of the request
            self._count(name, value)
            super().on_header(name, value)

    def _count(self, *parts: bytes) -> None:
        self._parsed_bytes += sum(map(len, parts))
        if self._parsed_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head of the request is too large")  # uvicorn answers with 400

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
