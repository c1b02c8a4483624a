"""`SubprocessBackend`: start (port retries), supervise (restarts), stop; the same for every engine.

A supervisor thread owns the state. It runs one task on an event loop of its own: launch, wait until ready,
watch until the exit, and again within the restart budget. Callers send wishes (`start`, `stop`) and wait on
a condition; they never touch the child. Calling off is the cancellation of that one task, so every wait in
it can be called off, and its ``finally`` blocks are the only places where a child is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tenacity

from backends import containers, failures, lifecycle, planning, process, readiness
from backends.engine import Engine
from backends.failures import Failure
from backends.launch import END_PATIENCE, GPU_PATIENCE, Lease, end, first, launch, seconds_since
from backends.lifecycle import TAIL_LINES, Lifecycle, log
from backends.restarts import Budget
from orchestrator import fetching, home, leftovers
from orchestrator.backend import ALIVE, Command, Endpoint, Event, Plan, State
from orchestrator.errors import (
    BackendError,
    Crashed,
    ExitedEarly,
    GaveUp,
    OrchestratorError,
    PortTaken,
    StartCancelled,
    StartError,
    StopFailed,
    describe_exit,
)

if TYPE_CHECKING:
    from orchestrator.profile import Profile

PORT_ATTEMPTS = 6
# seconds beyond the grace: more than any stop takes
STOP_PATIENCE = END_PATIENCE + GPU_PATIENCE + 2 * containers.PATIENCE + 5.0
_serial = itertools.count(1)


class SubprocessBackend(Engine):
    """One profile served by one engine as a child process; an engine adds only data and `command`."""

    # -- for callers, from any thread -------------------------------------------------------------------
    def __init__(
        self, profile: Profile, *, environ: Mapping[str, str] | None = None, instance: str | None = None
    ) -> None:
        """Prepare; nothing starts and nothing is written.

        Args:
            profile: what to serve.
            environ: the environment to look things up in and to pass on; default: this process's.
            instance: the run folder's name; default: the profile's name with this process's pid, so that
                any number of programs may run the same profile.

        """
        self.profile = profile
        self.environ = dict(os.environ if environ is None else environ)
        self.instance = instance or f"{profile.name}~{os.getpid()}-{next(_serial)}"
        self.life = Lifecycle(profile, self.name)
        self._lease = Lease()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._hasten: float | None = None
        self._stopping = False
        self._owner = os.getpid()
        self._budget = Budget(profile.restart)

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self.life.state

    @property
    def grace(self) -> float:
        """Seconds between TERM and KILL."""
        return self.profile.timeouts.stop if self._hasten is None else self._hasten

    def plan(self) -> Plan:
        """Decide everything, start nothing; see `Backend.plan`."""
        return planning.make_plan(self, self.profile, self.environ)

    def assembling(self, done: int, total: int, doing: str = "putting the model together") -> None:
        """Tell how far the model has come that is put together or downloaded, in steps that people notice."""
        step = 1 if total >= 1 << 30 else 10  # percent
        percent = done * 100 // max(total, 1) // step * step
        stage = f"{doing}: {percent} % of {total >> 20} MiB"
        with self.life.changed:
            if self._stopping:
                raise StartCancelled(f"{self.life.title}: stopped", profile=self.profile.name)
            if stage != self.life.stage:
                self.life.stage = stage
                self.life.tell("stage", line=stage)

    def prepared(self, plan: Plan, port: int, launch: str = "LAUNCH") -> Command:
        """Return the command with all that the profile's own words ask for.

        Placeholders are filled in, and what a container needs is put in. `launch` names this launch; the
        default is for looking at the command only.
        """
        container = containers.of(plan, launch, self.environ)
        return containers.prepared(self.command(plan, port), plan, port, container, self.key_variable)

    def start(self, *, timeout: float | None = None) -> Endpoint:
        """Start if need be and wait until ready; see `Backend.start`."""
        with self.life.changed:
            if self._thread is None:
                if self.state is State.STUCK and self.life.error is not None:
                    raise self.life.error
                self._begin()
        return self.life.wait_ready(timeout)

    def endpoint(self, timeout: float | None = None) -> Endpoint:
        """Wait until ready without starting anything; see `Backend.endpoint`."""
        return self.life.wait_ready(timeout)

    def request(self, endpoint: Endpoint | None = None) -> AbstractContextManager[None]:
        """Count a request as in flight while the context is open."""
        del endpoint  # there is one engine
        return self.life.request()

    def stop(self, grace: float | None = None) -> None:
        """Stop and verify that nothing is left; see `Backend.stop`."""
        if self._owner != os.getpid():
            return  # we are a fork of the owner: its engine is not ours, and its locks may be held for ever
        life = self.life
        with life.changed:
            thread = self._thread
            if thread is not None:
                self._order_stop(grace)
                life.changed.wait_for(lambda: self._thread is not thread, self.grace + STOP_PATIENCE)
                if self._thread is thread:
                    raise StopFailed(
                        f"{life.title}: still {self.state}", survivors=(), profile=self.profile.name
                    )
            if thread is None and self.state is State.STUCK:
                self._look_again()
            if self.state is State.STUCK and life.error is not None:
                raise life.error
            if self.state is State.FAILED:
                # its log was kept for whoever asks why; now nobody will
                if life.folder is not None and life.folder.temporary and life.folder.acquire():
                    life.folder.release(remove=True)
                life.become(State.STOPPED)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with every event from now on; returns the unsubscriber."""
        return self.life.subscribers.add(callback)

    def status(self) -> dict[str, Any]:
        """Return what `ps` and ``/api/status`` show; memory in bytes, times in seconds."""
        return dict(self.life.status())

    # -- wishes; the condition is held ------------------------------------------------------------------
    def _begin(self) -> None:
        """Take the run folder and start the supervisor."""
        root = home.home(self.environ)
        leftovers.sweep(root)
        folder = home.RunFolder(home.private(root / "run") / self.instance)
        if not leftovers.acquire(folder):
            raise StartError(
                f"{self.life.title}: already runs",
                profile=self.profile.name,
                advice="see `orchestrator ps`; stop it with `orchestrator down`",
            )
        self.life.folder, self.life.error, self.life.restarts = folder, None, 0
        self._hasten, self._stopping, self._owner = None, False, os.getpid()
        self._budget.reset()
        self.life.become(State.STARTING)
        self._thread = threading.Thread(
            target=self._run_thread, args=(folder,), name=f"supervise-{self.profile.name}", daemon=True
        )
        self._thread.start()

    def _order_stop(self, grace: float | None) -> None:
        self._stopping = True
        if grace is not None:
            self._hasten = grace
        if self.state in ALIVE:
            self.life.become(State.STOPPING)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._hear_stop)

    def _look_again(self) -> None:
        """Stuck leads to stopped once what survived is gone; the condition is held."""
        child, folder = self.life.child, self.life.folder
        if child is None or folder is None:
            return
        gone = not leftovers.end(child.pid, child.cookie, child.known, patience=1)
        gone = gone and not (child.container and child.container.end(1))
        if gone and (child.gpus is None or child.gpus.look(child.ever).back):
            folder.release(remove=folder.temporary)
            self.life.child = self.life.error = None
            self.life.become(State.STOPPED)

    def _hear_stop(self) -> None:
        """On the supervisor's loop: call its task off once, and hasten a stop that is under way."""
        if self._hasten is not None and self.life.child is not None:
            self.life.child.stop(self._hasten)
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    # -- the supervisor ---------------------------------------------------------------------------------
    def _run_thread(self, folder: home.RunFolder) -> None:
        """Own the state from the plan to the last pid."""
        final = State.STOPPED
        error: OrchestratorError | None = None
        try:
            lifecycle.run(self._own())
        except asyncio.CancelledError:
            pass  # as asked
        except StopFailed as fault:
            final, error = State.STUCK, fault
        except OrchestratorError as fault:
            final, error = State.FAILED, fault
        except Exception as fault:  # a fault of ours must not leave callers waiting
            log.exception("supervisor_failed", profile=self.profile.name)
            final, error = State.FAILED, OrchestratorError(f"{self.life.title}: internal fault: {fault!r}")
        with self.life.changed:
            if final is State.FAILED and self._stopping:
                final, error = State.STOPPED, None  # it was asked to go, and is gone
            elif final is State.FAILED and self.state is State.READY:
                self.life.become(State.RESTARTING, reason=str(error))
            elif final is State.STUCK and self.state is not State.STOPPING:
                self.life.become(State.STOPPING)
            self._loop = self._task = self._thread = self.life.ready_at = None
            self.life.error, self.life.stage, self._stopping = error, "", False
            self._lease.drop()
            if final is not State.STUCK:
                self.life.child = None
                folder.release(remove=folder.temporary and final is State.STOPPED)
            told = {} if final is State.STOPPED else {"error": str(error), "advice": error and error.advice}
            self.life.become(final, **told)

    def _checked_plan(self) -> Plan:
        plan = self.plan()
        planning.refuse_what_does_not_fit(plan)
        return plan

    async def _own(self) -> None:
        """Plan, then run the *supervise* policy: restarts within the budget, with backoff."""
        with self.life.changed:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._stopping:
                raise asyncio.CancelledError
        plan = await asyncio.to_thread(self._checked_plan)
        while plan.downloads:
            await fetching.fetch(
                plan.downloads,
                functools.partial(self.assembling, doing=f"{plan.downloads[0].doing} the model"),
            )
            plan = await asyncio.to_thread(self._checked_plan)
        planning.tell_reduced(self.life, plan)
        supervise = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self._is_mendable),
            stop=self._is_budget_spent,
            wait=lambda _: self._budget.pause(),
            before_sleep=self._before_restart,
            reraise=True,
        )
        try:
            await supervise(self._run_once, plan)
        except (Crashed, ExitedEarly, PortTaken) as fault:
            raise (self._give_up(fault) if self._is_mendable(fault) else fault) from fault

    def _is_mendable(self, error: BaseException) -> bool:
        """Any unasked exit is worth a restart, unless its message says that no retry mends it."""
        if isinstance(error, ExitedEarly):
            known = self.diagnose(self.life.child)
            return known is None or not known.permanent
        return isinstance(error, Crashed | PortTaken)

    def _is_budget_spent(self, retry: tenacity.RetryCallState) -> bool:
        error = retry.outcome.exception() if retry.outcome else None
        return self._budget.is_empty(error.uptime if isinstance(error, Crashed) else 0.0)

    def diagnose(self, child: process.Child | None) -> Failure | None:
        """Return the known failure that a child's log shows."""
        lines = child.tail.lines(failures.LOG_LINES) if child else ()
        outside = containers.CONTAINER_FAILURES if child and child.container else ()
        return failures.diagnose((*outside, *self.failures), "\n".join(lines), child.exit if child else None)

    def _lost(self, error: BaseException | None) -> None:
        """Say that an engine ended unasked."""
        with self.life.changed:
            if self.state in (State.STARTING, State.READY):
                self.life.become(State.RESTARTING, reason=str(error), advice=getattr(error, "advice", None))

    def _before_restart(self, retry: tenacity.RetryCallState) -> None:
        self._budget.spend()
        self._lost(retry.outcome.exception() if retry.outcome else None)
        pause = retry.next_action.sleep if retry.next_action else 0.0
        with self.life.changed:
            self.life.restarts += 1
            self.life.tell("restart", attempt=self._budget.spent, pause_s=round(pause, 3))

    def _give_up(self, error: BackendError) -> GaveUp:
        attempts, title = self._budget.spent, self.life.title
        return GaveUp(
            f"{title}: gave up after {attempts} restarts within {self.profile.restart.window:g} s; "
            f"the last time it {str(error).removeprefix(title + ': ')}",
            attempts=attempts,
            profile=self.profile.name,
            log_tail=error.log_tail,
            advice=error.advice,
        )

    async def _run_once(self, plan: Plan) -> None:
        """Serve from one launch to its end; leaves only by raising."""
        life = self.life
        with life.changed:
            if self.state is State.RESTARTING:
                life.become(State.STARTING)
        began = time.monotonic()
        child, endpoint = await self._start(plan)
        try:
            with life.changed:
                life.ready_at, life.stage = time.monotonic(), ""
                life.load_s = round(life.ready_at - began, 3)
                if not self._stopping:
                    life.current = endpoint
                    life.become(State.READY, engine_url=endpoint.url, load_s=life.load_s)
            why = await self._watch(child, endpoint)
            ended, tail = child.exit or process.Exit(None, None), child.tail.lines(TAIL_LINES)
            known, uptime = self.diagnose(child), seconds_since(life.ready_at)
            crash = Crashed(
                f"{life.title}: {why or 'ended unasked: ' + describe_exit(ended.code, ended.signal)} "
                f"after {uptime:.1f} s",
                code=ended.code,
                signal=ended.signal,
                uptime=uptime,
                profile=self.profile.name,
                log_tail=tail,
                advice=known.advice if known else None,
            )
            self._lost(crash)  # what it left behind is ended in its own time, but ready it is no more
        finally:
            with life.changed:
                life.current = life.ready_at = None
            await end(self, child)
        raise crash

    async def _watch(self, child: process.Child, endpoint: Endpoint) -> str | None:
        """Wait for the end of a ready engine; returns why it has to end, None when it ended by itself."""

        async def watchdog() -> str:
            async with readiness.Probe(endpoint) as probe:
                return await readiness.wait_hung(
                    probe,
                    health=self.health_path,
                    path=self.progress_path,
                    counters=self.progress,
                    busy=lambda: self.life.in_flight > 0,
                    seconds=self.profile.timeouts.stall,
                )

        why = await first(child.exited.wait(), *([watchdog()] if self.profile.timeouts.stall else []))
        if child.exited.is_set():
            return None
        child.stop(0)  # it would not hear a TERM
        return str(why)

    async def _start(self, plan: Plan) -> tuple[process.Child, Endpoint]:
        """Run the *start* policy: a port that was taken is tried again on a fresh one."""
        policy = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(PortTaken),
            stop=tenacity.stop_after_attempt(PORT_ATTEMPTS),
            before_sleep=self._before_port_retry,
            reraise=True,
        )

        def spawned(child: process.Child) -> None:
            self.life.child, self.life.stage = child, "starting"

        return await policy(launch, self, plan, self._lease, spawned)

    def _before_port_retry(self, retry: tenacity.RetryCallState) -> None:
        error = retry.outcome.exception() if retry.outcome else None
        with self.life.changed:
            self.life.tell(
                "port_taken", port=self._lease.port, attempt=retry.attempt_number, reason=str(error)
            )
            self._lease.drop()
