"""Another engine behind the same name while clients stream: what they see, and what is left when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from backends.base import SubprocessBackend
from backends.llama_server import LlamaServer
from orchestrator.backend import Event, State
from orchestrator.errors import (
    BackendError,
    DoesNotFit,
    EngineReplaced,
    NotAModel,
    StartCancelled,
    StartTimeout,
    StreamInterrupted,
    SwitchFailed,
    SwitchRefused,
    UnknownBackend,
)
from orchestrator.model import TextModel
from orchestrator.profile import ModelSpec, Profile
from orchestrator.switching import Switchable
from orchestrator.switching_parts import Switched, fits_beside
from tests.backends.conftest import Recorder, alive, fake_profile, tiny_model  # noqa: F401 - fixtures

PATIENCE = 60.0  # a bound for hangs, never a measure
WAYS = pytest.mark.parametrize("beside", [True, False], ids=["beside", "after"])
SLOW = {"rate": 20.0}


class Other(LlamaServer):
    """A second engine that speaks like the first."""

    name: ClassVar[str] = "other"


def make(profile: Profile, instance: str | None) -> SubprocessBackend:
    """Do what the look-up by entry point does."""
    return {"llama-server": LlamaServer, "other": Other}[profile.backend](profile, instance=instance)


@dataclass
class Setup:
    """A switchable engine, a model on it, and what was heard of it."""

    engine: Switchable
    model: TextModel
    heard: Recorder
    pool: ThreadPoolExecutor
    profile: Callable[..., Profile]

    def switch(self, to: Any = "other", **how: Any) -> Future[Switched]:
        """Begin a switch in a thread of its own."""
        return self.pool.submit(self.engine.switch, to, **how)

    def loading(self, seconds: float) -> Profile:
        """Return the second engine's profile, with a start that takes its time."""
        return self.profile({"load_time": seconds}, backend="other", slots=8)

    def stream(self, tokens: int = 40) -> tuple[Any, Future[int]]:
        """Begin a stream, and return it once its first token is there, with its count to come."""
        generation = self.model.generate("hello", max_tokens=tokens, ignore_eos=True)
        next(generation)
        return generation, self.pool.submit(lambda: 1 + sum(1 for _ in generation))

    def pids(self) -> list[int]:
        found: list[int] = self.engine.status()["engine_pids"]
        return found

    def spawned(self, count: int) -> int:
        """Wait until so many engines were started in all, and return the last one's pid."""
        self.heard.wait(lambda _: len(self._spawned()) >= count)
        return self._spawned()[count - 1]

    def _spawned(self) -> list[int]:
        return [event.fields["pid"] for event in self.heard.events if event.name == "spawned"]

    def names(self) -> list[str]:
        """Return the names of the switches' own events."""
        own = {"switching", "switched", "switch_failed", "cut"}
        return [event.name for event in self.heard.events if event.name in own]


@pytest.fixture
def setup(fake_profile: Callable[..., Profile]) -> Iterator[Callable[..., Setup]]:  # noqa: F811
    made: list[Setup] = []

    def begin(knobs: dict[str, Any] | None = None, **keys: Any) -> Setup:
        engine = Switchable(fake_profile(knobs, **{"slots": 8, **keys}), instance="fake", make=make)
        pool = ThreadPoolExecutor(24)
        made.append(Setup(engine, TextModel(engine), Recorder(engine), pool, fake_profile))  # type: ignore[arg-type]
        engine.start()
        return made[-1]

    yield begin
    for each in made:
        each.engine.stop(0)
        each.pool.shutdown()
        assert alive(each._spawned()) == []


# -- what clients see -------------------------------------------------------------------------------
@WAYS
def test_a_stream_ends_on_the_old_engine_and_the_next_one_begins_on_the_new_good(
    setup: Callable[..., Setup], beside: bool
) -> None:
    this = setup(SLOW)
    (old,) = this.pids()
    _, count = this.stream()
    done = this.switch(beside=beside).result(PATIENCE)
    assert count.result(PATIENCE) == 40
    assert (done.before, done.backend, done.beside, done.cut) == ("llama-server", "other", beside, 0)
    assert this.engine.profile.backend == this.engine.status()["backend"] == "other"
    assert not alive([old])
    assert this.stream(3)[1].result(PATIENCE) == 3
    assert this.names() == ["switching", "switched"]


def test_beside_means_that_nobody_waits_good(setup: Callable[..., Setup]) -> None:
    this = setup()
    switch = this.switch(this.loading(60.0), beside=True)
    this.spawned(2)
    assert this.engine.state is State.READY
    assert this.stream(3)[1].result(PATIENCE) == 3  # by the old one
    this.engine.stop(0)
    with pytest.raises(SwitchFailed):
        switch.result(PATIENCE)


def test_one_after_the_other_means_that_both_never_run_and_requests_wait_good(
    setup: Callable[..., Setup],
) -> None:
    this = setup(SLOW)
    (old,) = this.pids()
    overlaps: list[int] = []
    this.engine.subscribe(lambda event: overlaps.extend(alive([old])) if event.name == "spawned" else None)
    _, first = this.stream(40)
    switch = this.switch(beside=False)
    this.heard.wait_state(State.STARTING, 2)
    second = this.pool.submit(lambda: this.model.generate("hello", max_tokens=3, ignore_eos=True).text())
    with pytest.raises(StartTimeout):
        this.engine.endpoint(0)
    switch.result(PATIENCE)
    assert first.result(PATIENCE) == 40
    assert second.result(PATIENCE)
    assert overlaps == []
    assert this.heard.states()[-2:] == [State.STARTING, State.READY]


def test_another_profile_is_served_under_the_same_name_good(setup: Callable[..., Setup]) -> None:
    this = setup()
    this.model.switch(this.profile(name="else", slots=3), beside=True)
    assert this.model.slots == 3
    assert this.engine.profile.name == this.engine.endpoint(0).model == "fake"


def test_eight_clients_lose_nothing_in_ten_switches_ugly(setup: Callable[..., Setup]) -> None:
    this = setup({"rate": 150.0})
    over = threading.Event()

    def client() -> int:
        served = 0
        while not over.is_set():
            tokens = list(this.model.generate("hello", max_tokens=15, ignore_eos=True))
            assert len(tokens) == 15
            served += 1
        return served

    clients = [this.pool.submit(client) for _ in range(8)]
    try:
        for number in range(10):
            to = "llama-server" if number % 2 else "other"
            done = this.engine.switch(to, beside=number % 4 < 2)
            assert (done.backend, done.cut) == (to, 0)
    finally:
        over.set()
    assert all(each.result(PATIENCE) >= 5 for each in clients)
    assert this.engine.status()["in_flight"] == 0


@WAYS
def test_drain_time_bounds_the_wait_and_what_is_cut_says_so_bad(
    setup: Callable[..., Setup], beside: bool
) -> None:
    this = setup(SLOW)
    generation, count = this.stream(100_000)
    done = this.switch(beside=beside, drain_s=0.2).result(PATIENCE)
    assert done.cut == 1
    with pytest.raises(StreamInterrupted):
        count.result(PATIENCE)
    assert generation.partial
    assert "cut" in this.names()
    assert this.stream(3)[1].result(PATIENCE) == 3


def test_a_request_that_comes_too_late_for_the_old_engine_is_sent_on_ugly(
    setup: Callable[..., Setup],
) -> None:
    this = setup()
    before = this.engine.endpoint(0)
    with this.engine.request(before):
        switch = this.switch(beside=True, drain_s=PATIENCE)
        this.heard.wait(lambda event: event.name == "switched")
        with this.engine.request(before):  # while it drains it still takes what was meant for it
            pass
        assert not switch.done()
    switch.result(PATIENCE)
    with pytest.raises(EngineReplaced), this.engine.request(before):
        pass


@WAYS
def test_no_request_slips_in_once_the_old_engine_is_about_to_be_stopped_ugly(
    setup: Callable[..., Setup], beside: bool
) -> None:
    this = setup()
    before = this.engine.endpoint(0)
    said: list[str] = []

    def late(event: Event) -> None:
        if event.name == "cut":  # told between the last count and the stop
            try:
                with this.engine.request(before):
                    said.append("taken")
            except EngineReplaced:
                said.append("replaced")

    this.engine.subscribe(late)
    with this.engine.request(before):
        assert this.switch(beside=beside, drain_s=0.1).result(PATIENCE).cut == 1
    assert said == ["replaced"]


# -- when it fails ----------------------------------------------------------------------------------
@WAYS
def test_when_the_new_engine_does_not_start_the_old_one_is_back_and_says_why_bad(
    setup: Callable[..., Setup], beside: bool
) -> None:
    wrong = {"say": ["error: no such thing"], "exit_after": 0.0, "exit_code": 3}
    this = setup({"launches": [{}, wrong]})
    (old,) = this.pids()
    with pytest.raises(SwitchFailed, match=r"to other: .*exit code 3; llama-server serves on") as caught:
        this.engine.switch("other", beside=beside)
    assert caught.value.back
    assert (alive([old]) == [old]) is beside
    assert this.engine.state is State.READY
    assert this.engine.profile.backend == "llama-server"
    assert this.stream(3)[1].result(PATIENCE) == 3
    assert this.names() == ["switching", "switch_failed"]
    assert State.FAILED not in this.heard.states()
    # and it is no reason against another try
    assert this.engine.switch("other", beside=beside).backend == "other"


def test_what_cannot_be_planned_touches_nothing_bad(setup: Callable[..., Setup]) -> None:
    this = setup()
    heard = len(this.heard.events)
    with pytest.raises(NotAModel):
        this.engine.switch(this.profile(model=ModelSpec(gguf="/nowhere.gguf")), beside=False)
    assert len(this.heard.events) == heard
    assert this.engine.state is State.READY


def test_an_unknown_backend_touches_nothing_bad(fake_profile: Callable[..., Profile]) -> None:  # noqa: F811
    engine = Switchable(fake_profile())
    engine.start()
    try:
        with pytest.raises(UnknownBackend, match="did you mean llama-server"):
            engine.switch("lama-server")
        assert engine.state is State.READY
    finally:
        engine.stop(0)


@WAYS
def test_crash_of_the_new_engine_while_it_loads_ends_the_switch_ugly(
    setup: Callable[..., Setup], beside: bool
) -> None:
    this = setup()
    switch = this.switch(this.loading(60.0), beside=beside)
    os.kill(this.spawned(2), signal.SIGKILL)
    with pytest.raises(SwitchFailed, match="SIGKILL"):
        switch.result(PATIENCE)
    assert this.stream(3)[1].result(PATIENCE) == 3


def test_crash_of_the_old_engine_while_the_new_one_loads_ugly(setup: Callable[..., Setup]) -> None:
    this = setup()
    (old,) = this.pids()
    switch = this.switch(this.loading(2.0), beside=True)
    this.spawned(2)
    os.kill(old, signal.SIGKILL)
    assert this.stream(3)[1].result(PATIENCE) == 3  # by whichever is there first
    assert switch.result(PATIENCE).backend == "other"
    assert this.engine.state is State.READY


def test_an_old_engine_that_is_given_up_meanwhile_is_not_missed_ugly(setup: Callable[..., Setup]) -> None:
    this = setup(
        restart={"attempts": 0, "window": 300, "backoff": (0.05, 0.1)},
    )
    (old,) = this.pids()
    switch = this.switch(this.loading(2.0), beside=True)
    this.spawned(2)
    os.kill(old, signal.SIGKILL)
    assert this.stream(3)[1].result(PATIENCE) == 3
    assert switch.result(PATIENCE).backend == "other"
    assert State.FAILED not in this.heard.states()


def test_a_failed_engine_can_be_replaced_good(setup: Callable[..., Setup]) -> None:
    this = setup({}, restart={"attempts": 0, "window": 300, "backoff": (0.05, 0.1)})
    os.kill(this.pids()[0], signal.SIGKILL)
    this.heard.wait_state(State.FAILED)
    with pytest.raises(BackendError):
        this.engine.endpoint(PATIENCE)
    assert this.engine.switch("other").backend == "other"
    assert this.stream(3)[1].result(PATIENCE) == 3


@WAYS
def test_an_engine_that_is_about_to_be_restarted_can_be_replaced_good(
    setup: Callable[..., Setup], beside: bool
) -> None:
    this = setup({}, restart={"attempts": 5, "window": 300, "backoff": (30.0, 60.0)})
    os.kill(this.pids()[0], signal.SIGKILL)
    this.heard.wait_state(State.RESTARTING)
    waiting = this.pool.submit(lambda: this.model.generate("hello", max_tokens=3, ignore_eos=True).text())
    assert this.engine.switch("other", beside=beside).backend == "other"
    assert waiting.result(PATIENCE)
    assert this.engine.state is State.READY
    assert this.engine.status()["restarts"] == 0


# -- one at a time, and the end ---------------------------------------------------------------------
def test_a_second_switch_at_the_same_time_is_refused_bad(setup: Callable[..., Setup]) -> None:
    this = setup()
    switch = this.switch(this.loading(60.0), beside=True)
    this.spawned(2)
    assert this.engine.status()["switching_to"] == "other"
    with pytest.raises(SwitchRefused, match="a switch to other is under way"):
        this.engine.switch("llama-server")
    this.engine.stop(0)
    with pytest.raises(SwitchFailed):
        switch.result(PATIENCE)


@WAYS
def test_a_stop_calls_a_switch_off_and_leaves_nothing_ugly(setup: Callable[..., Setup], beside: bool) -> None:
    this = setup()
    switch = this.switch(this.loading(60.0), beside=beside)
    this.spawned(2)
    this.engine.stop(0)
    assert alive(this._spawned()) == []
    assert this.engine.state is State.STOPPED
    with pytest.raises(SwitchFailed, match="is being stopped"):
        switch.result(PATIENCE)
    with pytest.raises(SwitchRefused, match="is stopped"):
        this.engine.switch("other")
    assert this.engine.start()


def test_a_stop_does_not_wait_for_the_drain_ugly(setup: Callable[..., Setup]) -> None:
    this = setup(SLOW)
    _, count = this.stream(100_000)
    switch = this.switch(beside=False, drain_s=3600)
    this.heard.wait_state(State.STARTING, 2)
    this.engine.stop(0)
    with pytest.raises(SwitchFailed):
        switch.result(PATIENCE)
    with pytest.raises(StreamInterrupted):
        count.result(PATIENCE)


def test_a_stop_calls_off_what_is_made_for_a_switch_ugly(
    setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    this = setup()
    begun, made = threading.Event(), threading.Event()

    class Form:
        remote, doing, size = False, "converting", 1

        def fetch(self, progress: Callable[[int, int], None] | None = None) -> None:
            begun.set()
            this.heard.wait_state(State.STOPPING)
            if progress is not None:
                progress(0, 1)
            made.set()

    planned = Other.plan
    monkeypatch.setattr(Other, "plan", lambda engine: replace(planned(engine), downloads=(Form(),)))
    switch = this.switch()
    assert begun.wait(PATIENCE)
    this.engine.stop(0)
    with pytest.raises(StartCancelled, match="is being stopped"):
        switch.result(PATIENCE)
    assert not made.is_set()
    assert this.names() == []
    assert this.engine.start()


def test_whoever_waits_is_told_when_it_is_stopped_bad(setup: Callable[..., Setup]) -> None:
    this = setup()
    switch = this.switch(this.loading(60.0), beside=False)
    this.spawned(2)
    waiting = this.pool.submit(this.engine.endpoint, PATIENCE)
    this.engine.stop(0)
    with pytest.raises(BackendError, match="stopp"):
        waiting.result(PATIENCE)
    with pytest.raises(SwitchFailed):
        switch.result(PATIENCE)


def test_a_server_of_someone_else_is_not_ours_to_switch_bad() -> None:
    from orchestrator.backend import Dialect, Endpoint
    from orchestrator.source import Server

    model = TextModel(Server(Endpoint("http://127.0.0.1:1", None, "m", Dialect("x", {}))))
    with pytest.raises(SwitchRefused, match="not ours"):
        model.switch("other")


# -- whether both fit -------------------------------------------------------------------------------
def planned(answer: str | None, gpus: int, **keys: Any) -> Any:
    memory = answer and SimpleNamespace(verdict=SimpleNamespace(answer=answer))
    profile = SimpleNamespace(**{"context": 4096, "gpu_layers": "all", **keys})
    device = SimpleNamespace(gpus=("gpu",) * gpus)
    plan = SimpleNamespace(profile=profile, memory=memory, device=device, downloads=(), conversions=())
    return SimpleNamespace(plan=lambda: plan)


@pytest.mark.parametrize(
    ("answer", "gpus", "keys", "beside"),
    [
        ("fits", 0, {}, True),
        ("fits", 1, {}, True),
        ("tight", 1, {}, False),
        ("no", 0, {}, False),
        ("unknown", 1, {}, False),
        (None, 1, {}, False),
        (None, 0, {}, True),
        ("fits", 1, {"context": "auto"}, False),
        ("fits", 1, {"gpu_layers": "auto"}, False),
        ("fits", 0, {"gpu_layers": "auto"}, True),
    ],
)
def test_both_run_only_when_that_is_known_to_fit_good(
    answer: str | None, gpus: int, keys: dict[str, Any], beside: bool
) -> None:
    assert fits_beside(planned(answer, gpus, **keys)) is beside


def test_what_fits_only_alone_is_started_alone_good() -> None:
    def plan() -> None:
        raise DoesNotFit("no room")

    assert not fits_beside(SimpleNamespace(plan=plan))  # type: ignore[arg-type]


# -- the real engine --------------------------------------------------------------------------------
@pytest.mark.real
def test_the_real_engine_is_switched_under_four_streams_good(
    gemma_gguf: Path, llama_server_binary: Path
) -> None:
    def profile(**keys: Any) -> Profile:
        model = ModelSpec(gguf=str(gemma_gguf))
        command = (str(llama_server_binary),)
        fixed = {"name": "gemma", "model": model, "backend": "llama-server", "device": "cpu"}
        return Profile(**{**fixed, "command": command, "context": 512, "slots": 4, **keys})

    engine = Switchable(profile(), instance="gemma")
    model = TextModel(engine)
    over = threading.Event()

    def client(number: int) -> set[str]:
        texts = set()
        while not over.is_set():
            with model.generate(f"The number {number} is", max_tokens=24, temperature=0) as answer:
                texts.add(answer.text())
                assert answer.usage is not None
                assert answer.usage.completion_tokens <= 24
        return texts

    engine.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, number) for number in range(4)]
            try:
                for keys, beside in (({"context": 1024}, True), ({"slots": 5}, False), ({}, None)):
                    done = model.switch(profile(**keys), beside=beside)
                    assert done.cut == 0
            finally:
                over.set()
            assert all(each.result(PATIENCE) for each in clients)
        assert model.info.context == 512
    finally:
        engine.stop(0)


AT_THE_END = """
import atexit
from types import SimpleNamespace
from orchestrator.switching_served import Served

class Engine:
    state = "ready"

    def __init__(self, profile, instance):
        self.profile = profile

    def subscribe(self, callback):
        return lambda: None

    def stop(self, grace):
        print("stopped")
        raise RuntimeError("of an engine")

served = Served(SimpleNamespace(name="p"), make=Engine)
served._engine(served.profile)  # as during a switch
atexit.register(served._stop_all, 0)
"""


def test_engines_of_a_switch_are_stopped_though_python_ends_ugly() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True)
    assert done.stdout.count("stopped") == 2
    assert "of an engine" in done.stderr
