"""A server of exactly known pace, for the client to be measured with: ``python -m orchestrator.bench.paced``.

It answers completions as an engine does, one event a token, at moments that lateness of earlier ones does not
move: token i at (request + ttft + i / rate). Rate and TTFT are the path's first two parts, so that one server
has every pace: ``/RATE/TTFT_MS/v1/completions``. Each event tells when the request was received and when it
was written itself (``perf_counter_ns``, which all processes of a machine share on Linux), so that what the
client saw is compared with what happened, and a late server is not taken for a late client. It prints its
port and ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(text: str, finish: str | None = None, **more: object) -> bytes:
    choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
    envelope = {"created": 1796048885, "model": "paced", "object": "text_completion", "id": "cmpl-0123456789"}
    value = {"choices": [choice], **envelope, "written_ns": time.perf_counter_ns(), **more}
    data = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # opened ahead and never used
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    loop = asyncio.get_running_loop()
    began, received_ns = loop.time(), time.perf_counter_ns()
    _, rate, ttft_ms = head.split(b" ")[1].decode().split("/")[:3]
    count = int(body["max_tokens"])
    writer.write(HEAD)
    for at in range(count):
        due = began + float(ttft_ms) / 1000 + at / float(rate)
        if (left := due - loop.time()) > 0:
            await asyncio.sleep(left)
        writer.write(_event(" word", received_ns=received_ns))
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    writer.write(_event("", "length", usage=usage) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await writer.drain()
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)  # readable at its end: our parent is gone
    await over.wait()
    server.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
