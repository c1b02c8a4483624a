"""Random wishes and random failures against a real backend: what must never happen, whatever the order.

    LIFECYCLE_EXAMPLES=300 pytest tests/backends/test_lifecycle_model.py     # other sequences each time

Without the variable a few short sequences run, the same ones each time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import orchestrator.backend
from backends.llama_server import LlamaServer
from backends.process import owns_port
from orchestrator.backend import Event, State
from orchestrator.errors import OrchestratorError, StopFailed
from orchestrator.leftovers import strays
from orchestrator.profile import ModelSpec, Profile
from tests import gguf_files
from tests.backends.conftest import ENGINE

EXAMPLES = int(os.environ.get("LIFECYCLE_EXAMPLES", "0"))
BOUND = 60.0  # seconds after which a call counts as hanging; never a measure
GRACE = 0.3

# what an engine may be like, from launch to launch
LAUNCHES: list[dict[str, Any]] = [
    {},
    {"load_time": 0.3},
    {"exit_after": 0.0, "exit_code": 3},
    {"exit_after": 0.05, "exit_from": "ready", "exit_code": 0},
    {"exit_after": 0.1, "exit_from": "ready", "exit_code": -11},
    {"ignore_term": True, "children": ["session+stubborn"]},
    {"children": ["double+session", "plain"], "stop_time": 0.1},
    {"load_time": 0.5, "load_refuse": True, "children": ["stubborn"]},
    {"model_id": "somebody-else"},
    {"say": ["error: invalid argument: --frob"], "exit_after": 0.0, "exit_code": 1},
    {"health": "hang"},
]


def table() -> dict[State, set[State]]:
    """Read the table of transitions from the documentation that everybody reads."""
    found: dict[State, set[State]] = {}
    text = re.sub(r"\n {16,}", " ", orchestrator.backend.__doc__ or "")
    for name, leads_to in re.findall(r"^    (\w+) .*-> (.*)$", text, re.MULTILINE):
        found[State(name)] = {State(word.strip()) for word in leads_to.split(",")}
    return found


def test_the_table_is_read_whole_good() -> None:
    assert set(table()) == set(State)
    assert table()[State.READY] == {State.RESTARTING, State.STOPPING}
    assert table()[State.STARTING] == {State.READY, State.STOPPING, State.RESTARTING, State.FAILED}


class Lifecycle(RuleBasedStateMachine):
    """One backend, its real children, and everything that was seen of them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="lifecycle-"))
        self.mark = f"LIFECYCLE_MARK={self.folder.name}"
        self.table = table()
        self.wrong: list[str] = []
        self.calls: list[threading.Thread] = []
        self.sockets: list[socket.socket] = []
        self.leader = 0

    @initialize(
        launches=st.lists(st.sampled_from(LAUNCHES), max_size=5),
        port_taken=st.integers(0, 2),
        attempts=st.sampled_from([0, 2, 20]),
    )
    def make(self, launches: list[dict[str, Any]], port_taken: int, attempts: int) -> None:
        knobs = {"state": str(self.folder / "launches"), "launches": launches, "port_taken": port_taken}
        name, _, value = self.mark.partition("=")
        self.backend = LlamaServer(
            Profile(
                name="fake",
                model=ModelSpec(gguf=str(gguf_files.tiny_llama(self.folder / "tiny.gguf"))),
                backend="llama-server",
                command=(sys.executable, "-S", str(ENGINE)),
                device="cpu",
                env={"FAKE_ENGINE": json.dumps(knobs), name: value},
                timeouts={"start": 3, "stop": GRACE, "stall": 30},
                restart={"attempts": attempts, "window": 300, "backoff": (0.01, 0.1)},
                directory=self.folder,
            ),
            environ={**os.environ, "ORCHESTRATOR_HOME": str(self.folder / "home")},
        )
        self.backend.subscribe(self.hear)

    # -- what is seen of it ------------------------------------------------------------------------
    def launches_alive(self) -> dict[str, list[int]]:
        """Return the living processes by the launch that they descend from."""
        found: dict[str, list[int]] = {}
        for pid in strays(0, self.mark, {}):
            try:
                cookie = psutil.Process(pid).environ().get("ORCHESTRATOR_LAUNCH", "")
            except psutil.Error:
                continue
            found.setdefault(cookie, []).append(pid)
        return found

    def hear(self, event: Event) -> None:
        """Check what has to be true at the moment of an event; the backend can't move meanwhile."""
        if event.name == "spawned":
            self.leader = event.fields["pid"]
            if len(alive := self.launches_alive()) > 1:
                self.wrong.append(f"two engines at once: {alive}")
        if event.name != "state":
            return
        before = State(event.fields["before"])
        if event.state not in self.table[before]:
            self.wrong.append(f"{before} led to {event.state}")
        over = event.state in (State.STOPPED, State.FAILED) or before is State.RESTARTING
        if over and (alive := self.launches_alive()):
            self.wrong.append(f"{before} led to {event.state} with survivors: {alive}")

    @invariant()
    def nothing_wrong_was_seen(self) -> None:
        if self.wrong:
            sys.stderr.write("\n".join(self.wrong))  # told even when hypothesis can't make it happen again
        assert not self.wrong, self.wrong

    @invariant()
    def ready_has_a_living_owner_of_the_port(self) -> None:
        if not hasattr(self, "backend"):
            return
        deadline = time.monotonic() + BOUND
        while True:  # a death needs a moment to be heard of
            status = self.backend.status()
            if status["state"] != "ready" or not status["url"]:
                return
            if owns_port(status["engine_pids"], int(status["url"].rpartition(":")[2])):
                return
            assert time.monotonic() < deadline, f"ready, and nobody owns the port: {status}"

    # -- wishes ------------------------------------------------------------------------------------
    def bounded(self, what: Callable[[], object], *, background: bool = False) -> None:
        """Call from a thread of its own: whatever it returns or raises of ours is fine, hanging is not."""

        def run() -> None:
            try:
                what()
            except StopFailed as error:
                self.wrong.append(f"something resisted: {error}")
            except OrchestratorError:
                pass
            except BaseException as error:
                self.wrong.append("".join(traceback.format_exception(error)))

        thread = threading.Thread(target=run)
        thread.start()
        self.calls.append(thread)
        if not background:
            self.join()

    def join(self) -> None:
        for thread in self.calls:
            thread.join(BOUND)
            assert not thread.is_alive(), "a call hangs"
        self.calls.clear()

    @rule(timeout=st.sampled_from([0.0, 0.1, 10.0]), background=st.booleans())
    def start(self, timeout: float, background: bool) -> None:
        self.bounded(lambda: self.backend.start(timeout=timeout), background=background)

    @rule(background=st.booleans())
    def start_without_limit(self, background: bool) -> None:
        self.bounded(self.backend.start, background=background)

    @rule(grace=st.sampled_from([None, 0.0]), background=st.booleans())
    def stop(self, grace: float | None, background: bool) -> None:
        self.bounded(lambda: self.backend.stop(grace), background=background)

    @rule(pause=st.sampled_from([0.01, 0.1, 0.4]))
    def let_time_pass(self, pause: float) -> None:
        time.sleep(pause)

    @rule()
    def wait_for_all_calls(self) -> None:
        self.join()

    # -- failures ----------------------------------------------------------------------------------
    def pids(self) -> list[int]:
        return sorted(self.backend.status()["engine_pids"])

    def kill(self, pid: int, number: int) -> None:
        if pid:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

    @rule(number=st.sampled_from([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGABRT]))
    def kill_leader(self, number: int) -> None:
        if self.leader in self.pids():
            self.kill(self.leader, number)

    @rule()
    def kill_guardian(self) -> None:
        for child in psutil.Process().children():
            try:
                if any("guardian.py" in word for word in child.cmdline()):
                    child.kill()
            except psutil.NoSuchProcess:
                continue

    @rule()
    def kill_guardian_and_leader(self) -> None:
        self.kill_leader(signal.SIGKILL)
        self.kill_guardian()

    @rule(index=st.integers(0, 4))
    def kill_one_of_the_tree(self, index: int) -> None:
        if pids := self.pids():
            self.kill(pids[index % len(pids)], signal.SIGKILL)

    @rule()
    def take_its_port_when_it_dies(self) -> None:
        url = self.backend.status()["url"]
        if url:
            self.kill_leader(signal.SIGKILL)
            thief = socket.socket()
            self.sockets.append(thief)
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                thief.bind(("127.0.0.1", int(url.rpartition(":")[2])))
                thief.listen()
            except OSError:
                return

    @rule(
        order=st.sampled_from(
            [
                {"exit": 0},
                {"child": "session+stubborn"},
                {"child": "double+session+stubborn"},
                {"child": "port"},
                {"set": {"ignore_term": True, "stuck": True}},
                {"freeze": True},
            ]
        )
    )
    def tell_the_engine(self, order: dict[str, Any]) -> None:
        url = self.backend.status()["url"]
        if url:
            try:
                httpx.post(url + "/fake/do", json=order, timeout=1, trust_env=False)
            except httpx.HTTPError:
                return

    # -- the end -----------------------------------------------------------------------------------
    def teardown(self) -> None:
        try:
            if not hasattr(self, "backend"):
                return
            self.bounded(lambda: self.backend.stop(0))
            self.bounded(lambda: self.backend.stop(0))  # a start may have come in between
            self.nothing_wrong_was_seen()
            assert self.backend.state is State.STOPPED, self.backend.status()
            assert not self.launches_alive()
            assert not psutil.Process().children(recursive=True)
            assert not list((self.folder / "home" / "run").glob("*")), "a stopped run leaves no file"
        finally:
            for thief in self.sockets:
                thief.close()
            for pid in strays(0, self.mark, {}):
                self.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    max_examples=EXAMPLES or 20,
    stateful_step_count=10 if not EXAMPLES else 20,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # real time passes: shrinking takes minutes and seldom helps
)
