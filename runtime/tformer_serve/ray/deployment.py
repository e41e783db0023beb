"""The application of `tformer-serve` as a deployment of Ray Serve, with the name `tformer`.

Each replica is a process with the models in it, and serves as one `tformer-serve` does. Ray Serve has the sockets; it
chooses a replica for each request, starts and ends replicas, and drains them before they end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from tformer_runtime.base.extras import import_optional
from tformer_runtime.decoding.scheduler import MAX_BATCH_ROWS
from tformer_runtime.tasks.settings import bytes_of
from tformer_serve.app import make_app
from tformer_serve.logs import set_up_logs
from tformer_serve.middleware.api_keys import read_api_keys
from tformer_serve.middleware.web_pages import allowed_hosts
from tformer_serve.options import DRAIN_SECONDS, MAX_BODIES_BYTES, MAX_BODY_BYTES, MAX_QUEUE, ServerOptions
from tformer_serve.ray.multiplexing import MultiplexedModels, loading_layer
from tformer_serve.registry import ModelFile, Models

_SECONDS = Field(None, gt=0)
_HEALTH_SECONDS = 10.0


class ServeArguments(BaseModel):
    """The `args` of the application in a config file: the options of `tformer-serve`, under their names.

    files: FILE.onnx or NAME=FILE, on each machine under the same name.
    threads: of an operator. Give a replica as many CPUs (num_cpus in ray_actor_options).
    max_models_per_replica: a replica loads a model at its first request, and holds as many; None loads all at once.
    """

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(min_length=1)
    device: str = "auto"
    threads: int = Field(1, ge=1)
    max_batch_size: int = Field(MAX_BATCH_ROWS, ge=1)
    max_queue: int = Field(MAX_QUEUE, ge=0)
    max_memory: str | None = None
    max_run_seconds: float | None = _SECONDS
    max_body: str = f"{MAX_BODY_BYTES >> 20}M"
    max_bodies: str = f"{MAX_BODIES_BYTES >> 20}M"
    timeout: float | None = _SECONDS
    drain_seconds: float = Field(DRAIN_SECONDS, ge=0)
    api_key_file: str | None = None
    cors_origins: list[str] = []
    allowed_hosts: list[str] = []
    log_prompts: bool = False
    max_models_per_replica: int | None = Field(None, ge=1)

    def server_options(self) -> ServerOptions:
        """Return how a replica treats its clients."""
        multiplexed_rows = (self.max_models_per_replica or 0) * self.max_batch_size  # of models that are not loaded yet
        return ServerOptions(
            max_queue=self.max_queue + multiplexed_rows,
            timeout=self.timeout,
            drain_seconds=self.drain_seconds,
            max_body_bytes=bytes_of(self.max_body, "max_body"),
            max_bodies_bytes=bytes_of(self.max_bodies, "max_bodies"),
            api_keys=() if self.api_key_file is None else read_api_keys(Path(self.api_key_file)),
            cors_origins=tuple(self.cors_origins),
            allowed_hosts=allowed_hosts(self.allowed_hosts),
            log_prompts=self.log_prompts,
        )

    def model_settings(self) -> dict[str, Any]:
        """Return the arguments of `Model.load`."""
        return {
            "device": self.device,
            "threads": self.threads,
            "max_memory": None if self.max_memory is None else bytes_of(self.max_memory),
            "max_run_seconds": self.max_run_seconds,
        }


def app(args: ServeArguments | Mapping[str, Any]) -> Any:
    """Return the application for Ray Serve. Raise OptionError for wrong arguments, MissingExtraError without Ray.

    Ray Serve calls it with the `args` of a config file, as a mapping.
    """
    args = args if isinstance(args, ServeArguments) else ServeArguments.model_validate(args)
    serve = import_optional("ray.serve", "serving on many machines needs Ray", "ray")
    args.server_options()  # wrong ones are told here, not by a replica that does not start
    args.model_settings()
    files = [ModelFile.parse(file) for file in args.files]

    def build() -> FastAPI:
        return replica_app(args, files)

    held = args.max_models_per_replica or len(files)
    deployment = serve.deployment(
        serve.ingress(build)(_Replica),
        name="tformer",
        max_ongoing_requests=args.max_queue + held * args.max_batch_size,  # Ray's 5 would keep rows of a batch empty
        graceful_shutdown_timeout_s=args.drain_seconds,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options={"num_cpus": args.threads},
    )
    return deployment.bind()


def replica_app(args: ServeArguments, files: list[ModelFile]) -> FastAPI:
    """Return the application of a replica. Raise the errors of `Model.load` if it loads all models now."""
    set_up_logs()
    if args.max_models_per_replica is None:
        return make_app(Models.load(files, args.max_batch_size, **args.model_settings()), args.server_options())
    models = MultiplexedModels(files, args.max_batch_size, **args.model_settings())
    return make_app(models, args.server_options(), [loading_layer(models, args.max_models_per_replica)])


class _Replica:
    """A replica. `app` is its application."""

    app: FastAPI

    def check_health(self) -> None:
        """Raise an error if only another process heals a model. Then Ray Serve replaces the replica."""
        if failed := self.app.state.server.models.failed():
            raise RuntimeError(f"the thread of {', '.join(failed)} has ended with an error")
