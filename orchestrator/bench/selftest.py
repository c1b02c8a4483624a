"""Innocence of the client: its ceiling and its error, against the server of known pace (`paced`)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator

from orchestrator.backend import Dialect, Endpoint
from orchestrator.bench import rounds, samples
from orchestrator.bench.exchange import Exchange
from orchestrator.bench.statistics import median
from orchestrator.bench.values import SelfTest, Workload
from orchestrator.bench.workload import Ask
from orchestrator.errors import OrchestratorError

STREAMS = 64
CEILING = 10_000.0  # events a second on one core: less than that, and no verdict is given
ERROR = 0.02  # of a rate that is known
PATIENCE = 30.0
_WRITTEN = re.compile(rb'"written_ns":(\d+)')
_PLAIN = Dialect("paced", {})


async def self_test(streams: int = STREAMS) -> SelfTest:
    """Measure the client against known rates; takes about three seconds.

    Raises:
        OrchestratorError: the server of the test did not start.

    """
    async with _server() as port:
        idle, _ = await _cost(port, streams, tokens=2, rate=20)
        cost, events = await _cost(port, streams, tokens=42, rate=40)
        precise = await _round(port, 2, tokens=40, rate=50.0, ttft_ms=40.0)
    found = [samples.sample(each, precise.began_ns) for each in precise.exchanges]
    delays = [delay for each in precise.exchanges for delay in _delays(each)]
    rates = [each.decode_tok_s / 50.0 - 1 for each in found if each.decode_tok_s]
    first = [each.ttft_s - 0.04 for each in found if each.ttft_s]
    if not rates or not first or not delays:
        raise OrchestratorError(f"bench: the self-test's server failed: {found[0].error}")
    per_event = max(1e-9, (cost - idle) / (events - 2 * streams))
    ceiling, decode_error = 1 / per_event, median(rates)
    reasons = []
    if ceiling < CEILING:
        reasons.append(f"the client takes {ceiling:.0f} events/s on one core; {CEILING:.0f} are needed")
    if abs(decode_error) > ERROR:
        reasons.append(f"a known rate was measured {decode_error:+.1%} wrong: the machine is too busy")
    return SelfTest(
        streams=streams,
        events=events,
        ceiling_events_s=ceiling,
        us_per_event=per_event * 1e6,
        decode_error=decode_error,
        ttft_error_s=median(first),
        read_delay_s=median(delays),
        ok=not reasons,
        reasons=tuple(reasons),
    )


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orchestrator.bench.paced"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async with asyncio.timeout(PATIENCE):
            line = await process.stdout.readline()
        if not line.strip().isdigit():
            raise OrchestratorError("bench: the self-test's server did not start")
        yield int(line)
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(PATIENCE):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _round(port: int, streams: int, tokens: int, rate: float, ttft_ms: float) -> rounds.Run:
    endpoint = Endpoint(f"http://127.0.0.1:{port}/{rate:g}/{ttft_ms:g}", None, "paced", _PLAIN)
    load = Workload(name="self-test", concurrency=streams, requests=streams)
    return await rounds.run(endpoint, load, [Ask([1] * 8, tokens)] * streams, 0, deadline=60, stall=30)


async def _cost(port: int, streams: int, tokens: int, rate: float) -> tuple[float, int]:
    """Return the CPU seconds of this process for a round, parsing included, and the events in it."""
    before = time.process_time()
    done = await _round(port, streams, tokens, rate, 5.0)
    events = sum(len(samples.sample(each, done.began_ns).chunks_s) for each in done.exchanges)
    return time.process_time() - before, events


def _delays(exchange: Exchange) -> list[float]:
    """Return the seconds from the server's writes to our stamps."""
    reads = exchange.connection.reads if exchange.connection else []
    return [(at_ns - int(written)) / 1e9 for at_ns, data in reads for written in _WRITTEN.findall(data)[:1]]
