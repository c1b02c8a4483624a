"""`orchestrator switch`: another engine behind a running address, and what the other commands make of it."""

from __future__ import annotations

import json
import signal
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Cli, Running, Start, Write, wait_for_end

pytestmark = pytest.mark.usefixtures("nothing_left")


def row(cli: Cli) -> dict[str, Any]:
    """Return the one thing that runs."""
    (found,) = json.loads(cli("ps", "--json").stdout)
    return dict(found)


def up(cli: Cli, profile: str) -> str:
    """Start in the background; returns the address."""
    done = cli("up", profile, "--port", "0", "--detach")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2]


def complete(url: str) -> httpx.Response:
    return httpx.post(
        f"{url}/completions", json={"model": "one", "prompt": "Hi", "max_tokens": 3}, timeout=60
    )


@pytest.mark.parametrize("how", ["--beside", "--no-beside"])
def test_another_engine_is_put_behind_the_address_good(cli: Cli, start: Start, fake: Write, how: str) -> None:
    url = up(cli, fake("one", {"say": ["the first engine"]}))
    before = row(cli)
    follow = start("logs", "--follow", "one")
    while "the first engine" not in follow.line():
        pass
    for number, said in enumerate(["the second engine", "the third engine"]):
        other = fake(f"other-{number}", {"say": [said]}, slots=2)
        done = cli("switch", "--profile", other, how)
        assert (done.returncode, done.stdout) == (0, "switched one llama-server\n"), done.stderr
        assert ("beside" in done.stderr) is (how == "--beside")
        while said not in follow.line():
            pass
    wait_for_end(before["engine_pids"])
    after = row(cli)
    assert (after["name"], after["state"], after["url"]) == ("one", "ready", url)
    assert after["pid"] == before["pid"]
    assert after["profile"].endswith("other-1.yaml")
    assert after["switching_to"] is None
    assert complete(url).status_code == 200
    assert "the third engine" in cli("logs", "one").stdout
    assert cli("down", "one").stdout == "stopped one\n"
    wait_for_end(after["engine_pids"])
    assert follow.wait() == 0


def test_the_name_stays_taken_wherever_its_engine_is_bad(cli: Cli, fake: Write) -> None:
    profile = fake("one")
    up(cli, profile)
    assert cli("switch", "--profile", profile).returncode == 0
    again = cli("up", profile, "--port", "0", "--detach")
    assert again.returncode == 3
    assert "one: already runs" in again.stderr
    cli("down")
    assert cli("up", profile, "--port", "0", "--detach").returncode == 0


@pytest.mark.parametrize("how", ["--beside", "--no-beside"])
def test_when_the_new_engine_fails_the_old_one_serves_and_the_reason_is_shown_bad(
    cli: Cli, fake: Write, how: str
) -> None:
    url = up(cli, fake("one"))
    broken = fake("broken", {"say": ["the widget is bent"], "exit_after": 0, "exit_code": 7})
    done = cli("switch", "one", "--profile", broken, how)
    assert (done.returncode, done.stdout) == (3, "")
    assert "    the widget is bent" in done.stderr
    assert "exit code 7; llama-server serves on" in done.stderr
    assert complete(url).status_code == 200
    assert row(cli)["state"] == "ready"


def test_ps_and_status_show_a_switch_under_way_and_down_ends_it_good(
    cli: Cli, start: Start, fake: Write
) -> None:
    url = up(cli, fake("one"))
    slow = fake("slow", {"load_time": 100})
    with httpx.stream("GET", url.replace("/v1", "/api/events"), timeout=60) as events:
        lines = events.iter_lines()
        switching = start("switch", "one", "--profile", slow, "--beside")
        while next(lines) != "event: switching":
            pass
    assert row(cli)["switching_to"] == "llama-server"
    assert "llama-server > llama-server" in cli("ps").stdout
    assert complete(url).status_code == 200
    second = cli("switch", "--profile", slow)
    assert second.returncode == 3
    assert "is under way" in second.stderr
    assert cli("down").stdout == "stopped one\n"
    assert switching.wait() == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --backend or --profile"),
        (("--backend", "b", "--profile", "p"), "give either --backend or --profile"),
        (("--backend", "vllm-cpu"), "nothing runs"),
        (("nobody", "--backend", "vllm-cpu"), "nobody does not run"),
        (("--profile", "/nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_bad(cli: Cli, arguments: list[str], message: str) -> None:
    done = cli("switch", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_unknown_engine_changes_nothing_bad(cli: Cli, fake: Write) -> None:
    url = up(cli, fake("one"))
    done = cli("switch", "--backend", "lama-server")
    assert done.returncode == 3
    assert "did you mean llama-server" in done.stderr
    assert complete(url).status_code == 200


def test_run_takes_the_engine_that_serves_the_file_now_good(cli: Cli, fake: Write) -> None:
    first, second = fake("one"), fake("other", {"say": ["the second engine"]})
    up(cli, first)
    assert cli("switch", "--profile", second).returncode == 0

    def run(profile: str, *more: str) -> dict[str, Any]:
        done = cli("run", profile, "Hi", "--max-tokens", "2", "--json", *more)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    now = run(second)
    assert (now["load_s"], now["model"], now["text"]) == (None, "one", " the capital")
    assert run(first)["load_s"] > 0, "what it was before is not what runs"


def switching(start: Start, url: str, profile: str, *how: str) -> Running:
    """Begin a switch to an engine that loads for long; returns once it is under way."""
    with httpx.stream("GET", url.replace("/v1", "/api/events"), timeout=60) as events:
        lines = events.iter_lines()
        begun = start("switch", "--profile", profile, *how)
        while "event: spawned" not in next(lines):
            pass
    return begun


def engines_of(cli: Cli) -> list[int]:
    """Return the pids of all engines of the one thing that runs, those of a switch under way too."""
    found = row(cli)["engine_pids"]
    assert found
    return list(found)


@pytest.mark.parametrize("how", ["--beside", "--no-beside"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_up_in_the_middle_of_a_switch_leaves_no_engine_ugly(
    cli: Cli, start: Start, fake: Write, number: signal.Signals, how: str
) -> None:
    service = start("up", fake("one"), "--port", "0")
    begun = switching(start, service.ready(), fake("slow", {"load_time": 100}), how)
    engines = engines_of(cli)
    assert len(engines) == (2 if how == "--beside" else 1)
    service.signal(number)
    assert service.wait() == (0 if number == signal.SIGINT else -number)
    wait_for_end(engines)
    assert begun.wait() == 3
    said = " ".join(begun.err)
    assert ("is being stopped" if number == signal.SIGINT else "it ended before it answered") in said
    assert not any("Traceback" in line for line in (*service.err, *begun.err))
    assert not json.loads(cli("ps", "--json").stdout)


def test_ctrl_c_on_the_command_does_not_call_the_switch_off_good(cli: Cli, start: Start, fake: Write) -> None:
    url = up(cli, fake("one"))
    other = fake("other", {"load_time": 2})
    with httpx.stream("GET", url.replace("/v1", "/api/events"), timeout=60) as events:
        lines = events.iter_lines()
        begun = start("switch", "--profile", other, "--beside")
        while "event: spawned" not in next(lines):
            pass
        begun.signal(signal.SIGINT)
        assert begun.wait() == 130
        while next(lines) != "event: switched":
            pass
    assert row(cli)["profile"] == other
