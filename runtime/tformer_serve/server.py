"""The server: it listens, and it stops without losing a request.

After SIGTERM or SIGINT new requests are refused with 503 and /health/ready answers 503, but the socket stays open, so
that a balancer of load sees it. The server ends when the last request has its answer, or after the seconds for
draining; then the requests that still run end with an error. A second signal ends it at once.

After SIGHUP it loads its files again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from tformer_runtime.base.errors import OptionError
from tformer_serve.connection import Connection
from tformer_serve.logs import log
from tformer_serve.state import ServerState

_LAST_SECONDS = 5.0  # for the errors of the requests that draining has ended
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that will listen. Raise OptionError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"{host} is not an address to listen at: {error.strerror or error}", option="host") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        reason = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise OptionError(
            f"port {port} of {host} cannot be used: {reason}; choose another --port", option="port"
        ) from error
    bound.set_inheritable(True)
    return bound


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raise OptionError for a certificate of TLS that cannot be used."""
    if cert is None:
        if key is not None:
            raise OptionError("tls_key needs tls_cert: give the certificate of the key", option="tls_key")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        where = f"{cert}" if key is None else f"{cert} and {key}"
        raise OptionError(
            f"TLS cannot use {where}: {getattr(error, 'strerror', None) or error}", option="tls_cert"
        ) from error


class Server(uvicorn.Server):
    """A server of uvicorn that drains, and that loads its files again."""

    def __init__(
        self,
        app: FastAPI,
        cert: Path | None = None,
        key: Path | None = None,
        connect_reload: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        """connect_reload: called when the server listens, with a function that asks for a reload."""
        self._state: ServerState = app.state.server
        self._connect_reload = connect_reload
        self._reloads: set[asyncio.Task[object]] = set()
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=int(_LAST_SECONDS),
            ssl_certfile=cert,
            ssl_keyfile=key,
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_on_loop_error)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            names = [sock.getsockname() for server in self.servers for sock in server.sockets]
            scheme = "https" if self.config.is_ssl else "http"
            urls = [f"{scheme}://{f'[{name[0]}]' if ':' in name[0] else name[0]}:{name[1]}" for name in names]
            bodies = self._state.options.max_bodies_bytes  # which the limit of the process may have lowered
            models = {name: served.files.digest for name, served in self._state.models.items()}
            log("listening", urls=urls, models=list(models), digests=models, max_bodies_bytes=bodies)
            if self._connect_reload is not None:
                self._connect_reload(self._ask_for_reload)

    async def on_tick(self, counter: int) -> bool:
        try:
            return await super().on_tick(counter)
        except MemoryError:
            return self.should_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal by draining, at the second at once."""
        if self._state.admission.draining or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._state.admission.draining = True
            self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)

    def _ask_for_reload(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._start_reload)

    def _start_reload(self) -> None:
        if self._state.admission.draining:
            log("reload_refused", reason="the server is stopping")
            return
        task = asyncio.ensure_future(self._state.reloader.reload("SIGHUP"))
        self._reloads.add(task)  # the loop itself keeps no task
        task.add_done_callback(self._reloads.discard)

    def _start_draining(self, reason: str) -> None:
        self._drain = asyncio.ensure_future(self.drain(reason))

    async def drain(self, reason: str) -> None:
        """Refuse new requests, wait for the open ones, and end the server."""
        admission, seconds = self._state.admission, self._state.options.drain_seconds
        admission.draining = True
        log("draining", reason=reason, open_requests=admission.open)
        try:
            await asyncio.wait_for(admission.wait_until_idle(), seconds)
        except TimeoutError:
            log("drain_seconds_passed", open_requests=admission.open)
            await self._state.models.close()
        self.should_exit = True


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error outside of the requests: one line if there was no memory, which is no fault of the program."""
    if isinstance(context.get("exception"), MemoryError):
        log("out_of_memory", logging.WARNING, of=context.get("message"))
    else:
        loop.default_exception_handler(context)
