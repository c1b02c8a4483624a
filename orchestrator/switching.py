"""`Switchable`: one name, one address, and whichever engine stands behind it now.

A switch, beside (both engines fit):

    plan the new one -> start it -> it gets all new requests -> the old one finishes its own -> stop that

and one after the other:

    plan the new one -> new requests wait -> the old one finishes its own -> stop it -> start the new one

Who changes which engine runs holds `_turn`; a second one is refused, nobody queues for it. Every wait has a
deadline. What requests meet meanwhile is in `switching_served`.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backend import ALIVE, Endpoint, State
from orchestrator.errors import (
    BackendError,
    OrchestratorError,
    StartTimeout,
    StopFailed,
    SwitchFailed,
    SwitchRefused,
)
from orchestrator.switching_parts import DRAIN_S, Engine, Switched, fits_beside
from orchestrator.switching_served import Served

if TYPE_CHECKING:
    from orchestrator.profile import Profile

UNENDING = 24 * 3600.0  # seconds for a start whose profile sets no limit
TAIL_LINES = 20
TAIL_BYTES = 1 << 14
MARGIN = 30.0  # seconds beyond an engine's own limits, which come first unless it hangs in them


class Switchable(Served):
    """A backend that becomes another one while it serves; see `orchestrator.backend.Backend`."""

    def start(self, *, timeout: float | None = None) -> Endpoint:
        """Start if need be and wait until ready; see `Backend.start`."""
        if self._turn.acquire(blocking=False):  # else a switch is under way, and brings one up
            try:
                with contextlib.suppress(StartTimeout):
                    self._current.backend.start(timeout=0)
            finally:
                self._turn.release()
        return self.endpoint(timeout)

    def stop(self, grace: float | None = None) -> None:
        """Stop every engine of the name, and call a switch off; see `Backend.stop`."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if not self._turn.acquire(blocking=False):
            # a switch or a start sees that and ends; what it has begun by then is stopped below
            with contextlib.suppress(StopFailed):
                self._stop_all(grace)
            patience = max(engine.backend.profile.timeouts.stop for engine in self._all()) + 2 * MARGIN
            if not self._turn.acquire(timeout=patience):
                raise StopFailed(f"switch: {self._name}: a switch goes on", survivors=(), profile=self._name)
        try:
            self._stop_all(grace)
            for engine in self._all():
                if engine is not self._current:
                    self._forget(engine)
        finally:
            self._ending = False
            self._turn.release()

    # -- switching --------------------------------------------------------------------------------------
    def switch(self, to: str | Profile, *, drain_s: float = DRAIN_S, beside: bool | None = None) -> Switched:
        """Put another engine in the place of the one that serves; returns when the old one is gone.

        Args:
            to: a backend for the same profile, or another profile, which is served under the same name.
            drain_s: seconds for answers under way on the old engine; then they end with an error.
            beside: whether both run for a while; default: when the new one fits beside the old one.

        Raises:
            SwitchRefused: there is nothing to be switched, or a switch or a start is under way.
            ProfileError, ModelError, UnknownBackend, BinaryMissing, DeviceMissing: the new one can't be
                planned. After these, `SwitchRefused` and `StartCancelled` nothing was touched.
            StartCancelled: it was stopped while another form of the model was made for the new one.
            SwitchFailed: the new engine did not come up; says why, and whether the old one serves.
            StopFailed: something of the old engine is left; the new one serves.

        """
        if not self._turn.acquire(blocking=False):
            what = f"a switch to {self._to}" if self._to else "a switch, a start or a stop"
            raise SwitchRefused(
                f"switch: {self._name}: {what} is under way",
                profile=self._name,
                advice="ask again when it is over",
            )
        began = time.monotonic()
        new: Engine | None = None
        try:
            old = self._current
            if self._ending or old.backend.state not in {*ALIVE, State.FAILED}:
                raise SwitchRefused(
                    f"switch: {self._name}: is {self.state}", profile=self._name, advice="start it first"
                )
            wanted = self.profile.model_copy(update={"backend": to}) if isinstance(to, str) else to
            new = self._engine(wanted.model_copy(update={"name": self._name}))
            fits = fits_beside(new.backend, lambda *_: self._refuse_when_ending())
            return self._carry_out(old, new, drain_s, fits if beside is None else beside, began)
        finally:
            self._to = None
            if new is not None and new is not self._current:
                self._forget(new)
            self._turn.release()

    def _carry_out(self, old: Engine, new: Engine, drain_s: float, beside: bool, began: float) -> Switched:
        before, after = old.backend.profile.backend, new.backend.profile.backend
        served = old.backend.state in ALIVE
        beside = beside or not served  # a failed one is not in the way
        cut = 0
        self._to = after
        self._tell("switching", before=before, to=after, beside=beside)
        try:
            if not beside:
                self._hold()
                cut = self._retire(old, drain_s)
            self._bring_up(new)
            self._swap(new)
        except BaseException as error:
            fault = self._put_back(old, new, error, served=served)
            self._tell("switch_failed", before=before, to=after, error=str(fault), back=fault.back)
            if not isinstance(error, OrchestratorError):
                raise  # an interruption, or a fault of ours
            raise fault from error
        ready_s = time.monotonic() - began
        self._tell("switched", before=before, to=after, ready_s=round(ready_s, 3))
        self._show()
        if beside:
            try:
                cut = self._retire(old, drain_s)
            except KeyboardInterrupt:
                old.backend.stop(0)
                raise
        self._forget(old)
        return Switched(
            self._name, before, after, beside, round(ready_s, 3), round(time.monotonic() - began, 3), cut
        )

    def _hold(self) -> None:
        with self._changed:
            self._held = True
        self._show()

    def _retire(self, old: Engine, drain_s: float) -> int:
        """Let the engine finish what it has, at most `drain_s` seconds, and stop it; returns what was cut."""
        with self._changed:
            self._changed.wait_for(lambda: not old.in_flight or self._ending, drain_s)
            old.open = False  # decided together with the count: no request slips in between
            cut, at = old.in_flight, old.handed
        if cut and at is not None:
            self._tell("cut", url=at.url, requests=cut, after_s=drain_s)
        old.backend.stop()
        return cut

    def _bring_up(self, engine: Engine, *, restarts: bool = False) -> None:
        """Start an engine and wait until it is ready; a crash while it loads ends that unless `restarts`."""
        timeouts = engine.backend.profile.timeouts
        limit = (timeouts.start or UNENDING) + MARGIN
        passing = {State.STARTING, State.RESTARTING} if restarts else {State.STARTING}
        self._refuse_when_ending()
        with contextlib.suppress(StartTimeout):
            engine.backend.start(timeout=0)
        with self._changed:
            self._changed.wait_for(lambda: self._ending or engine.heard not in passing, limit)
            heard, told = engine.heard, engine.told
        self._refuse_when_ending()
        if heard is State.RESTARTING:
            title = f"{engine.backend.profile.backend}: {self._name}"
            raise BackendError(
                str(told.get("reason") or f"{title}: ended before it was ready"),
                profile=self._name,
                log_tail=_last_lines(engine.backend.status().get("log")),
                advice=told.get("advice") or f"see `orchestrator logs {self._name}`",
            )
        engine.backend.endpoint(0)

    def _swap(self, new: Engine) -> None:
        with self._changed:
            if not self._ending:
                self._current, self._held, self._to = new, False, None
                self._changed.notify_all()
        self._refuse_when_ending()

    def _put_back(self, old: Engine, new: Engine, error: BaseException, *, served: bool) -> SwitchFailed:
        """Return to the old engine; returns what to say about it all."""
        name, after, before = self._name, new.backend.profile.backend, old.backend.profile.backend
        what = [f"switch: {name}: to {after}: {error or type(error).__name__}"]
        try:
            new.backend.stop()
            self._refuse_when_ending()
            with self._changed:
                old.open = True
            if served and old.backend.state is State.STOPPED:
                self._bring_up(old, restarts=True)
        except OrchestratorError as further:
            what.append(str(further))
        finally:
            with self._changed:
                self._held, self._to = False, None
                self._changed.notify_all()
            self._show()
        back = old.backend.state in ALIVE
        what.append(f"{before} {'serves on' if back else 'is ' + str(old.backend.state)}")
        fault = SwitchFailed(
            "; ".join(what),
            profile=name,
            log_tail=getattr(error, "log_tail", ()),
            advice=getattr(error, "advice", None),
        )
        fault.back = back
        return fault


def _last_lines(log: str | None) -> list[str]:
    """Return what an engine wrote last; it has just ended, so that is about its end."""
    if log is None:
        return []
    with contextlib.suppress(OSError), Path(log).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    return []
