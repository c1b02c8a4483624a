"""`Served`: the engines of one name; which of them gets requests, what each has to answer, what is told.

`_changed` guards the fields and is a leaf: no engine is called while it is held, because engines tell their
events under locks of their own. Every wait has a deadline, or ends with the switch that it waits for.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator import discovery
from orchestrator.backend import ALIVE, Backend, Endpoint, Event, Plan, State
from orchestrator.errors import BackendError, EngineReplaced, StartCancelled, StartTimeout
from orchestrator.log import get_logger
from orchestrator.subscribers import Subscribers
from orchestrator.switching_parts import Engine, Make, together

if TYPE_CHECKING:
    from orchestrator.profile import Profile

log = get_logger("orchestrator.switching")


class Served:
    """What clients see of the engines of one name: one backend whose endpoint changes."""

    def __init__(self, profile: Profile, *, instance: str | None = None, make: Make | None = None) -> None:
        """Prepare; nothing starts.

        Args:
            profile: what to serve.
            instance: the run folder's name, with which a second engine's begins; None for folders of this
                process alone.
            make: makes a backend, not started, for a profile and an instance; default: the installed ones.

        Raises:
            UnknownBackend: no installed package offers it.

        """
        self._instance = instance
        self._make = make or _installed
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._subscribers = Subscribers()
        self._engines: list[Engine] = []
        self._to: str | None = None
        self._held = False
        self._ending = False
        self._shown = State.STOPPED
        self._current = self._engine(profile)

    # -- as any backend ---------------------------------------------------------------------------------
    @property
    def profile(self) -> Profile:
        """What is served now."""
        return self._current.backend.profile

    @property
    def state(self) -> State:
        """Where the engine that gets requests is in its life; starting while another is put in its place."""
        state = self._current.backend.state
        return State.STARTING if self._hides(state) else state

    def plan(self) -> Plan:
        """Return the plan of the engine that serves now; see `Backend.plan`."""
        return self._current.backend.plan()

    def endpoint(self, timeout: float | None = None) -> Endpoint:
        """Wait until ready, through a switch too, without starting anything; see `Backend.endpoint`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with self._changed:
                self._changed.wait_for(lambda: not self._held or self._ending, left)
                engine = self._current
                if self._ending:
                    raise self._ended()
                if self._held:
                    raise StartTimeout(
                        f"switch: {self._name}: {self._to} is not ready after {timeout:g} s",
                        profile=self._name,
                        advice="it goes on; ask again",
                    )
            try:
                found = engine.backend.endpoint(left)
            except BackendError:
                if not self._passes(engine, deadline):
                    raise
                continue
            with self._changed:
                if engine is self._current and not self._held:
                    engine.handed = found
                    return found

    @contextlib.contextmanager
    def _counted(self, endpoint: Endpoint) -> Iterator[None]:
        with self._changed:
            engine = next((one for one in self._engines if one.open and one.handed == endpoint), None)
            if engine is None:
                raise EngineReplaced(f"switch: {self._name}: the engine at {endpoint.url} was replaced")
            engine.in_flight += 1
        try:
            with engine.backend.request(endpoint):
                yield
        finally:
            with self._changed:
                engine.in_flight -= 1
                self._changed.notify_all()

    def request(self, endpoint: Endpoint) -> AbstractContextManager[None]:
        """Count a request at the engine that it is sent to; see `Backend.request`."""
        return self._counted(endpoint)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with every event from now on; see `Backend.subscribe`.

        Besides the engines' events: ``switching``, ``switched``, ``switch_failed``, and ``cut`` when answers
        outlasted the drain time.
        """
        return self._subscribers.add(callback)

    def status(self) -> dict[str, Any]:
        """Return the current engine's status, what a second one has added, and `switching_to`."""
        current = self._current
        found = current.backend.status()
        for engine in self._all():
            if engine is not current:
                other = engine.backend.status()
                found["engine_pids"] = [*found["engine_pids"], *other["engine_pids"]]
                found["memory"] = (found["memory"] or 0) + (other["memory"] or 0)
                found["gpus"] = together(found.get("gpus", ()), other.get("gpus", ()))
        return {**found, "state": str(self.state), "switching_to": self._to}

    # -- engines ----------------------------------------------------------------------------------------
    @property
    def _name(self) -> str:
        return self.profile.name

    def _engine(self, profile: Profile) -> Engine:
        """Make an engine, in a run folder that none of the others has."""
        taken = {engine.instance for engine in self._all()}
        instance = self._instance and next(name for name in _folders(self._instance) if name not in taken)
        engine = Engine(profile, instance, self._make)
        engine.unsubscribe = engine.backend.subscribe(lambda event: self._hear(engine, event))
        with self._changed:
            self._engines.append(engine)
        return engine

    def _all(self) -> list[Engine]:
        with self._changed:
            return list(self._engines)

    def _forget(self, engine: Engine) -> None:
        """Let go of an engine, unless something of it is left that a later stop has to look after."""
        if engine.backend.state is State.STUCK:
            return
        engine.unsubscribe()
        with self._changed, contextlib.suppress(ValueError):
            self._engines.remove(engine)

    def _stop_all(self, grace: float | None) -> None:
        engines = self._all()
        faults: list[Exception] = []

        def stop(engine: Engine) -> None:
            try:
                engine.backend.stop(grace)
            except Exception as fault:  # raised below, when the others have ended too
                faults.append(fault)

        # no pool: an interpreter that is about to end lets none begin anything
        beside = [threading.Thread(target=stop, args=(engine,), name="stop") for engine in engines[1:]]
        for thread in beside:
            thread.start()
        for engine in engines[:1]:
            stop(engine)
        for thread in beside:
            thread.join()
        if faults:
            raise faults[0]

    # -- waiting ----------------------------------------------------------------------------------------
    def _passes(self, engine: Engine, deadline: float | None) -> bool:
        """Say whether an engine's failure passes, since another takes its place; waits for that."""

        def replaced() -> bool:
            return engine is not self._current or self._held or self._ending

        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: replaced() or self._to is None, left)
            return replaced()

    def _refuse_when_ending(self) -> None:
        if self._ending:
            raise self._ended()

    def _ended(self) -> StartCancelled:
        return StartCancelled(f"switch: {self._name}: is being stopped", profile=self._name)

    # -- events -----------------------------------------------------------------------------------------
    def _hides(self, state: State) -> bool:
        """Say whether a state of the current engine is nothing to tell, as another is on its way."""
        return not self._ending and (self._held or (self._to is not None and state not in ALIVE))

    def _hear(self, engine: Engine, event: Event) -> None:
        """Take an engine's event; called from its thread, with its lock held."""
        if event.name != "state":
            self._subscribers.tell(replace(event, state=self.state))
            return
        with self._changed:
            engine.heard, engine.told = event.state, dict(event.fields)
            self._changed.notify_all()
        if engine is not self._current:
            return
        if self._hides(event.state):
            self._show()
        else:
            self._shown = event.state
            self._subscribers.tell(event)

    def _show(self) -> None:
        """Tell the state if it is another one than was told last."""
        state, before = self.state, self._shown
        if state is not before:
            self._shown = state
            told = self._current.told if self._current.heard is state else {}
            self._subscribers.tell(
                Event(time.time(), self._name, "state", state, {**told, "before": str(before)})
            )

    def _tell(self, name: str, **fields: Any) -> None:
        log.info(name, profile=self._name, **fields)
        self._subscribers.tell(Event(time.time(), self._name, name, self.state, fields))


def _folders(instance: str) -> Iterator[str]:
    yield instance
    for number in itertools.count(2):
        yield f"{instance}~{number}"


def _installed(profile: Profile, instance: str | None) -> Backend:
    return discovery.find(profile.backend)(profile, instance=instance)
