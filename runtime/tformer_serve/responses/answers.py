"""Answers in the form of OpenAI's API: why a text ended, log-probabilities, and the fields of every answer."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from tformer_runtime.decoding.sequence import Alternatives
from tformer_runtime.model import Model

FINISH = {"end": "stop", "stop": "stop", "length": "length"}
MAX_LOOP_NUMBERS = 10_000  # an answer with more is written in another thread
MAX_ANSWER_NUMBERS = 1 << 20  # some 20 MB of JSON
MIN_LOGPROB = -9999.0  # in the place of −∞, which JSON lacks, as in OpenAI's API


def new_answer(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return the fields of every answer. prefix: of its id. kind: of the object."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


class Logprobs:
    """Log-probabilities of tokens, with the texts of the tokens. The end token has no text and is left out."""

    def __init__(self, model: Model) -> None:
        self._codec, self._ends = model.inputs.output_codec, model.manifest.special_tokens.eos_token_ids

    def of_chat(
        self, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Alternatives]
    ) -> dict[str, Any]:
        """Return the log-probabilities of an answer of a chat."""
        content = []
        for i, (id_, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if id_ not in self._ends:
                top = [self._token(*pair) for pair in alternatives[i]] if alternatives else []
                content.append({**self._token(id_, logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def of_completion(
        self, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Alternatives], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Return the log-probabilities of a completion, and the offset of the text after it.

        offset: of the first token in the text.
        """
        answer: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for i, (id_, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if id_ in self._ends:
                continue
            text = self._text(id_)
            answer["tokens"].append(text)
            answer["token_logprobs"].append(finite(logprob))
            answer["text_offset"].append(offset)
            top = {self._text(other): finite(value) for other, value in alternatives[i]} if alternatives else None
            answer["top_logprobs"].append(top)
            offset += len(text)
        return answer, offset

    def _token(self, id_: int, logprob: float) -> dict[str, Any]:
        text = self._text(id_)
        # Clients join the bytes to the text of the answer. A special token has none.
        known = text.encode() if self._codec is None else self._codec.token_bytes(id_)
        return {"token": text, "logprob": finite(logprob), "bytes": None if known is None else list(known)}

    def _text(self, id_: int) -> str:
        """Return the text of an id alone; the token of one without a text, and the id without a tokenizer."""
        if self._codec is None:
            return str(id_)
        return self._codec.decode([id_]) or self._codec.token(id_)


async def json_response(make_body: Callable[[], Any], count: int) -> Response:
    """Return a response in JSON. make_body: called in another thread if there are many numbers. count: of numbers.

    msgspec writes a million numbers in 0.1 s, json in more than one.
    """

    def content() -> bytes:
        return msgspec.json.encode(make_body())

    body = content() if count <= MAX_LOOP_NUMBERS else await asyncio.to_thread(content)
    return Response(body, media_type="application/json")


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
