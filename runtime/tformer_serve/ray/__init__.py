"""Models on many machines, by Ray: `Predictor` for `map_batches` of Ray Data, `app` for Ray Serve. See docs/scaling.md.

deployment    the application of `tformer-serve` as a deployment of Ray Serve
multiplexing  replicas that hold a few of many models
"""

from __future__ import annotations

from typing import Any

from tformer_runtime.distributed.predictor import Predictor

__all__ = ["Predictor", "ServeArguments", "app"]


def __getattr__(name: str) -> Any:
    # Importing Ray Serve takes two seconds, so it is imported only for the deployment.
    if name in ("ServeArguments", "app"):
        from tformer_serve.ray import deployment

        return getattr(deployment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
