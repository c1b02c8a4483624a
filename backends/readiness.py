"""Is it really ready? Alive and owning its socket, listing our model id, and answering one token.

``/health`` alone lies: it is 200 while another server sits on the port, and while vLLM hangs.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Callable
from typing import Any

import httpx

from backends.process import Child, owns_port
from orchestrator.backend import Endpoint
from orchestrator.errors import PortTaken, StartError, StartStalled

PROBE_SECONDS = 2.0
STALL_SAMPLE_SECONDS = 1.0
STAGE_LINES = 20  # among which one is looked for that tells of progress


class Probe:
    """Asks one engine short questions, each with its own deadline."""

    def __init__(self, endpoint: Endpoint) -> None:
        headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        self.endpoint = endpoint
        # proxies from the environment are for the outside world, not for a child of ours
        self.client = httpx.AsyncClient(
            base_url=endpoint.url,
            headers=headers,
            timeout=PROBE_SECONDS,
            trust_env=False,
            # all is plain HTTP on loopback, and loading the world's certificates takes 40 ms
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def __aenter__(self) -> Probe:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            return await self.client.get(path)
        except httpx.HTTPError:
            return None

    async def status(self, path: str) -> int | None:
        """Return the HTTP status of a path, None when nobody answers in time."""
        response = await self._get(path)
        return None if response is None else response.status_code

    async def text(self, path: str) -> str | None:
        """Return a path's body, None when nobody answers well in time."""
        response = await self._get(path)
        return response.text if response is not None and response.is_success else None

    async def json(self, path: str) -> Any:
        """Return a path's JSON, None when there is none."""
        body = await self.text(path)
        try:
            return None if body is None else json.loads(body)
        except ValueError:
            return None

    async def model_ids(self) -> list[str] | None:
        """Return the ids that ``/v1/models`` lists, None when there was no answer in time."""
        listed = await self.json("/v1/models")
        if listed is None:
            return None
        try:
            return [str(model["id"]) for model in listed["data"]]
        except (TypeError, KeyError):
            return []

    async def one_token(self, seconds: float | None) -> str | None:
        """Let it answer one token; returns None when it did, else what went wrong."""
        body = {"model": self.endpoint.model, "prompt": "a", "max_tokens": 1, "temperature": 0}
        try:
            response = await self.client.post("/v1/completions", json=body, timeout=seconds)
        except httpx.HTTPError as error:
            return f"no answer to a one-token request: {type(error).__name__}"
        if not response.is_success:
            return (
                f"a one-token request was answered with status {response.status_code}: {response.text[:200]}"
            )
        return None


async def wait_ready(probe: Probe, child: Child, *, health: str, port: int) -> None:
    """Poll until the engine is ready; the caller races this against exit, deadline and stall.

    Raises:
        PortTaken: somebody else's server answers on the port.
        StartError: it answers, but not as our model.

    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while await probe.status(health) != 200:  # noqa: ASYNC110 - a server can only be asked
        # quick at first, so that a fast load is seen at once; slower in a load of minutes
        await asyncio.sleep(min(0.25, 0.02 + (loop.time() - began) / 20))
    if not await asyncio.to_thread(child.owns, port):
        raise PortTaken(f"port {port} is served by a process that is not ours")
    if child.container is None and await asyncio.to_thread(
        lambda: owns_port(child.tree(), port, beyond=True)
    ):
        raise StartError(
            f"it listens on port {port} beyond loopback, where anybody can reach it",
            advice="let it listen on 127.0.0.1: write {host} where its command names an address",
        )
    while (ids := await probe.model_ids()) is None:  # noqa: ASYNC110 - a server can only be asked
        await asyncio.sleep(0.25)  # slow is not wrong: a machine may be busy
    if probe.endpoint.model not in ids:
        raise StartError(
            f"the server on port {port} lists {', '.join(ids) or 'no model'}, not {probe.endpoint.model}"
        )
    problem = await probe.one_token(None)
    if problem:
        raise StartError(f"healthy, but {problem}")


async def wait_stalled(
    child: Child, seconds: float, stage: Callable[[str], None], stages: re.Pattern[str]
) -> None:
    """Return by raising when the tree makes no progress for `seconds`.

    Tells `stage` the newest log line, each second in which it is another one, of those that match `stages`.

    Raises:
        StartStalled: no log line, no CPU, no bytes read and no memory growth for that long.

    """
    loop = asyncio.get_running_loop()
    last = await asyncio.to_thread(child.look)
    moved = seen = loop.time()
    shown = ""
    while True:
        await asyncio.sleep(STALL_SAMPLE_SECONDS)
        now, current = loop.time(), await asyncio.to_thread(child.look)
        if current.moved_since(last, now - seen):
            moved = now
        last, seen = current, now
        newest = next(filter(stages.search, reversed(child.tail.lines(STAGE_LINES))), shown)
        if newest != shown:
            shown = newest
            stage(shown)
        if seconds and now - moved >= seconds:
            raise StartStalled(
                f"no progress for {seconds:g} s while loading: no log line, no CPU, nothing read",
                advice="raise `timeouts.stall` if this machine really needs that long, else look at the log",
            )


async def wait_hung(
    probe: Probe,
    *,
    health: str,
    path: str,
    counters: re.Pattern[str],
    busy: Callable[[], bool],
    seconds: float,
) -> str:
    """Return once a ready engine hangs, with what shows it.

    It hangs when its health stays unanswered for `seconds`, or when requests are in flight and its own
    counters of work done have not moved for as long. Slow is not hung: one token, or one batch of a prompt,
    is enough.

    Args:
        probe: asks, each time with a short deadline.
        health: the health path.
        path: where the counters are, in Prometheus' text form.
        counters: finds the counters that only move with work done.
        busy: whether requests are in flight.
        seconds: for how long nothing may happen.

    """
    loop = asyncio.get_running_loop()
    answered = moved = loop.time()
    last: list[str] = []
    while True:
        busy_now = busy()
        if busy_now or not last:
            done = counters.findall(await probe.text(path) or "")
            # an engine that never showed its counters can't be judged by them
            if (done and done != last) or not (done or last):
                moved = loop.time()
            last = done or last
        if not busy_now:
            moved = loop.time()
        await asyncio.sleep(min(5.0, seconds / 4))
        if await probe.status(health) == 200:
            answered = loop.time()
        if loop.time() - answered >= seconds:
            return f"hung: no answer from {health} for {seconds:g} s"
        if loop.time() - moved >= seconds:
            return f"hung: requests in flight and no progress for {seconds:g} s"
