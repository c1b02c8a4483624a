"""One launch of one engine: from a plan to a ready child, and from any child to nothing.

Whatever goes wrong on the way up, the child has ended before the error leaves this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends import containers, process, readiness
from backends.lifecycle import TAIL_LINES
from orchestrator import hardware, home
from orchestrator.backend import Endpoint, Plan
from orchestrator.errors import (
    BackendError,
    BinaryMissing,
    ExitedEarly,
    PortTaken,
    StartError,
    StartTimeout,
    StopFailed,
    describe_exit,
)
from orchestrator.leftovers import boot_id, start_time
from orchestrator.waiting import to_its_end

if TYPE_CHECKING:
    from backends.base import SubprocessBackend

GPU_PATIENCE = 15.0  # seconds for a driver to give memory back
END_PATIENCE = 10.0  # seconds after the grace until a tree that is still there is called stuck
EXIT_NEWS = 0.5  # seconds for the news of an engine's end to arrive
COOKIE = "ORCHESTRATOR_LAUNCH"

_leased: set[int] = set()  # ports given to engines of this process


class Lease:
    """The port of one engine: kept over restarts while it is free, changed when it was taken."""

    def __init__(self) -> None:
        self.port: int | None = None

    def take(self) -> int:
        """Return the port to use now."""
        if self.port is None or not process.is_free(self.port):
            self.drop()
            self.port = process.free_port(_leased)
            _leased.add(self.port)
        return self.port

    def drop(self) -> None:
        """Give the port up."""
        if self.port is not None:
            _leased.discard(self.port)
        self.port = None


async def launch(
    engine: SubprocessBackend, plan: Plan, lease: Lease, spawned: Callable[[process.Child], None]
) -> tuple[process.Child, Endpoint]:
    """Start the engine and wait until it is ready.

    Raises:
        PortTaken: somebody else has the port.
        StartError: it did not become ready, for another reason.

    """
    life, folder = engine.life, engine.life.folder
    assert folder is not None
    home.private(folder.path)  # somebody may have tidied up
    port, name = lease.take(), secrets.token_hex(16)
    command = engine.prepared(plan, port, name)
    key = secrets.token_urlsafe(32)
    child = await _child(engine, plan, name)
    spawned(child)
    record = _record(engine, plan, child, port)
    if child.container is not None:
        # before there is a container: whoever cleans up must know that it is alive, or find it
        record["container"] = child.container.record()
        folder.write(record)
        with _titled(engine):
            await asyncio.to_thread(child.container.clear, home.home(engine.environ))
    # the key is in the environment alone: command lines are everybody's to read
    command = replace(command, env={**command.env, engine.key_variable: key})
    try:
        with _titled(engine):
            await child.launch(
                command, inherited=engine.environ, cwd=Path("/"), grace=plan.profile.timeouts.stop
            )
        if child.error and not child.missing:
            raise StartError(
                f"{life.title}: {child.error}",
                profile=plan.profile.name,
                advice=f"see to it that {folder.path} is yours and has room",
            )
        if child.error:
            raise BinaryMissing(
                f"{life.title}: {command.argv[0]}: {child.error}",
                profile=plan.profile.name,
                advice="see whether it runs by hand, and whether it was made for this machine",
            )
        known = {str(pid): start_time(pid) for pid in (child.guardian_pid, *child.tree())}
        try:
            folder.write({**record, "session": child.pid, "guardian": child.guardian_pid, "processes": known})
        except BackendError as error:
            if not life.restarts:
                raise
            with life.changed:  # one that served goes on serving, the guardian does not need the record
                life.tell("unrecorded", reason=str(error))
        with life.changed:
            life.tell("spawned", pid=child.pid, port=port)
        endpoint = Endpoint(f"http://127.0.0.1:{port}", key, plan.model_id, engine.dialect_for(plan))
        await _until_ready(engine, child, endpoint, plan, port)
    except BaseException:
        await end(engine, child)
        raise
    return child, endpoint


async def _child(engine: SubprocessBackend, plan: Plan, name: str) -> process.Child:
    """Return what will be launched, with what watches its cards: as they are before it starts."""
    assert engine.life.folder is not None
    child = process.Child(engine.life.folder.log, f"{COOKIE}={name}")
    child.container = containers.of(plan, name, engine.environ)
    if plan.device.gpus:
        child.gpus = await asyncio.to_thread(hardware.Watch, engine.gpu_memory, plan.device.gpus)
        child.cards = hardware.Live(engine.gpu_memory, plan.device.gpus)
    child.tail.noise = engine.noise_on_cpu if plan.device.kind == "cpu" else None
    return child


def _record(engine: SubprocessBackend, plan: Plan, child: process.Child, port: int) -> dict[str, Any]:
    """Return what others read of a launch, and what cleans up after it; no process is there yet."""
    return {
        "name": plan.profile.name,
        "backend": engine.name,
        "profile": str(plan.profile.source or ""),
        "owner": os.getpid(),
        "boot": boot_id(),
        "session": 0,
        "cookie": child.cookie,
        "temporary": str(child.temporary),
        "port": port,
        "processes": {},
    }


@contextlib.contextmanager
def _titled(engine: SubprocessBackend) -> Iterator[None]:
    """Give faults of what knows no profile the title that all messages have."""
    try:
        yield
    except StartError as fault:
        raise StartError(
            f"{engine.life.title}: {fault}", profile=engine.profile.name, advice=fault.advice
        ) from None


async def _until_ready(
    engine: SubprocessBackend, child: process.Child, endpoint: Endpoint, plan: Plan, port: int
) -> None:
    """Readiness races exit, deadline and stall."""
    life, timeouts = engine.life, plan.profile.timeouts

    def stage(line: str) -> None:
        with life.changed:
            life.stage = line
            life.tell("stage", line=line)

    async with readiness.Probe(endpoint) as probe:

        async def ready() -> None:
            await readiness.wait_ready(probe, child, health=engine.health_path, port=port)
            if engine.props_path and (problem := engine.confirm(await probe.json(engine.props_path), plan)):
                raise StartError(problem)

        try:
            async with asyncio.timeout(timeouts.start or None):
                await first(
                    ready(),
                    child.exited.wait(),
                    readiness.wait_stalled(child, timeouts.stall, stage, engine.stages),
                )
        except TimeoutError:
            raise StartTimeout(
                f"{life.title}: not ready after {timeouts.start:g} s",
                profile=plan.profile.name,
                log_tail=child.tail.lines(TAIL_LINES),
                advice="raise `timeouts.start` if it was still loading",
            ) from None
        except StartError as fault:
            # one that dies while it is asked gives odd answers: then its end is what counts
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), EXIT_NEWS)
            if not child.exited.is_set():
                raise type(fault)(
                    f"{life.title}: {fault}",
                    profile=plan.profile.name,
                    log_tail=child.tail.lines(TAIL_LINES),
                    advice=fault.advice,
                ) from None
    if child.exited.is_set():
        raise _early(engine, child, port)


def _early(engine: SubprocessBackend, child: process.Child, port: int) -> StartError:
    """Say why the engine ended before it was ready."""
    ended, tail = child.exit or process.Exit(None, None), child.tail.lines(TAIL_LINES)
    title, name = engine.life.title, engine.profile.name
    patterns = (engine.port_taken, *([containers.PORT_TAKEN] if child.container else []))
    if any(pattern.search("\n".join(tail)) for pattern in patterns):
        return PortTaken(f"{title}: port {port} was taken", profile=name, log_tail=tail)
    known = engine.diagnose(child)
    return ExitedEarly(
        f"{title}: ended before it was ready: {describe_exit(ended.code, ended.signal)}",
        code=ended.code,
        signal=ended.signal,
        profile=name,
        log_tail=tail,
        advice=known.advice if known else _where_its_log_is(engine, child),
    )


def _where_its_log_is(engine: SubprocessBackend, child: process.Child) -> str:
    """Return how to see all that an engine said; what is of one program goes with it."""
    name = engine.profile.name
    if engine.life.folder is None or engine.life.folder.temporary:
        return f"its whole log stays when `orchestrator up` starts it: `orchestrator logs {name}`"
    return f"see its whole log: {child.tail.path}"


async def end(engine: SubprocessBackend, child: process.Child) -> None:
    """End a child and everything that descends from it; a caller who is called off waits all the same.

    Raises:
        StopFailed: something is still there; nothing may be started on top of it.

    """
    await to_its_end(_end(engine, child))


async def _end(engine: SubprocessBackend, child: process.Child) -> None:
    life = engine.life
    if not child.gone.is_set():
        grace = engine.grace
        child.stop(grace)
        patience = END_PATIENCE + (containers.PATIENCE if child.container else 0)
        try:
            async with asyncio.timeout(grace + patience):
                await child.gone.wait()
        except TimeoutError:
            # a guardian that is itself stopped passes nothing on: its end makes us end the tree in its stead
            child.process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_PATIENCE):
                    await child.gone.wait()
        if not child.gone.is_set():
            survivors = child.survivors or child.tree()
            raise StopFailed(
                f"{life.title}: survived a stop: pid {', '.join(map(str, survivors))}",
                survivors=survivors,
                profile=engine.profile.name,
                advice="these processes resist SIGKILL (a hung driver?); see dmesg",
            )
    container = child.container
    if container and child.pid and (left := await asyncio.to_thread(container.end)):
        raise StopFailed(
            f"{life.title}: container {container.name} is still there: {', '.join(left)}",
            survivors=(),
            profile=engine.profile.name,
            advice=f"remove it by hand: {' '.join(container.client.argv)} rm --force {container.name}",
        )
    if child.killed:
        with life.changed:
            life.tell("swept", pids=child.killed)
    if child.gpus is not None:
        await _gpus_back(engine, child, child.gpus)


async def _gpus_back(engine: SubprocessBackend, child: process.Child, watch: hardware.Watch) -> None:
    """Wait until GPU memory is back near where it was: drivers give it back a while after the process."""
    deadline = time.monotonic() + GPU_PATIENCE
    while not (found := await asyncio.to_thread(watch.look, child.ever)).back:
        if time.monotonic() > deadline:
            holders = ", ".join(f"pid {pid}" for pid in found.holders) or "nobody who is listed"
            missing = ", ".join(f"{size >> 20} MiB of {gpu}" for gpu, size in found.missing.items())
            raise StopFailed(
                f"{engine.life.title}: GPU memory did not come back: {missing or 'some'}, held by {holders}",
                survivors=tuple(found.holders),
                profile=engine.profile.name,
                advice="see `orchestrator doctor`; if no process holds it, the driver needs a reset",
            )
        await asyncio.sleep(0.1)


async def first(*waits: Coroutine[Any, Any, Any]) -> Any:
    """Run all, return (or raise) what the first that ends gives, and cancel the rest."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        results = [task.result() for task in done]
        return results[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seconds_since(moment: float | None) -> float:
    """Return the seconds since a monotonic moment, 0 when there was none."""
    return 0.0 if moment is None else time.monotonic() - moment
