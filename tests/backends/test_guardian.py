"""The guardian as a program of its own, spoken to over its socket."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import guardian
from tests.backends.conftest import alive, wait_gone

ENGINE = """
import os, signal, sys, time
for word in sys.argv[1:]:
    if word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif word == "away":  # a grandchild that setsid and a double fork hide, and that ignores TERM
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                print("away", os.getpid(), flush=True)
                time.sleep(300)
            os._exit(0)
    elif word == "tell":
        print("fds", *sorted(map(int, os.listdir("/proc/self/fd")[:-1])), flush=True)
        print("ignored", open("/proc/self/status").read().split("SigIgn:")[1].split()[0], flush=True)
        print("environment", sorted(os.environ), flush=True)
        print("session", os.getsid(0) == os.getpid(), flush=True)
    elif word.startswith("exit"):
        os._exit(int(word[4:]))
print("up", flush=True)
time.sleep(300)
"""

# whoever starts it may ignore signals, which a child inherits, as nohup and some CI runners do
DEAF = ("/bin/sh", "-c", 'trap "" HUP QUIT USR1 TTOU; exec "$@"', "sh")


def stop(grace: float) -> bytes:
    return guardian.pack({"stop": grace})


class Guarded:
    """A guardian, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "engine.log"
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(30)
        self.heard: list[dict[str, Any]] = []
        self.rest = b""
        with theirs:
            self.process = subprocess.Popen(
                [*DEAF, sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={},
            )

    def order(self, *words: str, grace: float = 0.2, argv: list[str] | None = None, **more: Any) -> bytes:
        order = {
            "argv": argv or [sys.executable, "-S", "-c", ENGINE, *words],
            "env": {"NAME": "value", "LC_CTYPE": "C.UTF-8"},
            "cwd": "/",
            "log": str(self.log),
            "log_bytes": 1 << 20,
            "log_files": 3,
            "grace": grace,
            "temporary": str(self.log.with_name("temporary")),
        }
        return guardian.pack({**order, **more})

    def send(self, data: bytes) -> None:
        self.ours.sendall(data)

    def hear(self, key: str) -> Any:
        """Return what the next message with `key` says."""
        while True:
            for message in self.heard:
                if key in message:
                    return message[key]
            data = self.ours.recv(1 << 16)
            assert data, f"ended without {key!r}: {self.heard}"
            messages, self.rest = guardian.unpack(self.rest + data)
            self.heard += messages

    def logged(self, word: str) -> list[str]:
        """Wait for a line of the log that begins with `word`; returns the rest."""
        while True:
            try:
                text = self.log.read_text()
            except FileNotFoundError:  # not yet, or being rotated
                text = ""
            for line in text.split("\n")[:-1]:
                if line.split(" ")[0] == word:
                    return line.split(" ")[1:]
            assert self.process.poll() is None, text

    def close(self) -> None:
        self.ours.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    made.close()
    try:
        made.process.wait(30)
    finally:
        made.process.kill()
        made.process.wait()


def test_from_start_to_end_good(guarded: Guarded) -> None:
    guarded.send(guarded.order())
    pid = guarded.hear("spawned")
    guarded.logged("up")
    guarded.send(stop(30))
    assert guarded.hear("exited") == {"code": None, "signal": signal.SIGTERM}
    assert guarded.hear("gone") == []
    assert guarded.process.wait(30) == 0
    assert not alive([pid])


@pytest.mark.parametrize("code", [0, 1, 77])
def test_the_exit_code_is_told_good(guarded: Guarded, code: int) -> None:
    guarded.send(guarded.order(f"exit{code}"))
    assert guarded.hear("exited") == {"code": code, "signal": None}
    assert guarded.hear("gone") == []


def test_a_program_that_is_not_there_is_told_bad(guarded: Guarded) -> None:
    guarded.send(guarded.order(argv=["/nowhere/engine"]))
    assert guarded.hear("error") == "no such file or directory"
    assert guarded.process.wait(30) == 0


def test_orders_come_in_any_pieces_ugly(guarded: Guarded) -> None:
    for byte in guarded.order() + stop(30)[:7]:
        guarded.send(bytes([byte]))
    guarded.hear("spawned")
    guarded.logged("up")
    for byte in stop(30)[7:] + stop(20):
        guarded.send(bytes([byte]))
    assert guarded.hear("gone") == []


def test_a_stop_that_comes_together_with_the_start_is_heard_ugly(guarded: Guarded) -> None:
    guarded.send(guarded.order("stubborn", grace=600) + stop(0))
    assert guarded.hear("gone") is not None


def test_a_later_stop_may_only_hasten_good(guarded: Guarded) -> None:
    guarded.send(guarded.order("stubborn"))
    guarded.logged("up")
    guarded.send(stop(0.1) + stop(3600))
    assert guarded.hear("exited") == {"code": None, "signal": signal.SIGKILL}
    assert guarded.hear("gone")


@pytest.mark.parametrize("how", ["socket", "TERM"])
def test_it_ends_the_tree_when_nobody_is_there_any_more_ugly(guarded: Guarded, how: str) -> None:
    guarded.send(guarded.order("stubborn", "away"))
    pids = [guarded.hear("spawned"), int(guarded.logged("away")[0])]
    guarded.logged("up")
    if how == "socket":
        guarded.ours.shutdown(socket.SHUT_RDWR)
    else:
        guarded.process.terminate()
    assert guarded.process.wait(30) == 0
    assert not alive(pids)


def test_it_hears_no_ctrl_c_good(guarded: Guarded) -> None:
    guarded.send(guarded.order())
    guarded.logged("up")
    guarded.process.send_signal(signal.SIGINT)
    guarded.process.send_signal(signal.SIGHUP)
    guarded.send(stop(30))
    assert guarded.hear("exited")["signal"] == signal.SIGTERM


def test_what_a_dead_engine_leaves_behind_is_ended_and_named_ugly(guarded: Guarded) -> None:
    guarded.send(guarded.order("away"))
    leader, grandchild = guarded.hear("spawned"), int(guarded.logged("away")[0])
    guarded.logged("up")
    os.kill(leader, signal.SIGKILL)
    assert guarded.hear("exited") == {"code": None, "signal": signal.SIGKILL}
    assert guarded.hear("gone") == [grandchild]
    assert not alive([grandchild])


# Ends with 0 and hops from process to process, deaf to TERM: each forks the next and ends within a
# millisecond, so that a list of processes is old before it is read. All hold one lock. It gives up by itself.
HOPPING = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
until = time.monotonic() + 20
print("up", flush=True)
while time.monotonic() < until:
    if os.fork():
        os._exit(0)
"""


def test_what_forks_while_it_is_looked_at_is_not_called_gone_ugly(guarded: Guarded, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    guarded.send(guarded.order(argv=[sys.executable, "-S", "-c", HOPPING, str(lock)]))
    assert guarded.hear("exited") == {"code": 0, "signal": None}
    assert guarded.hear("gone")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is left who holds it


def test_what_a_dead_engine_leaves_behind_may_end_by_itself_first_good(guarded: Guarded) -> None:
    """A worker gives shared memory back when it is asked to end, and can't when it is killed."""
    orderly = (
        "import os, signal, sys\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (print('tidied', 'up', flush=True), os._exit(0)))\n"
        "    print('up', flush=True)\n"
        "    while True: signal.pause()\n"
        "signal.pause()"
    )
    guarded.send(guarded.order(argv=[sys.executable, "-S", "-c", orderly]))
    leader = guarded.hear("spawned")
    guarded.logged("up")
    os.kill(leader, signal.SIGKILL)
    assert len(guarded.hear("gone")) == 1
    assert guarded.logged("tidied") == ["up"]


def test_a_burst_of_lines_just_before_the_end_is_logged_whole_ugly(guarded: Guarded) -> None:
    burst = "import os\nos.write(1, b''.join(b'line %d\\n' % n for n in range(10_000)))\nos._exit(3)"
    guarded.send(guarded.order(argv=[sys.executable, "-S", "-c", burst]))
    assert guarded.hear("gone") == []
    assert guarded.log.read_text() == "".join(f"line {n}\n" for n in range(10_000))


def test_an_engine_that_closes_its_output_is_guarded_all_the_same_ugly(guarded: Guarded) -> None:
    closing = "import os, time\nprint('up', flush=True)\nos.closerange(1, 3)\ntime.sleep(300)"
    guarded.send(guarded.order(argv=[sys.executable, "-S", "-c", closing]))
    leader = psutil.Process(guarded.hear("spawned"))
    guarded.logged("up")
    while leader.num_fds() > 1:
        assert leader.is_running()
    seen = psutil.Process(guarded.process.pid)
    while seen.status() != psutil.STATUS_SLEEPING:  # it waits, and does not spin on what it can't read
        assert seen.is_running()
    guarded.send(stop(30))
    assert guarded.hear("exited") == {"code": None, "signal": signal.SIGTERM}
    assert guarded.hear("gone") == []


def test_the_engine_dies_with_its_guardian_ugly(guarded: Guarded) -> None:
    guarded.send(guarded.order("stubborn"))
    leader = guarded.hear("spawned")
    guarded.logged("up")
    guarded.process.kill()
    wait_gone([leader])


def test_the_engine_inherits_nothing_of_ours_good(guarded: Guarded) -> None:
    guarded.send(guarded.order("tell"))
    assert guarded.logged("fds") == ["0", "1", "2"]
    ignored = int(guarded.logged("ignored")[0], 16)
    # the engine here is a Python, which ignores two signals itself; the C library lets nobody set 32 and 33
    pythons = {signal.SIGPIPE, signal.SIGXFSZ}
    assert [n for n in signal.valid_signals() - pythons if ignored & 1 << (n - 1)] == []
    assert guarded.logged("environment") == ["['LC_CTYPE',", "'NAME']"]
    assert guarded.logged("session") == ["True"]


def test_no_zombie_is_kept_good(guarded: Guarded) -> None:
    churn = "import os, time\nfor _ in range(50):\n    if os.fork() == 0:\n        os._exit(0)\n"
    orphans = "if os.fork() == 0:\n    [os._exit(0) for _ in range(5) if os.fork() == 0]\n    os._exit(0)\n"
    script = churn + orphans + "while True:\n    try: os.wait()\n    except ChildProcessError: break\n"
    script += "print('up', flush=True)\ntime.sleep(300)"
    guarded.send(guarded.order(argv=[sys.executable, "-S", "-c", script]))
    guarded.logged("up")
    seen = psutil.Process(guarded.process.pid)
    while zombies := [c for c in seen.children(recursive=True) if c.status() == psutil.STATUS_ZOMBIE]:
        psutil.wait_procs(zombies, timeout=0.1)
    guarded.send(stop(0))
    guarded.hear("gone")


def test_it_is_small_good(guarded: Guarded) -> None:
    """At most 15 MB beside every engine, however much that logs."""
    flood = "import os, time\nfor _ in range(400): os.write(1, b'x' * 100_000)\n"
    flood += "while True:\n    print('\\nup', flush=True)\n    time.sleep(0.05)"
    guarded.send(guarded.order(argv=[sys.executable, "-S", "-c", flood]))
    guarded.logged("up")
    assert psutil.Process(guarded.process.pid).memory_info().rss < 15_000_000


def test_it_needs_the_standard_library_alone_good() -> None:
    folder = str(Path(guardian.__file__).parent)
    script = f"import sys; sys.path.append({folder!r}); import guardian; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True
    )
    heavy = {"typing", "subprocess", "asyncio", "logging", "pathlib", "psutil", "threading"}
    assert not heavy & set(said.stdout.split())


# -- its log ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(chunks=st.lists(st.integers(0, 300), max_size=40), size=st.integers(1, 400), files=st.integers(1, 4))
def test_the_log_keeps_the_end_and_its_cap_good(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[int], size: int, files: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = guardian.Log(str(folder / "engine.log"), size, files)
    written = b""
    for number, length in enumerate(chunks):
        data = bytes([number]) * length
        log.write(data)
        written += data
    os.close(log.fd)
    paths = [folder / "engine.log", *(folder / f"engine.log.{number}" for number in range(1, files))]
    kept = b"".join(path.read_bytes() for path in reversed(paths) if path.exists())
    assert written.endswith(kept)
    assert set(folder.iterdir()) <= set(paths)
    assert all(path.stat().st_size < size + max([*chunks, 1]) for path in paths if path.exists())
    if files > 1:
        assert len(kept) >= min(len(written), size)


def test_a_full_disk_costs_lines_and_nothing_else_ugly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = guardian.Log(str(tmp_path / "engine.log"), 10, 3)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write(b"lost" * 10)
    log.write(b"kept")
    os.close(log.fd)
    assert (tmp_path / "engine.log").read_bytes() == b"kept"


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make every process vanish between the listing and the look."""

    def vanish() -> None:
        monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))

    return vanish


def test_processes_that_vanish_while_looked_at_are_no_fault_ugly(unreadable: Callable[[], None]) -> None:
    unreadable()
    assert guardian.descendants(1) == []


def test_what_resists_is_named_once_a_second_ugly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver that hangs makes it: SIGKILL is sent again and again, and nothing ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        killed: list[list[int]] = []
        monkeypatch.setattr(guardian, "descendants", lambda root: [4711])
        monkeypatch.setattr(guardian, "kill", lambda pids, number: killed.append(pids))
        monkeypatch.setattr(guardian, "read_proc", lambda pid, name: b"")
        watching = guardian.Guardian(theirs.fileno(), ctypes.CDLL(None))
        watching.deadline = time.monotonic() - 5
        assert not watching.finish()
        assert not watching.finish()
        assert killed == [[4711], [4711]]
        messages, rest = guardian.unpack(ours.recv(1 << 16))
        assert messages == [{"survivors": [4711]}]
        assert rest == b""
