"""`up` in the foreground: what it prints, how it ends, what it leaves."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from orchestrator.gateway.guard import outside_address
from tests.cli.conftest import CRASHES, Cli, Start, Write, crash, wait_for_end


def engine_pids(cli: Cli) -> list[int]:
    """Return the pids of every engine that `ps` knows."""
    return [pid for row in json.loads(cli("ps", "--json").stdout) for pid in row["engine_pids"]]


def test_up_serves_and_ends_with_0_on_a_signal_good(cli: Cli, start: Start, fake: Write) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        up = start("up", fake("one"), "--port", "0")
        word, name, url = up.line().split()
        assert (word, name) == ("ready", "one")
        answer = httpx.post(f"{url}/completions", json={"model": "one", "prompt": "Hi", "max_tokens": 3})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"]
        pids = engine_pids(cli)
        assert pids
        up.signal(number)
        assert up.wait() == 0
        assert up.out == [f"ready one {url}"]
        wait_for_end(pids)


def test_up_serves_two_profiles_behind_one_address_good(start: Start, fake: Write) -> None:
    up = start("up", fake("one"), fake("two"), "--port", "0")
    lines = sorted([up.line(), up.line()])
    assert [line.split()[1] for line in lines] == ["one", "two"]
    url = lines[0].split()[2]
    assert {entry["id"] for entry in httpx.get(f"{url}/models").json()["data"]} == {"one", "two"}


def test_up_listens_while_it_loads_good(cli: Cli, start: Start, fake: Write) -> None:
    up = start("up", fake("slow", {"load_time": 2}), "--port", "0")
    url = None
    while url is None:
        rows = json.loads(cli("ps", "--json").stdout)
        url = rows[0]["url"] if rows else None
    answer = httpx.post(f"{url}/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200
    assert up.ready() == url


def test_up_names_the_stages_of_a_load_on_plain_lines_good(start: Start, fake: Write) -> None:
    up = start("up", fake("slow", {"load_time": 4, "load_lines": 400}), "--port", "0")
    up.ready()
    assert any("event=stage profile=slow" in line and "load_tensors" in line for line in up.err)
    assert all(line.startswith("timestamp=") for line in up.err)


def test_up_logs_json_when_asked_good(start: Start, fake: Write) -> None:
    up = start("--log-format", "json", "up", fake("one"), "--port", "0")
    up.ready()
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert {json.loads(line)["level"] for line in up.err} == {"info"}


def test_up_keeps_keys_out_of_its_words_good(cli: Cli, start: Start, fake: Write) -> None:
    up = start("--log-level", "debug", "up", fake("one"), "--port", "0", "--api-key-env", "KEY",
               environ={"KEY": "s3cret-of-ours"})  # fmt: skip
    url = up.ready()
    assert httpx.get(f"{url}/models").status_code == 401
    assert httpx.get(f"{url}/models", headers={"authorization": "Bearer s3cret-of-ours"}).status_code == 200
    shown = cli("ps", "--json").stdout
    (pid,) = engine_pids(cli)
    key = psutil.Process(pid).environ()["LLAMA_API_KEY"]
    cmdline = " ".join(psutil.Process(pid).cmdline())
    up.signal(signal.SIGINT)
    up.wait()
    for text in ("\n".join(up.err), shown, cmdline):
        assert key not in text
        assert "s3cret-of-ours" not in text


def test_up_refuses_every_bad_profile_at_once_bad(cli: Cli, fake: Write, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: gone.gguf\nbackend: llama-server\nslots: 0\n")
    (tmp_path / "worse.yaml").write_text("model: gone.gguf\nbackend: nobody\n")
    done = cli("up", fake("fine"), str(tmp_path / "bad.yaml"), str(tmp_path / "worse.yaml"))
    assert done.returncode == 2
    assert not done.stdout
    assert "bad.yaml:3:8: slots:" in done.stderr
    assert "worse.yaml:2:10: backend:" in done.stderr


def test_up_refuses_a_name_twice_bad(cli: Cli, fake: Write) -> None:
    done = cli("up", fake("one", name="same"), fake("two", name="same"), "--port", "0")
    assert done.returncode == 2
    assert "same is the name of" in done.stderr


def test_up_refuses_to_be_reached_from_beyond_without_a_key_bad(cli: Cli, fake: Write) -> None:
    for host in ("0.0.0.0", "::", "", "192.0.2.1"):
        done = cli("up", fake(), "--host", host, "--port", "0")
        assert done.returncode == 2
        assert done.stderr.startswith("up: --host: ")
        assert "--api-key-env" in done.stderr
    for environ in ({}, {"KEY": ""}):
        done = cli("up", fake(), "--host", "0.0.0.0", "--port", "0", "--api-key-env", "KEY", environ=environ)
        assert done.returncode == 2
        assert "KEY is" in done.stderr


def test_up_with_a_taken_port_says_what_to_do_bad(cli: Cli, fake: Write) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = cli("up", fake(), "--port", str(other.getsockname()[1]))
    assert done.returncode == 3
    assert "is taken by another process" in done.stderr
    assert "advice: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("more", [(), ("--detach",)])
def test_up_on_the_port_of_a_service_of_ours_names_it_bad(
    cli: Cli, start: Start, fake: Write, more: tuple[str, ...]
) -> None:
    url = start("up", fake("one"), "--port", "0").ready()
    done = cli("up", fake("two"), "--port", url.rpartition(":")[2].removesuffix("/v1"), *more)
    assert (done.returncode, done.stdout) == (3, "")
    assert "is taken by one, served by pid " in done.stderr
    assert "stop it with `orchestrator down one`" in done.stderr


def test_up_on_every_address_shows_one_that_can_be_used_good(cli: Cli, start: Start, fake: Write) -> None:
    profile = fake("one")
    key = {"KEY": "s3cret-of-ours"}
    up = start("up", profile, "--host", "0.0.0.0", "--port", "0", "--api-key-env", "KEY", environ=key)
    url = up.ready()
    assert url.startswith("http://127.0.0.1:")
    headers = {"authorization": "Bearer s3cret-of-ours"}
    assert httpx.get(f"{url}/models", headers=headers).status_code == 200
    assert json.loads(cli("ps", "--json").stdout)[0]["url"] == url
    assert json.loads(cli("run", profile, "Hi", "--json", environ=key).stdout)["load_s"] is None
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    if way_out := outside_address(ipv6=False):
        assert f"one: other machines reach it at {url.replace('127.0.0.1', way_out)}" in up.err


def test_up_with_an_engine_that_exits_shows_its_last_lines_bad(cli: Cli, start: Start, fake: Write) -> None:
    broken = fake("broken", {"say": ["the widget is bent"], "exit_after": 0, "exit_code": 7},
                  restart={"attempts": 0})  # fmt: skip
    done = cli("up", fake("fine"), broken, "--port", "0")
    assert done.returncode == 3
    assert "    the widget is bent" in done.stderr.splitlines()
    assert "exit code 7" in done.stderr
    assert "advice: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not json.loads(cli("ps", "--json").stdout)


def test_up_without_the_engines_program_bad(cli: Cli, fake: Write, tmp_path: Path) -> None:
    done = cli("up", fake(command=[str(tmp_path / "nowhere")]), "--port", "0")
    assert done.returncode == 3
    assert "does not exist" in done.stderr


def test_up_whose_last_engine_was_given_up_ends_with_3_bad(start: Start, fake: Write) -> None:
    frail = fake(
        "frail", {"exit_after": 0.2, "exit_from": "ready"}, restart={"attempts": 1, "backoff": [0, 0]}
    )
    up = start("up", frail, "--port", "0")
    up.ready()
    assert up.wait() == 3
    assert any("gave up" in line for line in up.err)


def test_up_lives_on_while_one_engine_lives_ugly(cli: Cli, start: Start, fake: Write) -> None:
    up = start("up", fake("firm"), fake("frail", CRASHES, restart={"attempts": 0}), "--port", "0")
    url = {up.ready(), up.ready()}.pop()
    crash(url, "frail")
    while {row["name"]: row["state"] for row in json.loads(cli("ps", "--json").stdout)}["frail"] != "failed":
        pass
    answer = httpx.post(f"{url}/completions", json={"model": "firm", "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200
    up.signal(signal.SIGINT)
    assert up.wait() == 0


def test_up_can_be_called_off_while_it_loads_ugly(cli: Cli, start: Start, fake: Write) -> None:
    up = start("up", fake("slow", {"load_time": 600}), "--port", "0")
    while not (pids := engine_pids(cli)):
        assert up.process.poll() is None, up.err
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert not up.out
    wait_for_end(pids)


def test_up_ends_at_once_at_the_second_signal_ugly(cli: Cli, start: Start, fake: Write) -> None:
    stubborn = fake("stubborn", {"ignore_term": True}, timeouts={"start": 30, "stop": 600})
    up = start("up", stubborn, "--port", "0")
    up.ready()
    pids = engine_pids(cli)
    up.signal(signal.SIGINT)
    while json.loads(cli("ps", "--json").stdout)[0]["state"] != "stopping":
        pass
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    wait_for_end(pids)


def stream(url: str, tokens: int) -> Iterator[str]:
    """Ask for a stream; yields its lines."""
    body = {"prompt": "Hi", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
        yield from response.iter_lines()


@pytest.mark.parametrize("how", ["signal", "down"])
def test_an_answer_under_way_ends_by_itself_before_its_engine_is_stopped_good(
    cli: Cli, start: Start, fake: Write, how: str
) -> None:
    """prior failure 11: a stop aborts running requests."""
    up = start("up", fake("one", {"rate": 20.0}), "--port", "0")
    lines = stream(up.ready(), 30)
    first = next(lines)
    if how == "signal":
        up.signal(signal.SIGINT)
    else:
        assert cli("down").returncode == 0
    rest = list(lines)
    assert first.startswith("data: ")
    assert "data: [DONE]" in rest
    assert up.wait() == 0


def test_the_second_signal_cuts_answers_with_an_explicit_error_ugly(start: Start, fake: Write) -> None:
    up = start("up", fake("one", {"rate": 5.0}), "--port", "0")
    lines = stream(up.ready(), 5000)
    next(lines)
    up.signal(signal.SIGINT)
    up.signal(signal.SIGTERM)
    assert any('"error"' in line for line in lines)
    assert up.wait() == 0


def test_up_that_is_killed_leaves_no_engine_ugly(cli: Cli, start: Start, fake: Write) -> None:
    up = start("up", fake("one", {"ignore_term": True, "children": ["session"]}), "--port", "0")
    up.ready()
    pids = engine_pids(cli)
    up.signal(signal.SIGKILL)
    up.wait()
    wait_for_end(pids)
    done = cli("ps")
    assert "its owner" in done.stderr
    assert "nothing runs" in done.stderr
    assert cli("ps").stderr == "nothing runs\n"


def test_up_twice_with_one_name_bad(cli: Cli, start: Start, fake: Write) -> None:
    start("up", fake("one"), "--port", "0").ready()
    done = cli("up", fake("one"), "--port", "0")
    assert done.returncode == 3
    assert "already runs" in done.stderr


def test_two_shells_that_race_start_one_engine_ugly(cli: Cli, start: Start, fake: Write) -> None:
    profile = fake("one", {"load_time": 0.5})
    racing = [start("up", profile, "--port", "0") for _ in range(3)]
    while sum(up.process.poll() is None for up in racing) > 1:
        pass
    (winner,) = [up for up in racing if up.process.poll() is None]
    winner.ready()
    for loser in racing:
        if loser is not winner:
            assert loser.wait() == 3
            assert "already runs" in "\n".join(loser.err)
    assert len(engine_pids(cli)) == 1


@pytest.mark.real
def test_up_with_the_real_engine_good(cli: Cli, start: Start, real: str) -> None:
    up = start("up", real, "--port", "0")
    url = up.ready()
    body = {"model": "gemma", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{url}/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 8
    assert psutil.Process(up.process.pid).memory_info().rss < 100 << 20
    pids = engine_pids(cli)
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    wait_for_end(pids)


@pytest.mark.real
def test_up_with_the_real_engine_killed_ugly(cli: Cli, start: Start, real: str) -> None:
    up = start("up", real, "--port", "0")
    up.ready()
    pids = engine_pids(cli)
    up.signal(signal.SIGKILL)
    up.wait()
    wait_for_end(pids)
