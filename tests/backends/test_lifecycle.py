"""What those who listen to a backend and wait for it are promised, without any engine."""

from __future__ import annotations

import contextlib
import threading

import pytest

from backends.lifecycle import Lifecycle
from orchestrator.backend import Endpoint, Event, State
from orchestrator.errors import StartCancelled, StartTimeout
from orchestrator.profile import ModelSpec, Profile


@pytest.fixture
def life() -> Lifecycle:
    return Lifecycle(Profile(name="one", model=ModelSpec(gguf="/nowhere.gguf"), backend="x"), "x")


def tell(life: Lifecycle, number: int) -> None:
    with life.changed:
        life.tell("stage", line=str(number))


def test_a_listener_that_has_left_is_told_no_more_good(life: Lifecycle) -> None:
    heard: list[Event] = []
    unsubscribe = life.subscribers.add(heard.append)
    tell(life, 1)
    unsubscribe()
    unsubscribe()
    tell(life, 2)
    assert [event.fields["line"] for event in heard] == ["1"]


def test_a_subscriber_that_fails_harms_nobody_ugly(life: Lifecycle) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("mine")

    life.subscribers.add(broken)
    life.subscribers.add(heard.append)
    with life.changed:
        life.become(State.STARTING)
    assert [event.state for event in heard] == [State.STARTING]
    assert life.state is State.STARTING


def test_an_endpoint_is_there_exactly_while_ready_good(life: Lifecycle) -> None:
    endpoint = Endpoint("http://127.0.0.1:1", None, "one", dialect="openai")
    with life.changed:
        life.become(State.STARTING)
        life.current = endpoint
        life.become(State.READY)
    assert life.wait_ready(0) is endpoint
    with life.changed:
        life.become(State.RESTARTING)
    with pytest.raises(StartTimeout, match="still restarting"):
        life.wait_ready(0)
    with life.changed:
        life.become(State.READY)  # and not the old one again
    assert life.current is None
    with life.changed:
        life.become(State.STOPPED)
    with pytest.raises(StartCancelled, match="is stopped"):
        life.wait_ready(None)


def test_who_waits_is_woken_by_every_change_good(life: Lifecycle) -> None:
    with life.changed:
        life.become(State.STARTING)
    woken: list[BaseException] = []

    def wait() -> None:
        try:
            life.wait_ready(None)
        except StartCancelled as fault:
            woken.append(fault)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    with life.changed:
        life.become(State.STOPPED)
    for thread in threads:
        thread.join(30)
    assert len(woken) == 3


def test_requests_in_flight_are_counted_whatever_ends_them_good(life: Lifecycle) -> None:
    with life.request():
        with contextlib.suppress(KeyError), life.request():
            assert life.in_flight == 2
            raise KeyError
        assert life.in_flight == 1
    assert life.in_flight == 0
