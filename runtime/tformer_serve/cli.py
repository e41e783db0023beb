"""`tformer-serve`: serve model files.

Messages and logs go to standard error. Exit status: 0 stopped by a signal, 1 the start failed, 2 wrong usage.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import click

from tformer_runtime.base.errors import OptionError, TformerError
from tformer_runtime.base.extras import import_optional
from tformer_runtime.base.process_memory import limit_process_memory, process_memory_left
from tformer_runtime.base.validation import MAX_INT, MAX_THREADS
from tformer_runtime.cli.errors import errors_as_sentences
from tformer_runtime.decoding.scheduler import MAX_BATCH_ROWS
from tformer_runtime.tasks.settings import bytes_of
from tformer_serve.options import (
    DEFAULT_PORT,
    DRAIN_SECONDS,
    MAX_BODIES_BYTES,
    MAX_BODY_BYTES,
    MAX_QUEUE,
    MAX_UPLOAD_BYTES,
    ServerOptions,
)

_MAX_SECONDS = 1e9
_LEAST_BODIES_BYTES = 1 << 20  # of a process whose limit leaves nothing
_MEMORY_OF_BODIES = 4  # bodies take a quarter of a limited memory: the values that are parsed from them take more
_SECONDS = click.FloatRange(0, _MAX_SECONDS, min_open=True)
_FILE = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", metavar="FILE.onnx…", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen at this address; 0.0.0.0 is every one.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0 is any free port."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    help="Compute an operator with N threads.  [default: one per core]",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, MAX_INT),
    default=MAX_BATCH_ROWS,
    show_default=True,
    help="Decode at most N rows of a model together.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(0, MAX_INT),
    default=MAX_QUEUE,
    show_default=True,
    help="Let N requests wait, besides those that run; refuse more with 429.",
)
@click.option(
    "--max-memory", metavar="SIZE", help="Limit the caches of each model, such as 2G; requests wait for memory."
)
@click.option("--max-process-memory", metavar="SIZE", help="Limit all memory of the process, such as 8G.  [Linux]")
@click.option("--max-run-seconds", type=_SECONDS, help="Stop a run of the graph, such as a step, after S seconds.")
@click.option(
    "--max-body",
    metavar="SIZE",
    default=f"{MAX_BODY_BYTES >> 20}M",
    show_default=True,
    help="Refuse larger bodies of requests with 413.",
)
@click.option(
    "--max-upload",
    metavar="SIZE",
    default=f"{MAX_UPLOAD_BYTES >> 20}M",
    show_default=True,
    help="Refuse larger forms with a recording with 413.",
)
@click.option(
    "--max-bodies",
    metavar="SIZE",
    default=f"{MAX_BODIES_BYTES >> 20}M",
    show_default=True,
    help="Refuse bodies with 503 if those of all open requests would have more together.",
)
@click.option(
    "--timeout",
    type=_SECONDS,
    help="End a request after S seconds with 504. The header X-Request-Timeout asks for fewer.  [default: none]",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0, _MAX_SECONDS),
    default=DRAIN_SECONDS,
    show_default=True,
    help="After a signal to stop, let requests finish for S seconds.",
)
@click.option("--api-key-file", type=_FILE, help="Serve only clients with a key of this file, one a line.")
@click.option("--admin-key-file", type=_FILE, help="Let clients with a key of this file load the files again.")
@click.option("--cors-origin", metavar="ORIGIN", multiple=True, help="Let web pages of this origin call the server.")
@click.option(
    "--allowed-host",
    metavar="HOST",
    multiple=True,
    help="Answer requests for this host too, such as models.example or *.example; * is every one.  "
    "[default: names of this machine if --host is one, otherwise every host]",
)
@click.option("--tls-cert", type=_FILE, help="Serve https with this certificate, in PEM.")
@click.option("--tls-key", type=_FILE, help="The key of the certificate, if that has none.")
@click.option("--log-prompts", is_flag=True, help="Log the bodies of requests, and the messages of errors.")
@click.option("--verbose", is_flag=True, help="Write the traceback of an error.")
@click.version_option(package_name="tformer")
def main(
    files: tuple[str, ...],
    host: str,
    port: int,
    max_batch_size: int,
    max_process_memory: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    verbose: bool,
    **values: Any,
) -> None:
    """Serve model files with OpenAI's API at http://127.0.0.1:8080/v1.

    FILE.onnx is a file of tformer-export, which clients call by its name without the ending; NAME=FILE names it
    otherwise.
    """
    hang_ups = HangUps()
    with errors_as_sentences("tformer-serve", verbose, _sentence):
        for name in ("fastapi", "uvicorn", "prometheus_client"):
            import_optional(name, f"a server needs {name}", "serve")
        from tformer_serve.app import make_app
        from tformer_serve.logs import set_up_logs
        from tformer_serve.middleware.api_keys import read_api_keys
        from tformer_serve.middleware.web_pages import allowed_hosts
        from tformer_serve.registry import ModelFile, Models
        from tformer_serve.server import Server, bind, check_certificate

        if max_process_memory is not None:
            limit_process_memory(bytes_of(max_process_memory, "max_process_memory"))
        keys = {
            name: () if (file := values[f"{name}_key_file"]) is None else read_api_keys(file)
            for name in ("api", "admin")
        }
        options = ServerOptions(
            max_queue=values["max_queue"],
            timeout=values["timeout"],
            drain_seconds=values["drain_seconds"],
            max_body_bytes=bytes_of(values["max_body"], "max_body"),
            max_upload_bytes=bytes_of(values["max_upload"], "max_upload"),
            max_bodies_bytes=bytes_of(values["max_bodies"], "max_bodies"),
            api_keys=keys["api"],
            admin_keys=keys["admin"],
            cors_origins=values["cors_origin"],
            log_prompts=values["log_prompts"],
        )
        check_certificate(tls_cert, tls_key)
        memory = None if values["max_memory"] is None else bytes_of(values["max_memory"])
        set_up_logs(options.log_prompts)
        with bind(host, port) as bound:  # before the files are read, which may take long
            hosts = allowed_hosts(values["allowed_host"], own=(host, bound.getsockname()[0]))
            options = replace(options, allowed_hosts=hosts)
            models = Models.load(
                [ModelFile.parse(file) for file in files],
                max_batch_size,
                device=values["device"],
                threads=values["threads"],
                max_memory=memory,
                max_run_seconds=values["max_run_seconds"],
            )
            if (left := process_memory_left()) is not None:
                bodies = max(left // _MEMORY_OF_BODIES, _LEAST_BODIES_BYTES)
                options = replace(options, max_bodies_bytes=min(options.max_bodies_bytes, bodies))
            server = Server(make_app(models, options), tls_cert, tls_key, hang_ups.connect)
            gc.freeze()  # so that a collection, which stops all requests, looks at the objects of requests alone
            server.run([bound])


class HangUps:
    """The signals SIGHUP. Each asks for a reload. A signal that comes before the server listens is kept."""

    def __init__(self) -> None:
        self._act: Callable[[], object] | None = None
        self._came = False
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, self._on_signal)

    def connect(self, act: Callable[[], object]) -> None:
        """Act at each signal from now on, and now if there was one."""
        self._act = act
        if self._came:
            act()

    def _on_signal(self, sig: int, frame: FrameType | None) -> None:
        self._came = True
        if self._act is not None:
            self._act()


def _sentence(error: TformerError) -> str:
    """Return the sentence of an error, with flags in the place of the names of options."""
    if isinstance(error, OptionError) and error.option is not None and str(error).startswith(error.option):
        return f"--{error.option.replace('_', '-')}{str(error).removeprefix(error.option)}"
    return str(error)


if __name__ == "__main__":
    main()
