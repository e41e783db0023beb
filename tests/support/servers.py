"""Servers of tiny models in this process, on a free port, and gates that stop their decoding."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.text_models import byte_pairs
from support.toy_models import Toy, with_manifest
from tformer_runtime import Model
from tformer_serve.app import make_app
from tformer_serve.options import ServerOptions
from tformer_serve.registry import ModelFile, Models
from tformer_serve.server import Server, bind

HANG_SECONDS = 120  # after which a test fails
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}<|system|>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "<|end|>{% endfor %}<|assistant|>"
)


def token_id_of(token: str) -> int:
    """Return the id of a token of the chat model."""
    return int(byte_pairs(*SPECIAL_TOKENS)["vocab"][token])


def write_chat_model(path: Path, **changes: Any) -> Path:
    """Write a decoder-only model with bytes as tokens and a chat template. changes: of the toy."""
    definition = byte_pairs(*SPECIAL_TOKENS)
    tokenizer = Tokenizer(models.BPE(vocab=definition["vocab"], merges=definition["merges"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    toy = Toy(**{"encoder": False, "vocabulary": len(definition["vocab"]), "max_length": 512, "seed": 3, **changes})
    plain = toy.write(path.with_suffix(".plain.onnx"))
    manifest = {
        "tokenizers": (tokenizer.to_str(),),
        "chat_template": CHAT_TEMPLATE,
        "chat_tokens": {"bos_token": "<s>"},
    }
    return with_manifest(plain, path, **manifest)


class RunningServer:
    """A server that runs in a thread of this process. send_buffer: bytes that the system keeps of an answer."""

    def __init__(
        self, files: dict[str, Path], max_batch_size: int = 8, send_buffer: int | None = None, **options: Any
    ) -> None:
        named = [ModelFile(name, path) for name, path in files.items()]
        self.models = Models.load(named, max_batch_size, device="cpu", threads=1)
        self.options = ServerOptions(**options)
        self.app = make_app(self.models, self.options)
        self.state = self.app.state.server
        self.server = Server(self.app)
        self._socket = bind("127.0.0.1", 0)
        if send_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # of its connections
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._clients = contextlib.ExitStack()

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            serving = asyncio.ensure_future(self.server.serve([self._socket]))
            while not self.server.started and not serving.done():
                await asyncio.sleep(0.001)
            self._started.set()
            await serving

        asyncio.run(serve())

    def __enter__(self) -> RunningServer:
        self._thread.start()
        assert self._started.wait(HANG_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        self.server.should_exit = True
        self.wait_for_end()

    def wait_for_end(self) -> None:
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()

    def wait_for_closings(self) -> None:
        """Wait until the models that have left are closed."""

        async def wait() -> None:
            while self.models._retired or self.models._closings:
                await asyncio.sleep(0.001)

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(HANG_SECONDS)

    def drain(self) -> None:
        """Begin to stop, as after SIGTERM."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result(HANG_SECONDS)

    async def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self.server.drain("test"))
        await asyncio.sleep(0)

    def client(self, **settings: Any) -> openai.OpenAI:
        return self._clients.enter_context(openai.OpenAI(**{**self._client_settings(), **settings}))

    def async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{**self._client_settings(), **settings})

    def _client_settings(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": HANG_SECONDS}

    def http(self, **settings: Any) -> httpx.Client:
        plain = {"trust_env": False, "verify": False}  # certificates of authorities take 20 ms to read
        return httpx.Client(**{"base_url": self.url, "timeout": HANG_SECONDS, **plain, **settings})

    def post(self, path: str, body: Any, **arguments: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, **arguments)

    def connect(self) -> socket.socket:
        """Return a connection, for requests that are written by hand."""
        address = httpx.URL(self.url)
        return socket.create_connection((address.host, address.port or 0), HANG_SECONDS)

    def answer_to(self, *parts: bytes) -> bytes:
        """Return all bytes that the server answers to parts that are sent one after another."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):  # the server does not read on
                for part in parts:
                    connection.sendall(part)
            return read_to_end(connection)

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric; 0 if it has none with these labels."""
        with self.http() as client:
            text = client.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def wait_for(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has a value, as long as it takes."""
        pause = threading.Event()
        for _ in range(HANG_SECONDS * 100):
            if self.metric(name, **labels) == value:
                return
            pause.wait(0.01)
        raise AssertionError(f"{name} {labels} is {self.metric(name, **labels)}, not {value}")


def read_to_end(connection: socket.socket) -> bytes:
    """Return all bytes that a connection receives until the other side ends it."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while read := connection.recv(1 << 16):
            answer += read
    return answer


class StepGate:
    """Stops the steps of a model while it is closed. `steps` counts the steps after the first of each row."""

    def __init__(self, model: Model) -> None:
        self._model, self._step = model, model.engine.step
        self._open, self._reached = threading.Event(), threading.Event()
        self.steps = 0

    def __call__(self, state: Any, *arguments: Any, **settings: Any) -> Any:
        if state.max_row_length:
            self.steps += 1
            self._reached.set()
            assert self._open.wait(HANG_SECONDS)
        return self._step(state, *arguments, **settings)

    def wait_until_reached(self) -> None:
        assert self._reached.wait(HANG_SECONDS)

    def open(self) -> None:
        self._open.set()

    @classmethod
    @contextlib.contextmanager
    def closed(cls, model: Model) -> Iterator[StepGate]:
        gate = cls(model)
        model.engine.step = gate  # type: ignore[method-assign]
        try:
            yield gate
        finally:
            gate.open()
            del model.engine.step
