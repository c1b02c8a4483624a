"""`up` before it takes questions, `down` of what is silent, output that can't be written, odd leftovers."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cli import faults, services
from tests.cli.conftest import COMMAND, PATIENCE, Cli, Running, Start, Write, wait_for_end
from tests.cli.test_terminal import Terminal

# an engine that does not say what it can do: a plan that takes its time
MUTE = "#!/bin/sh\necho asked > {}\nexec sleep 60\n"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a command line with redirections; `$O` is the program."""
    return subprocess.run(
        ["bash", "-c", line.replace("$O", " ".join(COMMAND))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture
def preparing(start: Start, fake: Write, tmp_path: Path) -> Callable[..., Running]:
    """Start an `up` and wait until it is amid its preparations."""

    def begin(*names: str, more: tuple[str, ...] = ()) -> Running:
        asked = tmp_path / "asked"
        os.mkfifo(asked)
        program = tmp_path / "mute"
        program.write_text(MUTE.format(asked))
        program.chmod(0o700)
        profiles = (fake(name, command=[str(program)], device="auto") for name in names)
        up = start("up", *profiles, "--port", "0", *more)
        fd = os.open(asked, os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert select.select([fd], [], [], PATIENCE)[0], up.err
        finally:
            os.close(fd)
        return up

    return begin


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_ends_with_0_on_a_signal_while_it_prepares_good(
    preparing: Callable[..., Running], own_home: Path, number: int
) -> None:
    up = preparing("one")
    up.signal(number)
    assert up.wait() == 0
    assert (up.out, up.err) == ([], [])
    assert not list(own_home.glob("*/*"))


@pytest.mark.parametrize("names", [(), ("one",)])
def test_down_calls_off_what_still_prepares_good(
    cli: Cli, preparing: Callable[..., Running], own_home: Path, names: tuple[str, ...]
) -> None:
    up = preparing("one")
    assert f"one: pid {up.process.pid} is preparing" in cli("ps").stderr
    done = cli("down", *names)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped one\n", "")
    assert up.wait() == 0
    assert not list(own_home.glob("up/*"))


def test_down_of_one_of_several_that_prepare_says_so_bad(cli: Cli, preparing: Callable[..., Running]) -> None:
    up = preparing("one", "two")
    done = cli("down", "one")
    assert done.returncode == 3
    assert f"one: pid {up.process.pid} prepares it together with others" in done.stderr
    assert up.process.poll() is None


def test_down_says_what_to_do_about_a_service_that_hangs_ugly(cli: Cli, start: Start, fake: Write) -> None:
    up = start("up", fake("one"), "--port", "0")
    up.ready()
    (row,) = json.loads(cli("ps", "--json").stdout)
    up.signal(signal.SIGSTOP)
    try:
        for names in ((), ("one",)):
            done = cli("down", *names)
            assert (done.returncode, done.stdout) == (3, "")
            assert f"one: pid {up.process.pid} does not answer" in done.stderr
            assert f"kill -KILL {up.process.pid}" in done.stderr
    finally:
        up.signal(signal.SIGKILL)  # the advice, taken
    wait_for_end([up.process.pid, *row["engine_pids"]])


@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
@pytest.mark.parametrize(
    "command",
    ["ps --json", "check {}", "run {} Hi", "run {} Hi --json", "up {} --port 0", "--version", "--help"],
)
def test_output_that_cannot_be_written_is_one_line_and_1_bad(
    cli: Cli, fake: Write, command: str, where: str
) -> None:
    done = shell(f"$O --log-level error {command.format(fake('one'))} {where}")
    assert done.returncode == 1
    assert done.stderr.startswith("stdout: can't be written: ")
    assert done.stderr.count("\n") == 1
    assert json.loads(cli("ps", "--json").stdout) == []


@pytest.mark.parametrize(
    "command", ["--help", "up --help", "engines --help", "--version", "schema", "ps --json", "check {}"]
)
def test_a_reader_that_is_gone_is_no_fault_good(fake: Write, command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [*COMMAND, *command.format(fake("one")).split()]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (faults.READER_GONE, b"")


def test_down_calls_off_a_detached_start_that_prepares_good(
    cli: Cli, preparing: Callable[..., Running], own_home: Path
) -> None:
    up = preparing("one", more=("--detach",))
    done = cli("down", "one")
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped one\n", "")
    up.wait()
    assert not up.out
    assert not list(own_home.glob("up/*"))


def test_a_detached_start_whose_plan_fails_says_why_once_and_leaves_nothing_bad(
    cli: Cli, fake: Write, tmp_path: Path, own_home: Path
) -> None:
    done = cli("up", fake(command=[str(tmp_path / "nowhere")]), "--port", "0", "--detach")
    assert done.returncode == 3
    assert done.stderr.count("does not exist") == 1
    assert not list(own_home.glob("up/*"))


def test_a_detached_start_whose_address_nobody_can_read_is_called_off_bad(cli: Cli, fake: Write) -> None:
    done = shell(f"$O --log-level error up {fake('one')} -d --port 0 >/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("stdout: can't be written: ")
    assert json.loads(cli("ps", "--json").stdout) == []


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("command", ["ps", "check {}", "run {} Hi"])
def test_words_that_nobody_can_hear_change_nothing_good(fake: Write, command: str, where: str) -> None:
    assert shell(f"$O {command.format(fake('one'))} {where}").returncode == 0


@pytest.mark.parametrize("stream", [">&-", "2>&-"])
def test_faults_are_faults_with_a_closed_stream_bad(tmp_path: Path, stream: str) -> None:
    done = shell(f"$O check {tmp_path / 'none.yaml'} {stream}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_up_serves_without_a_stderr_good(fake: Write, cli: Cli) -> None:
    up = subprocess.Popen(
        ["bash", "-c", f"exec {' '.join(COMMAND)} up {fake('one')} --port 0 2>&-"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None
    try:
        assert up.stdout.readline().startswith("ready one http")
        assert cli("down").stdout == "stopped one\n"
        assert up.wait(PATIENCE) == 0
    finally:
        up.kill()
        up.wait(PATIENCE)
        up.stdout.close()


DEAD = "4194999"  # above the highest pid there can be


@pytest.mark.parametrize(
    "record",
    ['{"a": 1}', '{"names": 5}', '{"names": [1, {}]}', "[" * 100_000, '{"a":' * 100_000, "", "\0", "[]", "7"],
)
def test_a_record_without_sense_hinders_nothing_ugly(cli: Cli, own_home: Path, record: str) -> None:
    for folder in (own_home / "up" / DEAD, own_home / "run" / "one"):
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(record)
    for command in ("ps", "down"):
        done = cli(command)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "nothing runs\n")
    assert not (own_home / "up" / DEAD).exists()


@pytest.mark.parametrize(
    "record", ['{"owner": "x"}', '{"owner": [1]}', '{"processes": 3}', '{"container": 5, "boot": {}}']
)
def test_an_engine_starts_over_a_record_without_sense_ugly(
    cli: Cli, fake: Write, own_home: Path, record: str
) -> None:
    (own_home / "run" / "one").mkdir(parents=True)
    (own_home / "run" / "one" / "record.json").write_text(record)
    done = cli("run", fake("one"), "Hi", "--max-tokens", "1")
    assert done.returncode == 0, done.stderr


def test_folders_and_files_in_each_other_s_place_hinder_nothing_ugly(
    cli: Cli, fake: Write, own_home: Path
) -> None:
    (own_home / "run" / "odd" / "lock").mkdir(parents=True)
    (own_home / "run" / "odd" / "record.json").write_text('{"owner": 1}')
    (own_home / "run" / "file").touch()
    (own_home / "up" / f"{DEAD}1" / "lock").mkdir(parents=True)
    (own_home / "up" / f"{DEAD}2" / "record.json").mkdir(parents=True)
    (own_home / "up" / DEAD).touch()
    assert services.sweep(own_home) == []
    assert cli("down").stderr == "nothing runs\n"
    done = cli("up", fake("odd"), "--port", "0", "--detach")
    assert done.returncode == 3
    assert done.stderr.count("run/odd/lock can't be opened") == 1
    assert "internal fault" not in done.stderr
    assert cli("run", fake("one"), "Hi").returncode == 0


def test_a_detached_start_in_a_state_folder_without_room_says_so_once_bad(
    cli: Cli, fake: Write, own_home: Path
) -> None:
    own_home.mkdir()
    (own_home / "up").touch()  # as good as read-only, for root as well
    done = cli("up", fake("one"), "--port", "0", "--detach")
    assert done.returncode == 3
    assert done.stderr.count("state folder: ") == 1
    assert done.stderr.count("advice: ") == 1


@pytest.mark.parametrize("load_time", [0, 600])
def test_a_terminal_that_hangs_up_ends_up_with_0_good(fake: Write, load_time: int) -> None:
    up = Terminal("up", fake("one", {"load_time": load_time}), "--port", "0")
    try:
        up.until("0:00:0" if load_time else "ready one ")
    finally:
        os.close(up.ours)
    try:
        assert up.process.wait(PATIENCE) == 0
    finally:
        up.process.kill()
        up.process.wait(PATIENCE)


def test_up_outlives_its_terminal_where_the_signal_is_ignored_good(cli: Cli, fake: Write) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        up = Terminal("up", fake("one", {"load_time": 3}), "--port", "0")
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        up.until("0:00:0")
    finally:
        os.close(up.ours)
    try:
        while (row := json.loads(cli("ps", "--json").stdout)[0])["state"] != "ready":
            assert up.process.poll() is None
        assert row["restarts"] == 0
        assert cli("down").stdout == "stopped one\n"
        assert up.process.wait(PATIENCE) == 0
        wait_for_end(row["engine_pids"])
    finally:
        up.process.kill()
        up.process.wait(PATIENCE)
