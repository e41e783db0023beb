"""`tformer-serve` under all kinds of clients for a long time, each answer compared with that of `Model` alone. By hand:

    python tests/benchmarks/serving_soak.py MODEL.onnx [--minutes 60] [--share 0.9] [--seed N] [--json FILE]

The requests are those of `soak.py`: greedy decoding, beams, samples, penalties, stop strings and constraints, each
computed alone before, without those that rounding could decide. The server is a process. Its capacity is measured
first. Then requests arrive by a Poisson process at a share of it, as whole answers and as streams. Among them are
clients that leave, clients that read a byte a second, wrong bodies of all kinds, and every half minute a flood, of
which a part has to be refused with 429. Other work on the machine lowers the capacity: the script also reports in
which part of the time the cores that it may use were at least 90 % busy.

At most `MOST_CLIENTS` are connected at a time, and a client that would be one more does not come: when other work stops
the machine for a moment, thousands would come at once after it. The server has no limit of connections, which take some
KB each, and Python and glibc keep a part of the most memory that was ever used.

Every half minute, before a flood, no client comes until all but the slow readers have their answers. Then the resident
memory is measured: otherwise it depends on how many requests are open, with their caches and bodies, and this on
other work on the machine. The table has the memory under load, too.

A warm-up comes before, in a tenth of the time and three minutes at most, so that memory reaches its most: the same
clients arrive at twice the capacity, and every five seconds as many as may be connected. What is kept then does not
hide a leak, which grows with the number of requests.

At the end the script prints a table. The exit status is 1 if an answer was wrong or lost, if a wrong body got another
answer than a refusal, if a row or a byte of caches is still taken, if the server does not end with 0, or if its
resident memory without open requests is more than 5 % above its value after the warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import soak
from rich.console import Console
from rich.table import Table
from served.client import Answer, ClientError, Connection, StaleError, head_of
from served.load import Record, closed_loop
from served.machine import load, machine
from served.processes import HOST, Server, tformer_server

from tformer_runtime import Model

CAPACITY_SECONDS, CAPACITY_CLIENTS = 10.0, 32
ROWS, QUEUE = 32, 64
FLOOD = 3 * (ROWS + QUEUE) // 2  # requests at once
FLOOD_SECONDS = 30.0
MOST_CLIENTS = 2 * FLOOD  # that are connected at a time
MOST_SLOW = 8  # clients that read slowly at a time
SLOW_SECONDS = 20.0
QUIET_SECONDS = 0.5  # in which the server lets the latest requests go
WARM_SHARE, MOST_WARM_SECONDS = 0.1, 180.0  # of the time, before it
WARM_RATE = 2.0  # arrivals in the warm-up, as a share of the capacity
WARM_FLOOD_SECONDS = 5.0
SAMPLE_SECONDS = 5.0
BUSY = 0.9  # of the time of the cores
WAYS = {"whole": 0.5, "stream": 0.3, "left": 0.1, "slow": 0.02, "malformed": 0.08}

RETURNING = {  # glibc returns large buffers to the system, and has one heap for all threads: see soak.returning()
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 17),
}
MALFORMED: dict[str, tuple[bytes, tuple[int, ...]]] = {  # name → body, statuses that refuse it
    "no JSON": (b'{"model": "model", ', (400,)),
    "no object": (b"[1, 2, 3]", (400,)),
    "no body": (b"", (400,)),
    "not UTF-8": (b'{"model": "model", "input": "\xff\xfe"}', (400,)),
    "NaN": (b'{"model": "model", "input": "cat", "temperature": NaN}', (400,)),
    "deep": (b'{"model": "model", "input": ' + b"[" * 5000 + b"]" * 5000 + b"}", (400,)),
    "many lists": (b'{"model": "model", "input": [' + b"[]," * 300_000 + b"[]]}", (400,)),
    "many numbers": (b'{"model": "model", "input": [' + b"5," * 100_000 + b"5]}", (400,)),
    "too large": (b'{"model": "model", "input": "' + b"a" * (9 << 20) + b'"}', (413,)),
    "unknown field": (b'{"model": "model", "input": "cat", "max_new_token": 3}', (400,)),
    "unknown model": (b'{"model": "other", "input": "cat"}', (404,)),
    "wrong type": (b'{"model": "model", "input": "cat", "num_beams": "4"}', (400,)),
    "impossible value": (b'{"model": "model", "input": "cat", "temperature": -1}', (400,)),
    "unknown characters": ('{"model": "model", "input": "日本語"}'.encode(), (400,)),
    "wrong ids": (b'{"model": "model", "input": [5, -7, 100000]}', (400,)),
}


@dataclass
class Tally:
    """The outcomes by way. wrong: descriptions of wrong answers.

    resident: samples under load, as seconds and bytes. quiet: those without open requests but of slow readers.
    busy: for each of the samples, the busy part of the time since the sample before.
    not_sent: requests that were due while as many clients as may be were connected.
    """

    equal: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    malformed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    quiet: list[tuple[float, int]] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    not_sent: int = 0

    @property
    def total(self) -> int:
        return (self.equal + self.refused).total()

    @property
    def busy_share(self) -> float:
        """Return the part of the samples in which the cores were busy."""
        return sum(part >= BUSY for part in self.busy) / max(1, len(self.busy))


class Cores:
    """The cores that this process may use."""

    def __init__(self) -> None:
        self._last = self._times()

    def _times(self) -> tuple[float, float]:
        times = [psutil.cpu_times(percpu=True)[core] for core in psutil.Process().cpu_affinity()]
        idle = sum(each.idle + each.iowait for each in times)
        return idle, sum(sum(each[:8]) for each in times)  # the later fields are parts of the first

    def busy(self) -> float:
        """Return the busy part of the time since the last call."""
        (idle, total), last = self._times(), self._last
        self._last = idle, total
        return 1.0 - (idle - last[0]) / (total - last[1]) if total > last[1] else 1.0


class Clients:
    """All clients of a server."""

    def __init__(self, server: Server, requests: list[soak.Request], seed: int) -> None:
        self._server, self._requests, self._draw = server, requests, random.Random(seed)
        self._bodies = [_body(request, False) for request in requests]
        self._streams = [_body(request, True) if request.streams else None for request in requests]
        self._free: list[Connection] = []
        self._running: set[asyncio.Task[None]] = set()
        self._slow = 0
        self.tally = Tally()

    async def capacity(self) -> float:
        """Return the requests per second of a closed loop of whole answers."""
        order = list(range(len(self._requests)))
        self._draw.shuffle(order)

        async def send(client: int, number: int, due_at: float) -> Record:
            await self._whole(number)
            return Record(number, due_at, None, time.perf_counter(), 0)

        found = await closed_loop(send, order, CAPACITY_CLIENTS, CAPACITY_SECONDS, self._server.processor)
        return found.figures()["requests_per_second"]

    async def warm_up(self, rate: float, seconds: float) -> None:
        """Send requests at a rate, with many floods, as `run` does. Of the answers only wrong and lost ones count."""
        await self._arrive(rate, seconds, WARM_FLOOD_SECONDS, MOST_CLIENTS)
        self.tally = Tally(wrong=self.tally.wrong, lost=self.tally.lost)

    async def run(self, rate: float, seconds: float) -> None:
        """Send requests at a rate for some seconds, and wait for all answers."""
        await self._arrive(rate, seconds, FLOOD_SECONDS, FLOOD)
        for connection in self._free:
            connection.close()

    async def _arrive(self, rate: float, seconds: float, flood_seconds: float, flood: int) -> None:
        begun = time.monotonic()
        next_flood, next_sample, due_at = begun + 1.0, begun, begun
        cores = Cores()
        while (now := time.monotonic()) < begun + seconds:
            if now >= next_flood:
                self.tally.quiet.append((now - begun, await self._quiet_resident()))
                due_at = max(due_at, time.monotonic())
                next_flood = time.monotonic() + flood_seconds
                free = MOST_CLIENTS - len(self._running)
                self.tally.not_sent += max(0, flood - free)
                for number in self._draw.choices(range(len(self._requests)), k=min(flood, free)):
                    self._start(self._whole(number, "flood"), f"flood: {self._requests[number].kind}")
            if now >= next_sample:
                next_sample += SAMPLE_SECONDS
                self.tally.resident.append((now - begun, self._server.resident()))
                self.tally.busy.append(cores.busy())
            if now >= due_at:
                due_at += self._draw.expovariate(rate)
                if len(self._running) < MOST_CLIENTS:
                    self._send_one()
                else:
                    self.tally.not_sent += 1
            await asyncio.sleep(max(0.0, min(due_at, next_flood, next_sample) - time.monotonic()))
        if self._running:
            await asyncio.wait(self._running)

    async def _quiet_resident(self) -> int:
        """Return the resident bytes once all clients but slow readers have their answers."""
        while len(self._running) > self._slow:
            await asyncio.sleep(0.05)
        await asyncio.sleep(QUIET_SECONDS)
        return self._server.resident()

    def _send_one(self) -> None:
        way = self._draw.choices(list(WAYS), list(WAYS.values()))[0]
        number = self._draw.randrange(len(self._requests))
        if way in ("stream", "slow") and self._streams[number] is None:
            way = "whole"
        if way == "slow" and self._slow >= MOST_SLOW:
            way = "stream"
        send = {
            "whole": self._whole,
            "stream": self._stream,
            "left": self._left,
            "slow": self._read_slowly,
            "malformed": self._malformed,
        }[way]
        self._start(send(number), f"{way}: {self._requests[number].kind}")

    def _start(self, work: Any, name: str) -> None:
        async def guarded() -> None:
            try:
                async with asyncio.timeout(soak.PATIENCE):
                    await work
            except TimeoutError:
                self.tally.lost.append(f"{name}: no answer in {soak.PATIENCE:.0f} s")
            except (ClientError, OSError) as error:
                self.tally.lost.append(f"{name}: {error!r}")
            except Exception as error:  # such as an answer of another form
                self.tally.wrong.append(f"{name}: {error!r}")

        task = asyncio.ensure_future(guarded())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _post(self, body: bytes) -> Answer:
        """Return the answer to a request, on a connection that an earlier one has left open, if there is any.

        A server may close an idle connection at the moment in which the next request is sent: then it is sent again.
        """
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                with contextlib.suppress(StaleError):
                    return await self._post_on(connection, body)
        return await self._post_on(await Connection.open(HOST, self._server.port), body)

    async def _post_on(self, connection: Connection, body: bytes) -> Answer:
        try:
            answer = await connection.post("/v1/generate", body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._free.append(connection)
        return answer

    def _is_refused(self, way: str, answer: Answer) -> bool:
        """Return whether there was no place for a request. Note any other answer than 200."""
        if answer.status == 200:
            return False
        code = json.loads(bytes(answer.body))["error"]["code"]
        if answer.status == 429 and code == "queue_full" and b"retry-after:" in answer.headers.lower():
            self.tally.refused[way] += 1
        else:
            self.tally.wrong.append(f"{way}: the status {answer.status}, {bytes(answer.body[:300])!r}")
        return True

    async def _whole(self, number: int, way: str = "whole") -> None:
        request = self._requests[number]
        answer = await self._post(self._bodies[number])
        if not self._is_refused(way, answer):
            self._compare(way, request, json.loads(bytes(answer.body))["results"])

    async def _stream(self, number: int) -> None:
        request, body = self._requests[number], self._streams[number]
        assert body is not None
        answer = await self._post(body)
        if not self._is_refused("stream", answer):
            self._compare("stream", request, [_joined(json.loads(event) for event in answer.events)])

    async def _left(self, number: int) -> None:
        """Leave after a moment, in which some requests end."""
        connection = await Connection.open(HOST, self._server.port)
        sent = asyncio.ensure_future(connection.post("/v1/generate", self._streams[number] or self._bodies[number]))
        await asyncio.wait([sent], timeout=self._draw.expovariate(20.0))
        connection.close()
        await asyncio.wait([sent])
        sent.exception()
        self.tally.equal["left"] += 1

    async def _read_slowly(self, number: int) -> None:
        """Read a byte a second. What came must begin as the whole answer."""
        body = self._streams[number]
        assert body is not None
        self._slow += 1
        try:
            with socket.socket() as client:
                client.setblocking(False)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                loop, read = asyncio.get_running_loop(), b""
                await loop.sock_connect(client, (HOST, self._server.port))
                await loop.sock_sendall(client, head_of("/v1/generate", body) + body)
                ends_at = time.monotonic() + self._draw.uniform(1.0, SLOW_SECONDS)
                while time.monotonic() < ends_at:
                    read += await loop.sock_recv(client, 1)
                    await asyncio.sleep(1.0)
            if not b"HTTP/1.1 200 OK\r\n".startswith(read[:17]) and not read.startswith(b"HTTP/1.1 429"[: len(read)]):
                self.tally.wrong.append(f"slow: {read!r}")
            self.tally.equal["slow"] += 1
        finally:
            self._slow -= 1

    async def _malformed(self, number: int) -> None:
        name = self._draw.choice(list(MALFORMED))
        body, statuses = MALFORMED[name]
        connection = await Connection.open(HOST, self._server.port)
        try:
            answer = await connection.post("/v1/generate", body)
        except ClientError:
            if name != "too large":  # the server may close the connection before it has read all of it
                raise
            self.tally.malformed[name] += 1
            return
        finally:
            connection.close()
        error = json.loads(bytes(answer.body))["error"]
        if answer.status == 429:
            self.tally.refused["malformed"] += 1
        elif answer.status in statuses and error["message"]:
            self.tally.malformed[name] += 1
            self.tally.equal["malformed"] += 1
        else:
            self.tally.wrong.append(f"malformed ({name}): the status {answer.status}, {error}")

    def _compare(self, way: str, request: soak.Request, results: list[dict[str, Any]]) -> None:
        expected = [request.expected, *request.expected.alternatives]
        theirs = [(result["text"], result["token_ids"], result["finish_reason"]) for result in results]
        ours = [(result.text, list(result.token_ids), result.finish_reason) for result in expected]
        self.tally.equal[way] += 1
        self.tally.kinds[request.kind] += 1
        if theirs != ours:
            self.tally.wrong.append(f"{way}, {request.kind} of {request.input}: {theirs} instead of {ours}")


def _body(request: soak.Request, stream: bool) -> bytes:
    options = {name: value for name, value in request.options.items() if value is not None}
    return json.dumps({"model": "model", "input": request.input, **options, "stream": stream}).encode()


def _joined(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the result whose pieces are the events."""
    pieces = [event for event in events if "token_ids" in event]
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "token_ids": [id_ for piece in pieces for id_ in piece["token_ids"]],
        "finish_reason": pieces[-1]["finish_reason"] if pieces else None,
    }


def growth(quiet: list[tuple[float, int]]) -> tuple[int, int, float]:
    """Return the resident bytes without open requests in the first and in the last tenth of the time, and their ratio.

    Each is the median of the samples of the tenth.
    """
    end = quiet[-1][0]
    begin = [size for at, size in quiet if at <= max(0.1 * end, quiet[0][0])]
    last = [size for at, size in quiet if at >= 0.9 * end]
    first, final = int(np.median(begin)), int(np.median(last))
    return first, final, final / first


def _metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{HOST}:{server.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:1] != "#"}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--minutes", type=click.FloatRange(1), default=60.0, show_default=True)
@click.option("--share", default=0.9, show_default=True, help="Requests that arrive, as a share of the capacity.")
@click.option("--seed", default=0, show_default=True)
@click.option("--core", type=int, help="Keep the server and the clients on this core.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(model: Path, minutes: float, share: float, seed: int, core: int | None, json_path: Path | None) -> None:
    from served.processes import pin

    pin(core)
    click.echo(machine())
    requests = soak.pool(Model.load(model, "cpu", threads=1), 300, seed)
    click.echo(f"{len(requests)} requests of {len({r.kind for r in requests})} kinds have been computed alone")
    with tempfile.TemporaryDirectory() as folder:
        options = ("--max-queue", str(QUEUE), "--max-batch-size", str(ROWS))
        server = tformer_server(model, core, Path(folder) / "server.log", options, RETURNING)
        with server:
            clients = Clients(server, requests, seed)
            tally, wrong = asyncio.run(_run(clients, minutes, share)), []
            for _ in range(100):
                left = _metrics(server)
                if not (left["tformer_open_requests"] or left["tformer_cache_bytes"] or left["tformer_running_rows"]):
                    break
                time.sleep(0.1)
            else:
                wrong.append(
                    f"{left['tformer_running_rows']:.0f} rows and {left['tformer_cache_bytes']:.0f} bytes are in use"
                )
            processor = server.processor()
            if status := server.close():
                wrong.append(f"the server ended with {status}")
        log = (Path(folder) / "server.log").read_text(errors="replace")
    wrong += [f"the log has {log.count(chr(34) + 'error' + chr(34))} errors"] if '"level": "error"' in log else []
    first, final, ratio = growth(tally.quiet)
    _table(tally, first, final, ratio)
    click.echo(f"the server took {processor:.0f} s of processor time; {machine()}")
    wrong = [*tally.wrong[:20], *tally.lost[:20], *wrong]
    if ratio > soak.MOST_GROWTH:
        wrong.append(f"resident memory grew to {ratio:.1%} of what it was")
    for line in wrong:
        click.echo(line, err=True)
    if json_path is not None:
        record = {
            "machine": machine(),
            "minutes": minutes,
            "share": share,
            "equal": tally.equal,
            "refused": tally.refused,
            "kinds": tally.kinds,
            "malformed": tally.malformed,
            "wrong": tally.wrong,
            "lost": tally.lost,
            "resident": tally.resident,
            "quiet": tally.quiet,
            "busy": tally.busy,
            "not_sent": tally.not_sent,
            "processor": processor,
        }
        json_path.write_text(json.dumps(record, indent=1))
    sys.exit(1 if wrong else 0)


async def _run(clients: Clients, minutes: float, share: float) -> Tally:
    capacity = await clients.capacity()
    await clients.warm_up(WARM_RATE * capacity, min(WARM_SHARE * 60 * minutes, MOST_WARM_SECONDS))
    click.echo(f"{capacity:.0f} requests/s are the capacity; {share * capacity:.0f} a second arrive")
    running = asyncio.ensure_future(clients.run(share * capacity, 60 * minutes))
    while not running.done():
        await asyncio.wait([running], timeout=60.0)
        tally = clients.tally
        at, size = tally.resident[-1]
        click.echo(
            f"{at / 60:6.1f} min  {tally.total:9,} answers  {len(tally.wrong)} wrong  {len(tally.lost)} lost  "
            f"{size / 1e6:7.1f} MB  busy {tally.busy[-1]:.0%}  load {load()}"
        )
    await running
    return clients.tally


def _table(tally: Tally, first: int, final: int, ratio: float) -> None:
    table = Table("clients", "equal to Model alone", "refused with 429", title="answers of tformer-serve")
    for way in ("whole", "stream", "flood"):
        table.add_row(way, f"{tally.equal[way]:,}", f"{tally.refused[way]:,}")
    table.add_section()
    table.add_row("that left", f"{tally.equal['left']:,}", "")
    table.add_row("that read a byte a second", f"{tally.equal['slow']:,}", "")
    table.add_row("with wrong bodies, all refused", f"{tally.malformed.total():,}", f"{tally.refused['malformed']:,}")
    table.add_section()
    for kind, count in sorted(tally.kinds.items()):
        table.add_row(kind, f"{count:,}", "")
    table.add_section()
    table.add_row(f"{len(tally.wrong)} wrong, {len(tally.lost)} lost", f"{tally.total:,}", f"{tally.refused.total():,}")
    table.add_row("not sent, because too many were connected", f"{tally.not_sent:,}", "")
    table.add_row("resident, no requests", f"{first / 1e6:.1f} → {final / 1e6:.1f} MB ({ratio - 1:+.1%})", "")
    table.add_row("resident at most, under load", f"{max(size for _, size in tally.resident) / 1e6:.1f} MB", "")
    table.add_row(f"at least {BUSY:.0%} busy", f"{tally.busy_share:.1%} of the time", "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
