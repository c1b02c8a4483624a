"""Innocence of the client: its ceiling and its error, against the server of known pace (`paced`)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from orchestrator.backend import Dialect, Endpoint
from orchestrator.bench import rounds, samples
from orchestrator.bench.exchange import Exchange
from orchestrator.bench.prompts import Ask
from orchestrator.bench.statistics import median
from orchestrator.bench.values import SelfTest, Workload
from orchestrator.errors import OrchestratorError

STREAMS = 64
CEILING = 10_000.0  # events a second on one core: less than that, and no verdict is given
ERROR = 0.02  # of a rate that is known
PATIENCE = 30.0
_STAMPS = re.compile(rb'"written_ns":(\d+),"received_ns":(\d+)')
_PLAIN = Dialect("paced", {})


async def self_test(streams: int = STREAMS) -> SelfTest:
    """Measure the client against known rates; takes about three seconds.

    Raises:
        OrchestratorError: the server of the test did not start.

    """
    async with _server() as port:
        idle, _ = await _cost(port, streams, tokens=2, rate=20)
        cost, events = await _cost(port, streams, tokens=42, rate=40)
        precise = await _round(port, 4, tokens=50, rate=50.0, ttft_ms=40.0)
    errors = [found for each in precise.exchanges if (found := _errors(each, precise.began_ns))]
    if not errors:
        why = samples.sample(precise.exchanges[0], precise.began_ns).error
        raise OrchestratorError(f"self-test: its server failed: {why}")
    per_event = max(1e-9, (cost - idle) / (events - 2 * streams))
    ceiling, decode_error = 1 / per_event, median([each.decode for each in errors])
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
        ttft_error_s=median([each.ttft_s for each in errors]),
        read_delay_s=median([each.delay_s for each in errors]),
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
            raise OrchestratorError("self-test: its server did not start")
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


class _Errors(NamedTuple):
    """What the client saw of one stream against what the server did: a share, and seconds."""

    decode: float
    ttft_s: float
    delay_s: float


def _errors(exchange: Exchange, began_ns: int) -> _Errors | None:
    """Compare the client's figures with the server's stamps; None when the exchange failed."""
    seen = samples.sample(exchange, began_ns)
    reads = exchange.connection.reads if exchange.connection else []
    stamps = [(at, *map(int, found)) for at, data in reads for found in _STAMPS.findall(data)]
    if seen.error is not None or not seen.decode_tok_s or not seen.ttft_s:
        return None
    first, last, received = stamps[0][1], stamps[-1][1], stamps[0][2]
    return _Errors(
        decode=seen.decode_tok_s / ((len(stamps) - 1) / (last - first) * 1e9) - 1,
        ttft_s=seen.ttft_s - (first - received) / 1e9,
        delay_s=median([(at - written) / 1e9 for at, written, _ in stamps]),
    )
