"""One round's loops: closed (streams that send again when they are free) and open (Poisson moments).

The loop's lag and this process's CPU time are watched all along: a client that is late measures itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.backend import Endpoint
from orchestrator.bench.exchange import Ahead, Exchange, perform, request_bytes
from orchestrator.bench.prompts import Ask
from orchestrator.bench.values import Workload

LAG_EVERY = 0.01  # seconds between two looks at the clock


@dataclass(slots=True)
class Run:
    """What a round left: exchanges, and what was seen of the client. Times in seconds, one core = 1."""

    exchanges: list[Exchange]
    began_ns: int
    ended_ns: int
    cpu_s: float
    lags: list[float] = field(default_factory=list)


async def run(
    endpoint: Endpoint,
    workload: Workload,
    wanted: Sequence[Ask],
    seed: int,
    *,
    deadline: float = 600.0,
    stall: float = 120.0,
) -> Run:
    """Make all requests of a round.

    Args:
        endpoint: where to.
        workload: closed or open loop, and how many streams.
        wanted: the requests.
        seed: of the open loop's moments.
        deadline: seconds for one request.
        stall: seconds without news until a request is given up.

    """
    exchanges = [Exchange(index, ask, request_bytes(endpoint, ask)) for index, ask in enumerate(wanted)]
    loop = _open_loop if workload.rate else _closed_loop
    found = Run(exchanges, 0, 0, 0.0)
    watching = asyncio.ensure_future(_watch_lag(found.lags))
    try:
        await loop(endpoint, workload, exchanges, seed, deadline, stall, found)
    finally:
        found.ended_ns = time.perf_counter_ns()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return found


def _begin(found: Run) -> None:
    found.began_ns = time.perf_counter_ns()
    found.lags.clear()
    found.cpu_s = time.process_time()


async def _closed_loop(
    endpoint: Endpoint,
    workload: Workload,
    exchanges: list[Exchange],
    _seed: int,
    deadline: float,
    stall: float,
    found: Run,
) -> None:
    waiting = list(reversed(exchanges))
    streams = [Ahead(endpoint) for _ in range(min(workload.concurrency, len(exchanges)))]
    for ahead in streams:
        ahead.open()
    await asyncio.gather(*(ahead.opened() for ahead in streams))
    _begin(found)

    async def stream(ahead: Ahead) -> None:
        while waiting:
            exchange = waiting.pop()
            exchange.intended_ns = time.perf_counter_ns()
            await perform(exchange, ahead, deadline, stall, more=bool(waiting))

    try:
        await _together([stream(ahead) for ahead in streams])
    finally:
        found.cpu_s = time.process_time() - found.cpu_s
        for ahead in streams:
            await ahead.close()


async def _open_loop(
    endpoint: Endpoint,
    workload: Workload,
    exchanges: list[Exchange],
    seed: int,
    deadline: float,
    stall: float,
    found: Run,
) -> None:
    chance = random.Random(seed)  # noqa: S311 - not a secret
    at, moments = 0.0, []
    for _ in exchanges:
        moments.append(at)
        at += chance.expovariate(workload.rate)
    _begin(found)

    async def one(exchange: Exchange, moment: float) -> None:
        exchange.intended_ns = found.began_ns + int(moment * 1e9)
        ahead = Ahead(endpoint)
        try:
            await _sleep_until(exchange.intended_ns - 200_000_000)  # connect a while before it is due
            ahead.open()
            await _sleep_until(exchange.intended_ns)
            await perform(exchange, ahead, deadline, stall, more=False)
        finally:
            await ahead.close()

    try:
        await _together([one(*pair) for pair in zip(exchanges, moments, strict=True)])
    finally:
        found.cpu_s = time.process_time() - found.cpu_s


async def _together(work: Sequence[object]) -> None:
    """Run all; when this is called off, or one fails, none is left behind."""
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each)  # type: ignore[arg-type]


async def _sleep_until(moment_ns: int) -> None:
    while (left := (moment_ns - time.perf_counter_ns()) / 1e9) > 0:  # noqa: ASYNC110 - a moment is no event
        await asyncio.sleep(left)  # again, for timers may wake a millisecond early


async def _watch_lag(lags: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY
        await asyncio.sleep(LAG_EVERY)
        lags.append(max(0.0, loop.time() - due))
