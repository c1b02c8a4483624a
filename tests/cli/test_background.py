"""`up --detach`, `ps`, `logs` and `down`, as users of docker compose know them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import httpx
import pytest

from orchestrator.cli import control
from tests.cli.conftest import COMMAND, PATIENCE, Cli, Start, Write, wait_for_end
from tests.hardware import captured

pytestmark = pytest.mark.usefixtures("nothing_left")


def rows(cli: Cli) -> dict[str, dict]:
    """Return what runs, by name."""
    return {row["name"]: row for row in json.loads(cli("ps", "--json").stdout)}


def test_a_detached_engine_is_listed_logged_and_taken_down_good(cli: Cli, fake: Write) -> None:
    up = cli("up", fake("one", {"say": ["hello from the engine"]}), "--port", "0", "--detach")
    assert up.returncode == 0, up.stderr
    word, name, url = up.stdout.split()
    assert (word, name) == ("ready", "one")
    assert httpx.get(f"{url}/models").status_code == 200
    row = rows(cli)["one"]
    assert (row["backend"], row["state"], row["url"]) == ("llama-server", "ready", url)
    assert row["memory"] > 0
    assert row["gpus"] == []
    assert "GPU" not in cli("ps").stdout
    assert row["uptime_s"] > 0
    assert os.getsid(row["pid"]) == row["pid"]
    assert "hello from the engine" in cli("logs", "one").stdout
    down = cli("down")
    assert (down.returncode, down.stdout) == (0, "stopped one\n")
    wait_for_end([row["pid"], *row["engine_pids"]])
    again = cli("down")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "nothing runs\n")


def test_cards_are_listed_with_what_is_held_of_them_good(cli: Cli, fake: Write, tmp_path: Path) -> None:
    """The card is that of a captured machine, of which our kernel knows nothing: no reason to fail."""
    captured.unfold("rx7800xt-then-9950x", tmp_path / "machine")
    knobs = {"list_devices": "  ROCm0: AMD Radeon RX 7800 XT (16368 MiB, 14944 MiB free)"}
    elsewhere = {"ORCHESTRATOR_MACHINE": str(tmp_path / "machine"), "FAKE_ENGINE": json.dumps(knobs)}
    up = cli("up", fake("one", device="rocm"), "--port", "0", "--detach", environ=elsewhere)
    assert up.returncode == 0, up.stderr
    (card,) = rows(cli)["one"]["gpus"]
    assert card["name"] == "AMD Radeon RX 7800 XT"
    assert card["memory_total"] == 17163091968
    assert (card["memory_used"], card["memory_engine"]) == (None, None)
    heading, line = cli("ps").stdout.splitlines()
    assert "GPU MEMORY" in heading
    assert "- (- of 16.0 GiB, AMD Radeon RX 7800 XT)" in line
    url = up.stdout.split()[2].removesuffix("/v1")
    assert httpx.get(f"{url}/api/status").json()["profiles"][0]["gpus"] == [card]


def test_down_takes_only_what_is_named_good(cli: Cli, fake: Write) -> None:
    assert cli("up", fake("one"), fake("two"), "--port", "0", "-d").returncode == 0
    assert cli("up", fake("three"), "--port", "0", "-d").returncode == 0
    assert cli("down", "one", "three").stdout.split() == ["stopped", "one", "stopped", "three"]
    assert {name for name, row in rows(cli).items() if row["state"] == "ready"} == {"two"}
    gone, mistyped = cli("down", "three"), cli("down", "tow")
    assert (gone.returncode, gone.stderr) == (0, "three: does not run\n")
    assert (mistyped.returncode, mistyped.stderr) == (
        2,
        "tow: nothing of that name has run; did you mean two?\n",
    )


def test_a_detached_start_that_fails_says_why_bad(cli: Cli, fake: Write) -> None:
    broken = fake("broken", {"say": ["the widget is bent"], "exit_after": 0, "exit_code": 7},
                  restart={"attempts": 0})  # fmt: skip
    up = cli("up", broken, "--port", "0", "--detach")
    assert up.returncode == 3
    assert "    the widget is bent" in up.stderr
    assert "exit code 7" in up.stderr
    assert not rows(cli)


def test_a_detached_profile_with_faults_is_refused_at_once_bad(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("slots: 0\n")
    up = cli("up", str(tmp_path / "bad.yaml"), "--detach")
    assert up.returncode == 2
    assert up.stderr.count("slots:") == 1


def test_a_detached_start_can_be_interrupted_ugly(cli: Cli, start: Start, fake: Write) -> None:
    up = start("up", fake("slow", {"load_time": 600}), "--port", "0", "--detach")
    while not rows(cli).get("slow", {}).get("engine_pids"):
        assert up.process.poll() is None, up.err
    row = rows(cli)["slow"]
    up.signal(signal.SIGINT)
    assert up.wait() == 130
    wait_for_end([row["pid"], *row["engine_pids"]])


def test_a_killed_service_is_cleaned_up_after_ugly(cli: Cli, fake: Write) -> None:
    cli("up", fake("one", {"ignore_term": True}), "--port", "0", "--detach")
    row = rows(cli)["one"]
    os.kill(row["pid"], signal.SIGKILL)
    wait_for_end([row["pid"], *row["engine_pids"]])
    assert "died" in cli("down").stderr
    assert cli("up", fake("one"), "--port", "0", "--detach").returncode == 0


def test_the_control_socket_is_for_its_owner_only_good(cli: Cli, fake: Write, own_home: Path) -> None:
    cli("up", fake("one"), "--port", "0", "--detach")
    (socket,) = own_home.glob("up/*/control.sock")
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    for folder in (socket.parent, own_home):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("question", [{"do": "dance"}, {}, [], "status"])
def test_the_control_socket_answers_nonsense_with_an_error_bad(
    cli: Cli, fake: Write, own_home: Path, question: object
) -> None:
    cli("up", fake("one"), "--port", "0", "--detach")
    (socket,) = own_home.glob("up/*/control.sock")
    assert control.ask(socket.parent, question)["error"]["message"].startswith("control: ")  # type: ignore[arg-type]


def test_a_state_folder_with_a_long_path_works_ugly(
    cli: Cli, fake: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(deep))
    assert cli("up", fake("one"), "--port", "0", "--detach").returncode == 0
    assert rows(cli)["one"]["state"] == "ready"
    assert cli("down").stdout == "stopped one\n"


def test_ps_shows_what_a_python_program_runs_good(cli: Cli, fake: Write) -> None:
    from orchestrator.cli import loading

    engine = loading.make_backend(loading.load_all([fake("one")], None, None)[0])
    engine.start()
    try:
        row = rows(cli)["one"]
        assert row["pid"] == os.getpid()
        assert row["engine_pids"]
        assert row["url"] is None
        done = cli("down", "one")
        assert done.returncode == 3
        assert "belongs to another program" in done.stderr
    finally:
        engine.stop(0)
    assert not rows(cli)


def test_logs_end_with_the_engine_when_they_follow_good(cli: Cli, start: Start, fake: Write) -> None:
    cli("up", fake("one", {"say": ["first", "second"]}), "--port", "0", "--detach")
    logs = start("logs", "one", "--follow")
    assert logs.line() == "first"
    assert logs.line() == "second"
    cli("down")
    assert logs.wait() == 0


def test_logs_of_several_are_told_apart_good(cli: Cli, fake: Write) -> None:
    cli("up", fake("one", {"say": ["from one"]}), fake("three", {"say": ["from three"]}), "--port", "0", "-d")
    lines = cli("logs").stdout.splitlines()
    assert "one   | from one" in lines
    assert "three | from three" in lines
    assert all(line.startswith(("one   | ", "three | ")) for line in lines)


def test_logs_of_nothing_good(cli: Cli) -> None:
    done = cli("logs")
    assert (done.returncode, done.stdout) == (0, "")
    assert cli("logs", "nobody").returncode == 2


def test_logs_with_a_reader_that_leaves_ugly(cli: Cli, fake: Write) -> None:
    cli("up", fake("one", {"log_rate": 200_000}), "--port", "0", "--detach")
    logs = subprocess.Popen([*COMMAND, "logs", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert logs.stdout is not None
    assert logs.stderr is not None
    logs.stdout.read(100)
    logs.stdout.close()
    assert logs.wait(PATIENCE) == 141
    assert logs.stderr.read() == b""
    logs.stderr.close()


def test_logs_with_a_reader_that_stalls_block_nobody_ugly(cli: Cli, fake: Write) -> None:
    up = cli("up", fake("one", {"log_rate": 5_000_000}), "--port", "0", "--detach")
    logs = subprocess.Popen([*COMMAND, "logs", "-f"], stdout=subprocess.PIPE)
    assert logs.stdout is not None
    try:
        logs.stdout.read(100)  # and never again: its pipe is full in no time
        url = up.stdout.split()[2]
        answer = httpx.post(f"{url}/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=PATIENCE)
        assert answer.status_code == 200
        assert cli("down").stdout == "stopped one\n"
    finally:
        logs.kill()
        logs.wait(PATIENCE)
        logs.stdout.close()


@pytest.mark.real
def test_the_real_engine_in_the_background_good(cli: Cli, real: str) -> None:
    up = cli("up", real, "--port", "0", "--detach")
    assert up.returncode == 0, up.stderr
    row = rows(cli)["gemma"]
    assert row["memory"] > 100 << 20
    assert "load_model" in cli("logs", "gemma").stdout
    assert cli("down", "gemma").stdout == "stopped gemma\n"
    wait_for_end([row["pid"], *row["engine_pids"]])
