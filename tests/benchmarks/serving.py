"""`tformer-serve` under the load of many clients, next to its engine without a server and to llama.cpp's server.

    python tests/benchmarks/serving.py [--quick] [--rounds 3] [--model g2p] [--llama-server PATH] [--json FILE]

Every contestant has one thread and the same core; the client has the other core. So a server that computes, reads and
writes on one core is compared with an engine that only computes there. The contestants are:

- *scheduler*: the engine alone, in a loop that submits a request for each that ends. A server cannot be faster.
- *asyncio*: `AsyncModel`, without HTTP.
- *tformer-serve*, with streams of events, and with whole answers.
- *tformer-serve, 32 texts a request*: four clients that send 32 prompts in each request. Figures are those of a text.
- *FastAPI alone*: a server that checks the same body and answers with constant events or JSON. No server in Python that
  answers each text in a request of its own can have a smaller overhead than its time.
- *llama-server*, for models that it has.

Loads:

- a closed loop of 1 to 64 clients, each of which sends a request as soon as it has the answer before. 32 clients are as
  many as a batch has rows, so that the throughput at 32 is the capacity.
- arrivals by a Poisson process at 50 % and 80 % of the capacity, the same for all contestants. A request's time begins
  when it is due, not when a connection is free.

Rounds run the contestants in turn, and ratios are medians of the rounds. The overhead is 1 − the throughput of the
server / that of the scheduler in the same round. Each figure has the processor time next to it, which other work on the
machine changes less. The client's own cost is measured with a server that computes nothing. Answers are compared with
those of `Model` alone. An answer of random weights may differ, where rounding decides between two tokens.

The models are build/g2p.onnx and build/words.onnx (`make demo`) and those of `make bench`. A missing one is left out.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from served.client import Answer, ClientError, Connection
from served.load import MAX_CONNECTIONS, Load, Record, arrivals, closed_loop, open_loop
from served.machine import load as machine_load
from served.machine import machine
from served.processes import (
    HOST,
    Server,
    ServerError,
    find_llama_server,
    free_port,
    gguf_file,
    http_floor,
    llama_server,
    pin,
    tformer_server,
)
from served.workloads import ROOM, Workload, workloads
from versus.client import Peer, Worker
from versus.measure import processor_ticks

from tformer_runtime.decoding.scheduler import MAX_BATCH_ROWS

ROOT = Path(__file__).parents[2]
SHARES = (0.5, 0.8)  # of the capacity, of arrivals
CAPACITY_CLIENTS = 32
ENGINES = ("scheduler", "asyncio")
FLOOR = "FastAPI alone"
TEXTS = 32  # of a request with several
TEXTS_CLIENTS = 4  # the batch stays full while a client reads its answer and sends the next request
TARGET = 0.1  # overhead at most

Figures = dict[str, float]


@dataclass
class Contestant:
    """An engine or a server. closed, open: measure a load and return its figures.

    at_capacity: whether it is measured with CAPACITY_CLIENTS alone.
    """

    name: str
    closed: Callable[[int], Figures]
    open: Callable[[list[float]], Figures] | None = None
    at_capacity: bool = False


@dataclass
class Found:
    """The figures of a workload: load → contestant → those of each round. wrong: answers that differ, by contestant."""

    figures: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)

    def add(self, load: str, contestant: str, figures: Figures) -> None:
        self.figures.setdefault(load, {}).setdefault(contestant, []).append(figures)

    def ratio(self, load: str, contestant: str, other: str, name: str) -> float | None:
        """Return the median ratio of a figure of two contestants in the same rounds."""
        mine, theirs = (self.figures.get(load, {}).get(one, []) for one in (contestant, other))
        pairs = list(zip(mine, theirs, strict=False))
        return statistics.median(a[name] / b[name] for a, b in pairs) if pairs else None


class Clients:
    """The clients of a server."""

    def __init__(
        self,
        workload: Workload,
        server: Server,
        order: list[int],
        stream: bool,
        found: Found,
        name: str,
        compares: bool = True,
    ):
        self._workload, self._server, self._order, self._stream = workload, server, order, stream
        self._found, self._name, self._compares = found, name, compares
        self._bodies = [workload.post(server.name, number, stream) for number in range(len(workload.requests))]

    def closed(self, clients: int, seconds: float) -> Figures:
        return asyncio.run(self._run(lambda send: closed_loop(send, self._order, clients, seconds, self._meter)))

    def texts(self, seconds: float) -> Figures:
        """Measure TEXTS_CLIENTS that send TEXTS prompts in each request. The figures are those of a text."""
        order = list(range(0, len(self._order) - TEXTS + 1, TEXTS))
        groups = {number: self._order[number : number + TEXTS] for number in order}
        bodies = {number: self._workload.post_texts(group, self._stream) for number, group in groups.items()}
        connections: dict[int, Connection] = {}

        async def send(client: int, number: int, due_at: float) -> Record:
            if client not in connections:
                connections[client] = await Connection.open(HOST, self._server.port)
            answer = await connections[client].post(*bodies[number])
            if answer.status != 200:
                raise ClientError(f"{self._name} answers {answer.status}: {bytes(answer.body[:300])!r}")
            texts = dict.fromkeys(range(TEXTS), "")
            for part in [json.loads(e) for e in answer.events] if self._stream else [json.loads(bytes(answer.body))]:
                for choice in part["choices"]:
                    texts[choice["index"]] += choice["text"]
            self._found.answers[self._name] = self._found.answers.get(self._name, 0) + TEXTS
            requests = [self._workload.requests[n] for n in groups[number]]
            wrong = sum(text != one.text for text, one in zip(texts.values(), requests, strict=True))
            self._found.wrong[self._name] = self._found.wrong.get(self._name, 0) + wrong
            return Record(number, due_at, None, answer.ended_at, sum(one.tokens for one in requests))

        async def run() -> Figures:
            load = await closed_loop(send, order, TEXTS_CLIENTS, seconds, self._meter)
            for connection in connections.values():
                connection.close()
            figures = load.figures()
            figures["requests_per_second"] *= TEXTS
            figures["processor_per_request"] /= TEXTS
            return {
                name: figures[name] for name in ("requests_per_second", "tokens_per_second", "processor_per_request")
            }

        return asyncio.run(run())

    def open(self, times: list[float]) -> Figures:
        return asyncio.run(self._run(lambda send: open_loop(send, self._order, times, self._meter)))

    def _meter(self) -> float:
        return self._server.processor()

    async def _run(self, drive: Callable[..., Any]) -> Figures:
        connections: dict[int, Connection] = {}
        answers: list[tuple[int, Answer]] = []

        async def send(client: int, number: int, due_at: float) -> Record:
            connection = connections.get(client)
            if connection is None or not connection.is_open:
                connection = connections[client] = await Connection.open(HOST, self._server.port)
            # llama-server closes a connection after a stream, whether or not it is told to.
            answer = await connection.post(*self._bodies[number], stays_open=self._server.name == "tformer-serve")
            if self._server.name != "tformer-serve":
                connection.close()
            if answer.status != 200:
                raise ClientError(f"{self._name} answers {answer.status}: {bytes(answer.body[:300])!r}")
            answers.append((number, answer))
            times = answer.event_times if self._stream else [None]
            tokens = self._workload.requests[number].tokens
            return Record(number, due_at, times[0] if times else None, answer.ended_at, tokens)

        began, used = time.perf_counter(), time.process_time()
        load: Load = await drive(send)
        client_share = (time.process_time() - used) / (time.perf_counter() - began)
        for connection in connections.values():
            connection.close()
        for number, answer in answers if self._compares else ():
            self._compare(number, answer)
        return {**load.figures(), "client_share": client_share}

    def _compare(self, number: int, answer: Answer) -> None:
        request, found = self._workload.requests[number], self._found
        found.answers[self._name] = found.answers.get(self._name, 0) + 1
        text, tokens = read_answer(self._workload.route, self._server.name, answer, self._stream)
        if (tokens is not None and tokens != request.tokens) or (request.text and text != request.text):
            found.wrong[self._name] = found.wrong.get(self._name, 0) + 1


def read_answer(route: str, server: str, answer: Answer, stream: bool) -> tuple[str, int | None]:
    """Return the text of an answer, and the number of its tokens if it is told."""
    parts = [json.loads(event) for event in answer.events] if stream else [json.loads(bytes(answer.body))]
    if server == "llama-server":
        return "", sum(len(part.get("tokens", [])) for part in parts)
    if route == "/v1/generate":
        pieces = [part for part in parts if "token_ids" in part] if stream else parts[0]["results"]
        return "".join(piece["text"] for piece in pieces), sum(len(piece["token_ids"]) for piece in pieces)
    text = ""
    for choice in (part["choices"][0] for part in parts if part["choices"]):
        message = choice.get("delta" if stream else "message")
        text += choice["text"] if message is None else message.get("content") or ""
    return text, None if stream else parts[0]["usage"]["completion_tokens"]


class Engine:
    """The process of the engine without a server."""

    def __init__(self, workload: Workload, order: list[int], core: int | None, log: Path) -> None:
        self._worker = Worker(Peer("engine", "served.engine"), 1, log)
        self._given = {"requests": [request.given() for request in workload.requests], "order": order}
        self._worker.ask("measure", action="open", path=str(workload.path), core=core)
        results = self._worker.ask("measure", action="answers", requests=self._given["requests"])["results"]
        for request, result in zip(workload.requests, results, strict=True):
            request.tokens, request.text = len(result["token_ids"]), result["text"]
            request.prompt = result["prompt"]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def closed(self, action: str, clients: int, seconds: float) -> Figures:
        return self._ask(action, clients=clients, seconds=seconds)

    def open(self, times: list[float]) -> Figures:
        return self._ask("asyncio", times=times)

    def _ask(self, action: str, **arguments: Any) -> Figures:
        figures: Figures = self._worker.ask("measure", action=action, **self._given, **arguments)["figures"]
        return figures


def measure(
    workload: Workload, found: Found, options: Options, program: Path | None, tell: Callable[[str], None], logs: Path
) -> None:
    """Add the figures of a workload to `found`."""
    seconds = options.seconds
    order = list(range(len(workload.requests)))
    random.Random(options.seed).shuffle(order)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(workload, order, options.server_core, logs / "engine.log"))
        server = stack.enter_context(tformer_server(workload.path, options.server_core, logs / "tformer-serve.log"))
        streams = Clients(workload, server, order, True, found, "tformer-serve")
        wholes = Clients(workload, server, order, False, found, "tformer-serve, whole answers")
        contestants = [
            Contestant("scheduler", lambda clients: engine.closed("scheduler", clients, seconds)),
            Contestant("asyncio", lambda clients: engine.closed("asyncio", clients, seconds), engine.open),
            Contestant("tformer-serve", lambda clients: streams.closed(clients, seconds), streams.open),
            Contestant("tformer-serve, whole answers", lambda clients: wholes.closed(clients, seconds)),
        ]
        events = round(statistics.mean(request.tokens for request in workload.requests))
        floor = stack.enter_context(http_floor(events, options.server_core, logs / "http-floor.log"))
        for stream, name in ((True, FLOOR), (False, f"{FLOOR}, whole answers")):
            alone = Clients(workload, floor, order, stream, found, name, compares=False)
            contestants.append(
                Contestant(name, lambda clients, c=alone: c.closed(clients, seconds), at_capacity=True)  # type: ignore[misc]
            )
        if workload.takes_texts:
            for stream, name in (
                (True, f"{TEXTS} texts a request"),
                (False, f"{TEXTS} texts a request, whole answers"),
            ):
                name = f"tformer-serve, {name}"
                several = Clients(workload, server, order, stream, found, name)
                contestants.append(
                    Contestant(name, lambda _, c=several: c.texts(seconds), at_capacity=True)  # type: ignore[misc]
                )
        if program is not None and workload.source is not None:
            log = logs / "llama-server.log"
            try:
                gguf = gguf_file(workload.source, ROOT / "build" / "serving" / "model.gguf")
                peer = stack.enter_context(llama_server(program, gguf, MAX_BATCH_ROWS, ROOM, options.server_core, log))
            except ServerError as error:
                tell(str(error))
            else:
                theirs = Clients(workload, peer, order, True, found, "llama-server")
                contestants.append(
                    Contestant("llama-server", lambda clients: theirs.closed(clients, seconds), theirs.open)
                )
        capacity = 0.0
        for turn in range(options.rounds):
            for clients in options.clients:
                for contestant in contestants[:: -1 if turn % 2 else 1]:
                    if contestant.at_capacity and clients != CAPACITY_CLIENTS:
                        continue
                    figures = timed(lambda c=contestant, n=clients: c.closed(n))
                    found.add(f"{clients} clients", contestant.name, figures)
                    tell(line(workload, f"{clients} clients", contestant.name, figures))
            if not capacity:
                figures_ = found.figures.get(f"{CAPACITY_CLIENTS} clients", {}).get("tformer-serve")
                capacity = figures_[0]["requests_per_second"] if figures_ else 0.0
            for share in SHARES if capacity else ():
                times = arrivals(share * capacity, seconds, options.seed + turn)
                for contestant in contestants[:: -1 if turn % 2 else 1]:
                    if contestant.open is not None:
                        figures = timed(lambda c=contestant, t=times: c.open(t))
                        found.add(f"{share:.0%} of the capacity", contestant.name, figures)
                        tell(line(workload, f"{share:.0%} of the capacity", contestant.name, figures))


def timed(run: Callable[[], Figures]) -> Figures:
    """Return the figures of a run, with the share of the processors' time that other machines took."""
    before = processor_ticks()
    figures = run()
    stolen, every = (b - a for a, b in zip(before, processor_ticks(), strict=True))
    return {**figures, "stolen": stolen / max(every, 1)}


def client_cost(core: int | None, seconds: float, logs: Path) -> dict[str, float]:
    """Return the microseconds of the client's processor for a request and for an event, by requests of two lengths."""
    port = free_port()
    command = [sys.executable, "-m", "served.floor", str(port), str(-1 if core is None else core)]
    with Server("floor", command, port, "/", core, logs / "floor.log"):

        async def cost(events: int) -> tuple[float, float]:
            """Return the seconds of the processor for a request, and the requests per second."""
            connections = [await Connection.open(HOST, port) for _ in range(CAPACITY_CLIENTS)]
            body = json.dumps({"events": events}).encode()

            async def send(client: int, number: int, due_at: float) -> Record:
                answer = await connections[client].post("/", body)
                return Record(number, due_at, answer.event_times[0], answer.ended_at, events)

            load = await closed_loop(send, [0], CAPACITY_CLIENTS, seconds, time.process_time)
            for connection in connections:
                connection.close()
            return load.processor / len(load.records), len(load.records) / seconds

        (short, _), (long, rate) = asyncio.run(cost(1)), asyncio.run(cost(65))
        event = (long - short) / 64
        return {"request": 1e6 * (short - event), "event": 1e6 * event, "events_per_second": 65 * rate}


def line(workload: Workload, load: str, contestant: str, figures: Figures) -> str:
    text = f"{workload.name}, {load}, {contestant}: {figures['requests_per_second']:.1f} requests/s, "
    text += f"{figures['tokens_per_second']:.0f} tokens/s, {figures['processor_per_request']:.2f} ms of processor each"
    return text + f", stolen {figures['stolen']:.1%}, load {machine_load()}"


# The tables

COLUMNS = {
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "processor_per_request": "processor ms a request",
    "first_p50": "first token p50 ms",
    "first_p99": "p99",
    "token_p50": "token p50 ms",
    "token_p99": "p99",
    "client_share": "client's core",
}


def table(workload: Workload, found: Found) -> Table:
    shown = Table("load", "", *COLUMNS.values(), title=f"{workload.name}: medians of rounds")
    for load, by_name in found.figures.items():
        for name, rounds in by_name.items():
            cells = []
            for column in COLUMNS:
                values = [figures[column] for figures in rounds if column in figures]
                value = statistics.median(values) if values else None
                shape = "{:.0%}" if column == "client_share" else "{:.1f}" if value and value < 1000 else "{:.0f}"
                cells.append("" if value is None else shape.format(value))
            shown.add_row(load, name, *cells)
        shown.add_section()
    return shown


def overheads(found: Found) -> dict[str, dict[str, float]]:
    """Return the overhead of each server at CAPACITY_CLIENTS, by throughput and by processor time."""
    load, results = f"{CAPACITY_CLIENTS} clients", {}
    for name in found.figures.get(load, {}):
        for base in ENGINES:
            rate = found.ratio(load, name, base, "tokens_per_second")
            used = found.ratio(load, name, base, "processor_per_request")
            is_compared = name not in (*ENGINES[: ENGINES.index(base) + 1], FLOOR, f"{FLOOR}, whole answers")
            if rate is not None and used is not None and is_compared:
                results[f"{name} / {base}"] = {"throughput": 1 - rate, "processor": 1 - 1 / used}
    return results


@dataclass
class Options:
    rounds: int
    seconds: float
    clients: tuple[int, ...]
    seed: int
    server_core: int | None
    client_core: int | None


@click.command()
@click.option("--quick", is_flag=True, help="One short round with 32 clients, for each model that is there.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=12.0, show_default=True, help="Seconds of each measurement, after two to warm up.")
@click.option("--clients", multiple=True, type=click.IntRange(1, MAX_CONNECTIONS), default=(1, 8, 32, 64))
@click.option("--model", "names", multiple=True, help="Measure models whose names begin so; by default all.")
@click.option("--models", type=click.Path(path_type=Path), default=ROOT / "build", help="Of g2p.onnx and words.onnx.")
@click.option("--versus", type=click.Path(path_type=Path), default=ROOT / "build" / "versus", help="Of make bench.")
@click.option("--llama-server", "llama", type=click.Path(path_type=Path), help="The program; by default that on PATH.")
@click.option("--server-core", default=0, show_default=True)
@click.option("--client-core", default=1, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=ROOT / "build" / "serving.json")
def main(
    quick: bool,
    rounds: int,
    seconds: float,
    clients: tuple[int, ...],
    names: tuple[str, ...],
    models: Path,
    versus: Path,
    llama: Path | None,
    server_core: int,
    client_core: int,
    seed: int,
    json_path: Path,
) -> None:
    cores = (None, None) if server_core == client_core or sys.platform != "linux" else (server_core, client_core)
    options = Options(rounds, seconds, clients, seed, *cores)
    if quick:
        options.rounds, options.seconds, options.clients = 1, min(seconds, 4.0), (CAPACITY_CLIENTS,)
    chosen = [w for w in workloads(models, versus, seed) if not names or any(w.name.startswith(name) for name in names)]
    if not chosen:
        raise click.ClickException(f"there is no model in {models} or {versus}: make demo, or make bench-quick")
    program = find_llama_server(llama)
    about = machine()
    click.echo(about)
    if program is None:
        click.echo("llama-server is not found: name it by --llama-server")
    pin(options.client_core)
    console = Console(width=160)
    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        cost = client_cost(options.server_core, min(seconds, 4.0), Path(folder))
        text = f"the client takes {cost['request']:.0f} µs for a request and {cost['event']:.0f} µs for an event; "
        click.echo(text + f"a server that computes nothing sent it {cost['events_per_second']:.0f} events/s")
        for workload in chosen:
            found = results[workload.name] = Found()

            def tell(text: str) -> None:
                """Print a line, and write what has been measured so far."""
                click.echo(text)
                workloads_ = {name: {**asdict(one), "overheads": overheads(one)} for name, one in results.items()}
                record = {"machine": about, "load_after": machine_load(), "client": cost, "workloads": workloads_}
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(json.dumps(record, indent=1))

            measure(workload, found, options, program, tell, Path(folder))
            console.print(table(workload, found))
            for name, shares in overheads(found).items():
                at = f"{workload.name}, {CAPACITY_CLIENTS} clients, {name}"
                share = f"{shares['throughput']:.1%} of throughput, {shares['processor']:.1%} of processor"
                click.echo(f"{at}: overhead {share}")
            for name in (FLOOR, f"{FLOOR}, whole answers"):
                share = found.ratio(f"{CAPACITY_CLIENTS} clients", name, "scheduler", "processor_per_request")
                if share is not None:
                    click.echo(f"{workload.name}: {name} takes {share:.0%} of the engine's processor time")
            for name, count in found.answers.items():
                tell(f"{name}: {found.wrong.get(name, 0)} of {count} answers differ from those of Model alone")


if __name__ == "__main__":
    main()
