"""What a machine crash leaves behind, and its end: real processes, real records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.llama_server import LlamaServer
from orchestrator import leftovers
from orchestrator.errors import StartError
from orchestrator.home import RunFolder
from orchestrator.leftovers import boot_id, start_time, strays, sweep
from orchestrator.profile import Profile
from tests.backends.conftest import alive, wait_gone

COOKIE = "ORCHESTRATOR_LAUNCH=0123456789abcdef"

# An owner that starts a backend and tells whom it has; {"name": ...} gives the run folder a lasting name.
OWNER = """
import json, sys, time
from backends.llama_server import LlamaServer
from orchestrator.profile import Profile
backend = LlamaServer(Profile.model_validate_json(sys.argv[1]), instance=sys.argv[2] or None)
backend.start(timeout=60)
child = backend.life.child
print(json.dumps({"engine": backend.status()["engine_pids"], "guardian": child.guardian_pid}), flush=True)
time.sleep(600)
"""


@pytest.fixture
def owned(fake_profile: Callable[..., Profile]) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Any]]]:
    """Start owners; each is killed in the end, and its guardian ends what it had."""
    owners: list[subprocess.Popen[str]] = []

    def start(instance: str = "", **knobs: Any) -> tuple[subprocess.Popen[str], Any]:
        profile = fake_profile(knobs, timeouts={"start": 30, "stop": 0.3, "stall": 30})
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, profile.model_dump_json(), instance],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        owners.append(owner)
        assert owner.stdout
        return owner, json.loads(owner.stdout.readline())

    yield start
    for owner in owners:
        owner.kill()
        owner.communicate()


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes that stay; each is ended."""
    started: list[subprocess.Popen[bytes]] = []

    def start(env: dict[str, str] | None = None, *, session: bool = False) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-S", "-c", "print(flush=True); import time; time.sleep(600)"]
        process = subprocess.Popen(
            argv, env=env or dict(os.environ), start_new_session=session, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout
        process.stdout.readline()  # past exec, so that its environment is its own
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def record_of(name: str, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"name": name, "owner": 1, "boot": boot_id(), "session": 0, "cookie": COOKIE}
    return {**known, "port": 1, "processes": {}, **fields}


def write_record(home: Path, name: str, record: object) -> RunFolder:
    folder = RunFolder(home / "run" / name)
    folder.path.mkdir(parents=True)
    (folder.path / "record.json").write_text(record if isinstance(record, str) else json.dumps(record))
    return folder


@pytest.mark.parametrize("instance", ["", "named"])
def test_what_a_dead_owner_left_is_swept_ugly(owned: Any, own_home: Path, instance: str) -> None:
    """prior failure 6: owner and guardian die in the same moment, and grandchildren called setsid."""
    owner, pids = owned(
        instance, ignore_term=True, children=["session+stubborn", "double+session+stubborn", "stubborn"]
    )
    os.kill(pids["guardian"], signal.SIGSTOP)  # it hears nothing more, as in one moment with its owner
    owner.kill()
    owner.wait()
    os.kill(pids["guardian"], signal.SIGKILL)
    left = [pid for pid in pids["engine"] if pid in alive(pids["engine"])]
    assert len(left) >= 3, "the grandchildren outlive both: this is what has to be swept"
    assert sweep(own_home) == {}
    assert not alive(pids["engine"])
    assert not list((own_home / "run").glob("*~*"))
    assert not list((own_home / "run").glob("*/record.json"))


def test_the_next_start_sweeps_first_ugly(
    owned: Any, fake_profile: Callable[..., Profile], own_home: Path
) -> None:
    owner, pids = owned("named", children=["session+stubborn"])
    os.kill(pids["guardian"], signal.SIGSTOP)
    owner.kill()
    owner.wait()
    os.kill(pids["guardian"], signal.SIGKILL)
    backend = LlamaServer(fake_profile(), instance="named")
    try:
        backend.start(timeout=60)
        assert not alive(pids["engine"])
    finally:
        backend.stop(0)


def test_a_stopped_guardian_does_not_keep_its_tree_ugly(owned: Any, own_home: Path) -> None:
    owner, pids = owned(children=["session+stubborn"])
    os.kill(pids["guardian"], signal.SIGSTOP)
    owner.kill()
    owner.wait()
    assert sweep(own_home) == {}
    assert not alive([*pids["engine"], pids["guardian"]])


def test_a_living_owner_is_never_touched_good(owned: Any, own_home: Path) -> None:
    owner, pids = owned("named", children=["session"])
    before = (own_home / "run" / "named" / "record.json").read_bytes()
    assert sweep(own_home) == {}
    assert owner.poll() is None
    assert alive(pids["engine"]) == pids["engine"]
    assert (own_home / "run" / "named" / "record.json").read_bytes() == before


def test_a_reused_pid_is_a_stranger_good(sleeper: Any, own_home: Path) -> None:
    stranger = sleeper()
    started = start_time(stranger.pid)
    assert started
    write_record(own_home, "gone", record_of("gone", processes={str(stranger.pid): started - 1}))
    sweep(own_home)
    assert stranger.poll() is None


def test_a_reused_session_is_a_strangers_good(sleeper: Any, own_home: Path) -> None:
    """A stranger's login shell may get the pid, and so the session, that our engine once had."""
    shell = sleeper(session=True)
    started = start_time(shell.pid)
    assert started
    processes = {str(shell.pid): started - 1}
    write_record(own_home, "gone", record_of("gone", session=shell.pid, processes=processes))
    sweep(own_home)
    assert shell.poll() is None


LEADERLESS = """
import os, sys
os.setsid()
if os.fork() == 0:
    script = f"import os, time; print({os.getsid(0)}, os.getpid(), flush=True); time.sleep(600)"
    os.execve(sys.executable, [sys.executable, "-S", "-c", script], ENV)
"""


@pytest.mark.parametrize(
    ("env", "swept"),
    [
        ({"PATH": "/bin", "HOME": "/root"}, False),  # a stranger's, whose session had the same number
        ({"PATH": "/bin", "ORCHESTRATOR_LAUNCH": "another"}, False),
        ({}, True),  # wiped out by a program that rewrites its title, as vLLM's do
        (dict([COOKIE.split("=")]), True),
    ],
)
def test_a_session_without_its_first_process_ugly(own_home: Path, env: dict[str, str], swept: bool) -> None:
    script = LEADERLESS.replace("ENV", repr(env))
    with subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        session, pid = map(int, process.stdout.readline().split())
        process.wait(30)
        try:
            write_record(own_home, "gone", record_of("gone", session=session, processes={}))
            sweep(own_home)
            assert alive([pid]) == ([] if swept else [pid])
        finally:
            if alive([pid]):
                os.kill(pid, signal.SIGKILL)


# Forks once when it is told to, and ends: the list of processes that was made before names nobody who lives.
HOP = """
import os, sys, time
print(os.getpid(), flush=True)
sys.stdin.readline()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(300)
os._exit(0)
"""


def test_what_forks_while_it_is_looked_for_is_found_ugly(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, value = COOKIE.partition("=")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOP],
        env={name: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as hopping:
        assert hopping.stdin
        assert hopping.stdout
        pids = [int(hopping.stdout.readline())]
        listed = os.listdir

        def list_and_hop(path: str) -> list[str]:
            names = listed(path)
            if len(pids) == 1:
                hopping.stdin.write("\n")
                hopping.stdin.flush()
                pids.append(int(hopping.stdout.readline()))
                hopping.wait(30)
            return names

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", list_and_hop)
            assert leftovers.end(0, COOKIE, {}) == ()
        assert len(pids) == 2
        assert alive(pids) == []


def test_a_recorded_process_is_ended_whatever_it_did_since_good(sleeper: Any, own_home: Path) -> None:
    lost = sleeper({"PATH": "/bin"}, session=True)
    write_record(own_home, "gone", record_of("gone", processes={str(lost.pid): start_time(lost.pid)}))
    assert sweep(own_home) == {}
    assert lost.wait(20) == -signal.SIGKILL


def test_the_record_of_another_boot_is_never_acted_on_good(sleeper: Any, own_home: Path) -> None:
    innocent = sleeper({**os.environ, **dict([COOKIE.split("=")])}, session=True)
    record = record_of("old", session=innocent.pid, processes={str(innocent.pid): start_time(innocent.pid)})
    folder = write_record(own_home, "old", {**record, "boot": "another"})
    sweep(own_home)
    assert innocent.poll() is None
    assert folder.read() is None, "and it is forgotten"


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        "[]",
        "null",
        "\udcff",
        {},
        {"boot": boot_id()},
        record_of("x", session=None),
        record_of("x", session="many"),
        record_of("x", processes=[1, 2]),
        record_of("x", processes={"one": "two"}),
        record_of("x", processes=None),
        record_of("x", guardian={}),
        record_of("x", owner={}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["lasting", "passing~1-1"])
def test_a_corrupt_record_is_survived_ugly(own_home: Path, record: Any, name: str) -> None:
    folder = RunFolder(own_home / "run" / name)
    folder.path.mkdir(parents=True)
    text = record if isinstance(record, str) else json.dumps(record)
    (folder.path / "record.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert sweep(own_home) == {}
    assert folder.path.exists() is (name == "lasting")
    if name == "lasting":
        assert leftovers.acquire(folder)
        folder.release()


def test_what_resists_is_told_and_tried_again_ugly(
    sleeper: Any, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = sleeper({**os.environ, **dict([COOKIE.split("=")])})
    folder = write_record(own_home, "stuck", record_of("stuck"))
    monkeypatch.setattr(leftovers, "PATIENCE", 0.1)
    monkeypatch.setattr(leftovers.end, "__defaults__", (0.1,))
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: None)  # as in a driver that does not come back
        assert sweep(own_home) == {"stuck": (stuck.pid,)}
    assert folder.read(), "or nobody would ever try again"
    assert sweep(own_home) == {}
    assert stuck.wait(20) == -signal.SIGKILL


def test_a_start_waits_for_whoever_sweeps_good(own_home: Path) -> None:
    """Two shells race: one sweeps what the other wants to start."""
    folder = write_record(own_home, "raced", record_of("raced", owner=0))
    sweeper = RunFolder(folder.path)
    assert sweeper.acquire()
    tried = threading.Event()

    class Starter(RunFolder):
        def acquire(self) -> bool:
            got = super().acquire()
            tried.set()
            return got

    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(leftovers.acquire(Starter(folder.path))))
    thread.start()
    assert tried.wait(20)
    sweeper.release()
    thread.join(20)
    assert got == [True]


def test_a_living_owner_is_told_at_once_bad(own_home: Path) -> None:
    folder = write_record(own_home, "taken", record_of("taken", owner=os.getpid()))
    assert folder.acquire()
    assert not leftovers.acquire(RunFolder(folder.path))
    folder.release()


WRITER = """
import sys
from pathlib import Path
from orchestrator.home import RunFolder
folder = RunFolder(Path(sys.argv[1]))
assert folder.acquire()
print(flush=True)
number = 0
while True:
    number += 1
    folder.write({"number": number, "filler": ["x" * 100] * 2000})
"""


def test_a_record_is_whole_whenever_its_writer_is_killed_ugly(own_home: Path) -> None:
    folder = RunFolder(own_home / "run" / "killed")
    seen = 0
    for pause in range(12):
        with subprocess.Popen([sys.executable, "-c", WRITER, folder.path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            writer.stdout.readline()
            while (record := folder.read()) is None or record["number"] <= pause:
                continue
            writer.kill()
        last = folder.read()
        assert last is not None
        assert len(last["filler"]) == 2000
        seen = max(seen, last["number"])
        assert folder.acquire(), "a killed owner holds nothing"
        folder.release()
    assert seen
    assert {path.name for path in folder.path.iterdir()} <= {"lock", ".record"}


def test_strays_are_never_ourselves_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.getpid() not in strays(os.getsid(0), COOKIE, {os.getpid(): start_time(os.getpid()) or 0})


def test_a_taken_name_is_refused_without_harm_bad(
    owned: Any, fake_profile: Callable[..., Profile], own_home: Path
) -> None:
    owner, pids = owned("named")
    with pytest.raises(StartError, match="already runs"):
        LlamaServer(fake_profile(), instance="named").start()
    assert owner.poll() is None
    assert alive(pids["engine"]) == pids["engine"]
    assert psutil.pid_exists(pids["guardian"])
    owner.send_signal(signal.SIGTERM)
    wait_gone(pids["engine"])
