"""Which web pages may read answers: the Host and the Origin of a request.

A browser keeps the pages of one host from reading the answers of another. If the DNS of a stranger changes the address
of his page's host to 127.0.0.1 ("DNS rebinding"), this server has the host of the page. So a server that only programs
of its machine can reach answers requests for hosts of this machine alone, such as localhost.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tformer_runtime.base.errors import OptionError
from tformer_serve.errors import ApiError

ANY = "*"
_LABELS = r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?"  # of a name
_HOST = re.compile(rf"(?:\[([0-9a-f:.]+)\]|({_LABELS}\.?))(?::[0-9]*)?")
_ALLOWED = re.compile(rf"\*|(?:\*\.)?{_LABELS}\.?|[0-9a-f:.]+")


def allowed_hosts(names: Sequence[str], own: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Return the hosts by which clients call a server, besides the loopback ones; None for every host.

    names: that the user allows. Without any, only a server at a loopback address has limits.
    own: the host and the address at which the server listens, if they are known.
    Raise OptionError for a name that cannot be one.
    """
    allowed = [name.lower().removeprefix("[").removesuffix("]") for name in names]
    for name, given in zip(allowed, names, strict=True):
        if not _ALLOWED.fullmatch(name):
            raise OptionError(
                "allowed_host must be a name such as models.example, *.example for all names below it, an address, or "
                f"* for every host, without a scheme and a port, not {given[:100]!r}",
                option="allowed_host",
            )
    if ANY in allowed or (not allowed and not any(map(is_loopback, own))):
        return None
    return tuple(_plain(name) for name in (*allowed, *map(str.lower, own)))


def is_loopback(host: str) -> bool:
    """Return whether a host is an IP address that only programs of this machine reach."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _plain(host: str) -> str:
    """Return an IPv6 address in its short form, and a name without the dot at its end."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.removesuffix(".")


class WebPages:
    """Refuses requests for hosts that are not this server, and requests of web pages of other origins."""

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] | None, origins: Sequence[str]) -> None:
        """allowed_hosts: by which clients call the server, besides the loopback ones; None for every host.

        origins: of pages of other servers that may call this one.
        """
        self._app, self._origins = app, frozenset(origin.lower() for origin in origins)
        self._answers_every_host = allowed_hosts is None
        self._hosts = {"localhost", *(allowed_hosts or ())}
        domains = ("localhost", *(host.removeprefix("*.") for host in self._hosts if host.startswith("*.")))
        self._endings = tuple(f".{domain}" for domain in domains)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            hosts = [host.lower() for host in headers.getlist("Host")]
            self._check_hosts(hosts)
            for origin in headers.getlist("Origin"):
                self._check_origin(origin, hosts)
        await self._app(scope, receive, send)

    def _check_hosts(self, hosts: Sequence[str]) -> None:
        """Raise ApiError for a host that is not known. Browsers always send one, probes with HTTP/1.0 may send none."""
        if self._answers_every_host or not hosts or (len(hosts) == 1 and self._is_known(hosts[0])):
            return
        message = (
            f"the server does not answer requests for the host {hosts[0][:200]!r}: call it by localhost, or allow the "
            "host with --allowed-host"
        )
        raise ApiError(403, message, "wrong_host")

    def _is_known(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _plain(match[1] or match[2])
        return name in self._hosts or is_loopback(name) or name.endswith(self._endings)

    def _check_origin(self, origin: str, hosts: Sequence[str]) -> None:
        """Raise ApiError for a page of another origin. Browsers send forms without asking."""
        plain = origin.lower()
        if plain in self._origins or ANY in self._origins:
            return
        scheme, _, rest = plain.partition("://")
        if scheme in ("http", "https") and [rest] == hosts:
            return
        message = f"pages of {origin[:200]!r} may not call this server: name the origin with --cors-origin"
        raise ApiError(403, message, "wrong_origin")
