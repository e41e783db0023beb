"""A server of FastAPI without a model: `python -m served.http_floor PORT CORE EVENTS`.

It shows the cost of HTTP in Python.

It has the event loop and the parser of HTTP that `tformer-serve` has, and no layers around its route. It checks the
same bodies by a model of pydantic. It answers with a constant JSON, or with a stream of EVENTS constant events, each
in a turn of the event loop of its own, as those of decoding steps are.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response, StreamingResponse

from served.processes import HOST, pin

EVENT = b'data: {"id":"cmpl-000000000000000000000000","object":"text_completion","created":1795686276,"model":"model",'
EVENT += b'"choices":[{"index":0,"text":"AE ","logprobs":null,"finish_reason":null}]}\n\n'
CHOICE = {"index": 0, "text": "T R AE N S F", "logprobs": None, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 6, "completion_tokens": 7, "total_tokens": 13}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool = False
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    input: Any = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None


def make_app(events: int) -> FastAPI:
    app = FastAPI()

    @app.get("/health/ready")
    async def ready() -> Response:
        return Response()

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    @app.post("/v1/generate")
    async def answer(body: Body) -> Response:
        if not body.stream:
            return JSONResponse({"id": "cmpl-0", "object": "text_completion", "choices": [CHOICE], "usage": USAGE})

        async def stream() -> AsyncIterator[bytes]:
            for _ in range(events):
                yield EVENT
                await asyncio.sleep(0)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    pin(None if (core := int(sys.argv[2])) < 0 else core)
    app = make_app(int(sys.argv[3]))
    uvicorn.run(app, host=HOST, port=int(sys.argv[1]), http="h11", log_config=None, access_log=False)
