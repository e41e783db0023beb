"""A server that computes nothing: `python -m served.floor PORT CORE`. It shows the cost of the client.

A request is {"events": N}. The answer is a stream of N events, of the size that those of servers have. The events of
requests that are open at the same time come in turn, as those of a batch do.
"""

from __future__ import annotations

import asyncio
import json
import sys

from served.processes import HOST, pin

EVENT = b'data: {"id":"cmpl-%s","object":"text_completion","created":1795686276,"model":"model","choices":[]}\n\n'
EVENT = EVENT % (b"0" * 100)
CHUNK = f"{len(EVENT):x}\r\n".encode() + EVENT + b"\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.read(1 << 16):
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            break
        writer.write(HEAD)
        for _ in range(json.loads(head.split(b"\r\n\r\n", 1)[1])["events"]):
            writer.write(CHUNK)
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
    writer.close()


async def _main(port: int) -> None:
    server = await asyncio.start_server(_serve, HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    pin(None if (core := int(sys.argv[2])) < 0 else core)
    asyncio.run(_main(int(sys.argv[1])))
