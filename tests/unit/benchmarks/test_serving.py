"""The client, the loads and the figures of the benchmark of servers."""

from __future__ import annotations

import asyncio
import json
import math

import h11
import pytest
import serving_soak
from served.client import ClientError, Connection, StaleError
from served.load import Load, Record, arrivals, open_loop
from served.workloads import random_requests
from serving import read_answer

EVENTS = [b'data: {"choices":[{"text":"K "}]}\n\n', b'data: {"choices":[{"text":"AE T"}]}\n\n', b"data: [DONE]\n\n"]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS
)
RESPONSES = {
    "chunks": CHUNKED + b"0\r\n\r\n",
    "length": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 11\r\n\r\n" + b"hello\r\n\r\n12",
    "empty": b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
}


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self._closing = b"", False

    def write(self, data) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._closing = True


async def answered(response: bytes, size: int):
    """Return the answer to a request, if the response comes in parts of a size, and what the client has sent."""
    connection, wire = Connection(), Wire()
    connection.connection_made(wire)
    asked = asyncio.ensure_future(connection.post("/v1/completions", b'{"a": 1}'))
    await asyncio.sleep(0)
    for start in range(0, len(response), size):
        connection.data_received(response[start : start + size])
    return await asked, wire.written


def parsed(response: bytes) -> tuple[int, bytes]:
    """Return the status and the body of a response, by h11."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(response)
    status, body = 0, b""
    while not isinstance(event := reader.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
    return status, body


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 10_000])
@pytest.mark.parametrize("name", sorted(RESPONSES))
def test_client_reads_a_response_in_any_parts(name, size):
    answer, _ = asyncio.run(answered(RESPONSES[name], size))
    assert (answer.status, bytes(answer.body)) == parsed(RESPONSES[name])


def test_client_notes_the_time_of_each_event():
    answer, sent = asyncio.run(answered(RESPONSES["chunks"], 5))
    assert answer.events == [event[6:-2] for event in EVENTS[:-1]]
    assert len(answer.event_times) == len(EVENTS)
    assert [answer.began_at, *answer.event_times, answer.ended_at] == sorted(
        [answer.began_at, *answer.event_times, answer.ended_at]
    )
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(sent)
    request, data = reader.next_event(), reader.next_event()
    assert (request.method, request.target, bytes(data.data)) == (b"POST", b"/v1/completions", b'{"a": 1}')
    assert read_answer("/v1/completions", "tformer-serve", answer, stream=True) == ("K AE T", None)


@pytest.mark.parametrize(("came", "error"), [(b"", StaleError), (CHUNKED, ClientError)])
def test_connection_that_ends_early_is_an_error(came, error):
    async def run():
        connection = Connection()
        connection.connection_made(Wire())
        asked = asyncio.ensure_future(connection.post("/", b""))
        await asyncio.sleep(0)
        connection.data_received(came)
        connection.connection_lost(None)
        await asked

    with pytest.raises(ClientError) as raised:
        asyncio.run(run())
    assert type(raised.value) is error


def test_arrivals_are_a_poisson_process():
    times = arrivals(50.0, 200.0, seed=3)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert len(times) == pytest.approx(10_000, abs=5 * math.sqrt(10_000))
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.025)  # five deviations
    assert times == arrivals(50.0, 200.0, seed=3) != arrivals(50.0, 200.0, seed=4)


def test_requests_are_late_from_their_arrival_on():
    """All are due before they are sent. The wait for a connection counts."""

    async def send(client, number, due_at):
        await asyncio.sleep(0)
        return Record(number, due_at, None, due_at + 2.0, 1)

    load = asyncio.run(open_loop(send, [4, 2], [-0.3, -0.2, -0.1], lambda: 0.0))
    assert sorted(record.number for record in load.records) == [2, 4, 4]
    assert [
        round(after.due_at - before.due_at, 6) for before, after in zip(load.records, load.records[1:], strict=False)
    ] == [
        0.1,
        0.1,
    ]
    assert load.figures()["whole_p50"] == pytest.approx(2000.0)


def test_figures_of_a_load():
    records = [Record(0, 1.0, 1.1, 1.5, 5), Record(1, 2.0, 2.3, 2.3, 1), Record(2, 3.0, 3.2, 4.2, 11)]
    figures = Load(records, seconds=2.0, processor=0.6).figures()
    expected = {
        "requests": 3,
        "requests_per_second": 1.5,
        "tokens_per_second": 8.5,
        "processor_per_request": 200.0,
        "first_p50": 200.0,
        "token_p50": 100.0,
        "whole_p50": 500.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_random_requests_have_mixed_lengths():
    requests = random_requests(3, seed=1)
    assert len({len(request.input) for request in requests}) > 20
    assert len({request.options["max_new_tokens"] for request in requests}) > 20
    assert requests == random_requests(3, seed=1)


def test_growth_of_memory_is_between_the_first_and_the_last_tenth():
    samples = [(float(second), 100) for second in range(0, 600, 10)]
    assert serving_soak.growth(samples) == (100, 100, 1.0)
    assert serving_soak.growth([(at, size + int(at > 530) * 10) for at, size in samples])[2] == pytest.approx(1.1)
    assert serving_soak.growth([(at, size + int(at == 550) * 50) for at, size in samples])[2] == 1.0


def test_wrong_bodies_of_the_soak_are_wrong():
    for name, (body, statuses) in serving_soak.MALFORMED.items():
        assert all(400 <= status < 500 for status in statuses)
        if name in ("no JSON", "no body", "not UTF-8", "deep"):
            with pytest.raises((ValueError, RecursionError)):
                json.loads(body)
