"""What an engine leaves on the disk and in shared memory: nothing, whatever ended it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends import process
from backends.llama_server import LlamaServer
from orchestrator.leftovers import end, remove_temporary, sweep
from tests.backends.conftest import Recorder, wait_gone
from tests.backends.test_guardian import Guarded, guarded, stop
from tests.backends.test_leftovers import owned, record_of, write_record

__all__ = ["guarded", "owned"]  # fixtures

# A process with shared memory, and a child that keeps it and ignores TERM.
SHARING = """
import os, signal, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=64)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("memory", memory.name, flush=True)
time.sleep(300)
"""
ENDS = pytest.mark.parametrize("how", ["a stop", "its own end", "the orchestrator's end"])


def end_by(how: str, guarded: Guarded) -> None:
    """Let an engine end in some way, and wait for the guardian's end."""
    if how == "a stop":
        guarded.send(stop(0))
    elif how == "its own end":
        os.kill(guarded.hear("spawned"), signal.SIGKILL)
    else:
        guarded.ours.shutdown(socket.SHUT_RDWR)
    assert guarded.process.wait(30) == 0


# -- the guardian -----------------------------------------------------------------------------------
@ENDS
def test_temporary_files_go_with_their_engine_ugly(guarded: Guarded, tmp_path: Path, how: str) -> None:
    folder, outside = tmp_path / "temporary", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    guarded.send(guarded.order())
    guarded.logged("up")
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "file").touch()
    (folder / "link").symlink_to(outside)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "s"))
    end_by(how, guarded)
    assert not folder.exists()
    assert (outside / "kept").exists()


def test_the_folder_goes_when_the_engine_can_not_be_run_bad(guarded: Guarded, tmp_path: Path) -> None:
    guarded.send(guarded.order(argv=["/nowhere/engine"]))
    guarded.hear("error")
    assert guarded.process.wait(30) == 0
    assert not (tmp_path / "temporary").exists()


def test_a_folder_that_is_there_already_is_not_taken_bad(guarded: Guarded, tmp_path: Path) -> None:
    """Another user may have put it where everybody may write."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    (folder / "theirs").touch()
    guarded.send(guarded.order())
    assert guarded.hear("error") == f"{folder} can't be written: file exists"
    assert guarded.process.wait(30) == 0
    assert (folder / "theirs").exists()


@ENDS
def test_shared_memory_is_given_back_ugly(guarded: Guarded, how: str) -> None:
    guarded.send(guarded.order(argv=[sys.executable, "-S", "-c", SHARING]))
    memory = Path("/dev/shm") / guarded.logged("memory")[0]
    assert memory.exists()
    end_by(how, guarded)
    assert not memory.exists()


def test_nobody_is_waited_for_long_when_the_orchestrator_is_gone_ugly(guarded: Guarded) -> None:
    guarded.send(guarded.order("stubborn", grace=3600))
    pid = guarded.hear("spawned")
    guarded.logged("up")
    guarded.ours.shutdown(socket.SHUT_RDWR)
    wait_gone([pid], 30)


# -- without it -------------------------------------------------------------------------------------
def test_shared_memory_is_given_back_without_a_guardian_ugly() -> None:
    cookie = {"COOKIE": "of-this-launch"}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SHARING], env=cookie, stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout
        memory = Path("/dev/shm") / leader.stdout.readline().split()[1]
        assert memory.exists()
        assert end(0, "COOKIE=of-this-launch", {}) == ()
        leader.wait()
    assert not memory.exists()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder that is the usual one for temporary files in this test."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # pytest's own paths are too long
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_an_engine_is_told_of_its_folder_good(engine: Callable[..., LlamaServer], temporary: Path) -> None:
    backend = engine()
    backend.start(timeout=60)
    (made,) = temporary.iterdir()
    assert psutil.Process(backend.status()["engine_pids"][0]).environ()["TMPDIR"] == str(made)
    backend.stop()
    assert not list(temporary.iterdir())


def test_the_profiles_own_folder_is_left_to_it_good(
    engine: Callable[..., LlamaServer], tmp_path: Path
) -> None:
    backend = engine(env={"TMPDIR": str(tmp_path)})
    backend.start(timeout=60)
    assert psutil.Process(backend.status()["engine_pids"][0]).environ()["TMPDIR"] == str(tmp_path)
    backend.stop()
    assert tmp_path.exists()


@pytest.mark.parametrize("victim", ["engine", "guardian"])
def test_a_restart_has_a_folder_of_its_own_and_the_last_one_is_gone_ugly(
    engine: Callable[..., LlamaServer], temporary: Path, victim: str
) -> None:
    backend = engine()
    heard = Recorder(backend)
    backend.start(timeout=60)
    (first,) = temporary.iterdir()
    child = backend.life.child
    assert child is not None
    os.kill(child.pid if victim == "engine" else child.guardian_pid, signal.SIGKILL)
    heard.wait(lambda event: event.name == "restart")
    backend.endpoint(60)
    (second,) = temporary.iterdir()
    assert second != first


def test_a_dead_owners_folder_is_swept_ugly(owned: Any, own_home: Path, temporary: Path) -> None:
    owner, pids = owned("named", children=["session+stubborn"])
    assert len(list(temporary.iterdir())) == 1
    os.kill(pids["guardian"], signal.SIGSTOP)  # it hears nothing more, as in one moment with its owner
    owner.kill()
    owner.wait()
    os.kill(pids["guardian"], signal.SIGKILL)
    sweep(own_home)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("name", ["mine", "orchestrator-", "orchestrator-other"])
def test_a_record_may_not_name_another_folder_bad(own_home: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_record(own_home, "old", record_of("old", temporary=str(folder), boot="another"))
    sweep(own_home)
    assert folder.exists()
    remove_temporary(str(folder), "")
    assert folder.exists()


def test_a_socket_in_it_has_an_address_that_is_short_enough_good(monkeypatch: pytest.MonkeyPatch) -> None:
    for usual in ("/tmp", "/run/user/1000/tmp", "/" + "long/" * 20):
        monkeypatch.setattr(tempfile, "tempdir", usual)
        assert len(str(process.temporary("f" * 32) / ("u" * 36))) <= 107
