"""`ServerOptions`: how a server treats its clients."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 8080
MAX_BODY_BYTES = 8 << 20  # an image in base64 fits; the text of half a million tokens, too
MAX_UPLOAD_BYTES = 32 << 20  # six minutes of audio as WAV, some hours as MP3; OpenAI's API takes 25 MB
MAX_BODIES_BYTES = 256 << 20  # 8 of the largest recordings at once, or 32 of the largest other bodies
MAX_QUEUE = 256
DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class ServerOptions:
    """How a server treats its clients. The command line has the same options.

    max_queue: requests that may wait for rows, next to those that run.
    timeout: seconds of a request; a client may ask for fewer. None for no limit.
    drain_seconds: how long running requests may go on after a signal to stop.
    max_body_bytes: of a request in JSON, with its images.
    max_upload_bytes: of a form with a recording.
    max_bodies_bytes: of the bodies of all open requests together.
    api_keys: a client has to show one of them. Empty: no key is asked for.
    admin_keys: an operator has to show one of them. Empty: the paths of operators are refused.
    cors_origins: of web pages that may call the server.
    allowed_hosts: names of the server, which its clients call besides localhost. None lets them call it by any name.
    log_prompts: whether the log has the bodies of requests.
    """

    max_queue: int = MAX_QUEUE
    timeout: float | None = None
    drain_seconds: float = DRAIN_SECONDS
    max_body_bytes: int = MAX_BODY_BYTES
    max_upload_bytes: int = MAX_UPLOAD_BYTES
    max_bodies_bytes: int = MAX_BODIES_BYTES
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    log_prompts: bool = False
