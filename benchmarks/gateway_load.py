"""What the gateway costs: latency and CPU time over asking the server directly, beside nginx if it is there.

A server that does no work, the gateway and nginx run as processes of their own; each target is measured in
turn, `--rounds` times, and the medians are shown. CPU time is that of the target's process alone.

    python benchmarks/gateway_load.py [--rounds 3] [--streams 64] [--events 200] [--gap-ms 20] [--json]

Goals, on two cores: at most 40 us of CPU time an event at 64 streams, 200 us a request, +0.25 ms in sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import uvloop

HERE = Path(__file__).parent
GOALS = {"cpu_us_per_event": 40.0, "cpu_us_per_request": 200.0, "added_ms": 0.25}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b'{"object":"text_completion","choices":[{"index":0,"text":" Paris","finish_reason":"stop"}]}'
EVENT = b'data: {"object":"text_completion","model":"fake","choices":[{"index":0,"text":" %d"}]}\n\n'
NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 100000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream server_behind {{ server 127.0.0.1:{behind}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://server_behind; proxy_buffering off;
      proxy_http_version 1.1; proxy_set_header Connection "";
    }}
  }}
}}
"""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# -- the server behind ------------------------------------------------------------------------------------


async def read_request(reader: asyncio.StreamReader) -> dict[str, float] | None:
    """Return the next request's JSON, or None at the end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        _, found, rest = head.lower().partition(b"content-length:")
        size = int(rest.split(b"\r\n")[0]) if found else 0
        return dict(json.loads(await reader.readexactly(size) or b"{}"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer in no time, or with events at even distances that carry the time of their writing."""
    loop = asyncio.get_running_loop()
    while (asked := await read_request(reader)) is not None:
        if not asked.get("stream"):
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(PLAIN)
            )
            writer.write(PLAIN)
            continue
        writer.write(HEAD)
        due = loop.time()
        for _ in range(int(asked["max_tokens"])):
            writer.write(chunk(EVENT % time.monotonic_ns()))
            due += asked["gap"]
            await asyncio.sleep(max(0.0, due - loop.time()))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    writer.close()


def serve(port: int) -> None:
    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=512)
        await server.serve_forever()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run())


# -- the client -------------------------------------------------------------------------------------------


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    def ask(self, **fields: object) -> None:
        body = json.dumps({"model": "fake", "prompt": "The capital of France is", **fields}).encode()
        self.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    async def head(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"gateway: port {self.port} answered {head!r}")
        return head.lower()

    async def plain(self) -> None:
        self.ask()
        size = (await self.head()).split(b"content-length:")[1].split(b"\r\n")[0]
        await self.reader.readexactly(int(size))

    async def events(self, count: int, gap: float) -> AsyncIterator[tuple[int, int]]:
        """Yield when an event came and when it was written, ns."""
        self.ask(stream=True, max_tokens=count, gap=gap)
        await self.head()
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            data = await self.reader.readexactly(size + 2)
            came = time.monotonic_ns()
            for part in data.split(b'"text":" ')[1:]:
                yield came, int(part.partition(b'"')[0])
        await self.reader.readexactly(2)


def cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measure(port: int, pids: list[int], args: argparse.Namespace) -> dict[str, float]:
    """Load one target with each kind of work."""
    one = await Client(port).open()
    took = []
    for number in range(args.requests + 50):
        began = time.monotonic_ns()
        await one.plain()
        if number >= 50:
            took.append((time.monotonic_ns() - began) / 1e3)
    first = []
    for _ in range(50):
        began = time.monotonic_ns()
        first += [(came - began) / 1e3 async for came, _ in one.events(1, 0.01)]

    async def many(client: Client) -> None:
        for _ in range(args.requests // 4):
            await client.plain()

    crowd = [await Client(port).open() for _ in range(32)]
    used = cpu_s(pids)
    await asyncio.gather(*map(many, crowd))
    per_request = (cpu_s(pids) - used) / (32 * (args.requests // 4))

    gap, delays = args.gap_ms / 1e3, []

    async def stream(number: int) -> None:
        client = await Client(port).open()
        await asyncio.sleep(gap * number / args.streams)
        delays.extend([(came - sent) / 1e3 async for came, sent in client.events(args.events, gap)])
        client.writer.close()

    used = cpu_s(pids)
    await asyncio.gather(*map(stream, range(args.streams)))
    per_event = (cpu_s(pids) - used) / len(delays)
    assert len(delays) == args.streams * args.events, "events are missing"
    for client in (one, *crowd):
        client.writer.close()
    memory = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    found = {"seq_p50_us": statistics.median(took), "ttft_p50_us": statistics.median(first)}
    found["delay_p99_us"] = statistics.quantiles(delays, n=100)[98]
    if pids:
        found |= {"cpu_us_per_request": per_request * 1e6, "cpu_us_per_event": per_event * 1e6}
        found["rss_mb"] = memory / 2**20
    return found


# -- the targets ------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"gateway: nothing listens on port {port}")
        time.sleep(0.02)


@contextlib.contextmanager
def running() -> Iterator[dict[str, tuple[int, list[int]]]]:
    """Start the server and what stands before it; yields port and pids of each target by name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        behind = free_port()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(behind,), daemon=True)
        server.start()
        stack.callback(server.join)
        stack.callback(server.terminate)

        def start(*argv: str) -> list[int]:
            process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
            stack.callback(process.terminate)
            return [process.pid]

        wait_for(behind)
        targets = {"direct": (behind, list[int]())}
        if nginx := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"):
            port, conf = free_port(), Path(folder, "nginx.conf")
            conf.write_text(NGINX.format(folder=folder, port=port, behind=behind))
            pids = start(nginx, "-e", f"{folder}/log", "-p", folder, "-c", str(conf))
            wait_for(port)
            targets["nginx"] = (port, pids + [child.pid for child in psutil.Process(pids[0]).children()])
        port, script = free_port(), str(HERE / "gateway_upstream.py")
        pids = start(sys.executable, script, "--port", str(port), "--upstream", f"http://127.0.0.1:{behind}")
        wait_for(port)
        targets["gateway"] = (port, pids)
        yield targets


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--gap-ms", type=float, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with running() as targets:
        rounds = [
            {name: uvloop.run(measure(port, pids, args)) for name, (port, pids) in targets.items()}
            for _ in range(args.rounds)
        ]
    result = {
        name: {
            key: round(statistics.median(each[name][key] for each in rounds), 1) for key in rounds[0][name]
        }
        for name in targets
    }
    added = (result["gateway"]["seq_p50_us"] - result["direct"]["seq_p50_us"]) / 1e3
    met = {"added_ms": added, **{key: result["gateway"][key] for key in GOALS if key != "added_ms"}}
    if args.json:
        print(json.dumps({"targets": result, "goals": GOALS, "measured": met}))
        return
    print("| figure | " + " | ".join(targets) + " |\n| --- |" + " ---: |" * len(targets))
    for key in result["gateway"]:
        print(f"| {key} | " + " | ".join(str(result[name].get(key, "")) for name in targets) + " |")
    for key, goal in GOALS.items():
        print(f"{key}: {met[key]:.3g}, goal {goal:g}: {'met' if met[key] <= goal else 'MISSED'}")


if __name__ == "__main__":
    main()
