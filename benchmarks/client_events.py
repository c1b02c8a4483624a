"""CPU time of AsyncTextModel for each stream event, at 64 paced streams.

A server in a process of its own sends chunks as llama-server does, evenly paced, on every stream. The client
drains all streams on one loop; its own CPU time is divided by the events, with what 64 idle requests cost
taken off. The raw parser's share is measured in the same run. Goal: under 40 us on uvloop.

    python benchmarks/client_events.py [--streams 64] [--tokens 200] [--rate 50] [--loop uvloop|asyncio]
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import time

import uvloop

from orchestrator.backend import Dialect, Endpoint
from orchestrator.model import AsyncTextModel
from orchestrator.source import Server, Settings
from orchestrator.wire import Stream

GOAL_US = 40
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def sse(**fields):
    body = {**fields, "created": 1796048885, "model": "gemma", "system_fingerprint": "b0-unknown"}
    body |= {"object": "text_completion", "id": "chatcmpl-u9rEx24fCQ3ib0fg8Rv905FnIvj989is"}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


CHUNK = sse(choices=[{"text": " word", "index": 0, "logprobs": None, "finish_reason": None}])


def framed(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def last(tokens):
    choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}
    return (
        sse(choices=[choice], usage={"prompt_tokens": 1, "completion_tokens": tokens}) + b"data: [DONE]\n\n"
    )


def serve(ports):
    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        writer.write(HEAD)
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(body["max_tokens"]):
            due += 1 / body["seed"]  # the rate travels as the seed
            await asyncio.sleep(max(0, due - loop.time()))
            writer.write(framed(CHUNK))
        writer.write(framed(last(body["max_tokens"])) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def round_of(model, streams, tokens, rate):
    async def one():
        count = 0
        async for _ in model.generate("x", max_tokens=tokens, seed=rate):
            count += 1
        return count

    before, began = cpu(), time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(streams)))
    assert counts == [tokens] * streams
    return cpu() - before, time.perf_counter() - began


def parser_us():
    stream, number = Stream(), 100_000
    before = time.process_time()
    for at in range(number):
        stream.feed(CHUNK, at)
    return (time.process_time() - before) / number * 1e6


async def measure(port, options):
    dialect = Dialect("paced", {"max_tokens": "max_tokens", "seed": "seed"})
    source = Server(Endpoint(f"http://127.0.0.1:{port}", None, "m", dialect), Settings(slots=options.streams))
    async with AsyncTextModel(source) as model:
        await round_of(model, options.streams, 10, options.rate)  # warm up
        idle, _ = await round_of(model, options.streams, 1, options.rate)
        rounds = [await round_of(model, options.streams, options.tokens, options.rate) for _ in range(3)]
    events = options.streams * (options.tokens - 1)
    per_event = sorted((spent - idle) / events * 1e6 for spent, _ in rounds)
    rate = options.streams * options.tokens / min(wall for _, wall in rounds)
    return {
        "loop": options.loop,
        "streams": options.streams,
        "events": options.streams * options.tokens,
        "events_per_s": round(rate),
        "us_per_event": round(per_event[1], 1),
        "us_per_event_all": [round(value, 1) for value in per_event],
        "us_per_request": round(idle / options.streams * 1e6),
        "parser_us_per_event": round(parser_us(), 2),
        "goal_us": GOAL_US,
        "met": per_event[1] < GOAL_US,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=int, default=50, help="tokens a second on each stream")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=serve, args=(ports,), daemon=True)
    server.start()
    try:
        run = uvloop.run if options.loop == "uvloop" else asyncio.run
        print(json.dumps(run(measure(ports.get(timeout=30), options)), indent=2))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
