"""`run` and `chat`: what goes to stdout, what to stderr, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from orchestrator.cli import documents
from tests.cli.conftest import COMMAND, PATIENCE, Cli, Start, Write


def test_run_prints_the_text_and_nothing_else_good(cli: Cli, fake: Write) -> None:
    done = cli("run", fake(), "Hello", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == " the capital of\n"
    assert "3 tokens" in done.stderr
    assert "load" in done.stderr
    assert not json.loads(cli("ps", "--json").stdout)


@pytest.mark.parametrize("arguments", [["-"], []])
def test_run_reads_its_prompt_from_stdin_good(cli: Cli, fake: Write, arguments: list[str]) -> None:
    done = cli("run", fake(), *arguments, "--max-tokens", "1", stdin="Grüße")
    assert (done.returncode, done.stdout) == (0, " the\n")


def test_run_as_json_prints_one_document_good(cli: Cli, fake: Write) -> None:
    done = cli("run", fake(), "Hello", "--max-tokens", "3", "--json")
    answer = msgspec.json.decode(done.stdout, type=documents.Run)
    assert answer.text == " the capital of"
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.load_s is not None
    assert answer.load_s > 0
    assert answer.ttft_s is not None
    assert answer.prefill_tok_s is not None


def test_run_uses_the_engine_that_runs_good(cli: Cli, start: Start, fake: Write) -> None:
    profile = fake("one")
    start("up", profile, "--port", "0").ready()
    answer = json.loads(cli("run", profile, "Hello", "--max-tokens", "2", "--json").stdout)
    assert (answer["text"], answer["load_s"]) == (" the capital", None)
    # what differs from what runs is started for the call
    answer = json.loads(
        cli("run", profile, "Hello", "--max-tokens", "2", "--json", "--set", "slots=2").stdout
    )
    assert answer["load_s"] > 0


def test_run_uses_a_running_engine_behind_a_key_good(cli: Cli, start: Start, fake: Write) -> None:
    profile, environ = fake("one"), {"KEY": "k"}
    start("up", profile, "--port", "0", "--host", "0.0.0.0", "--api-key-env", "KEY", environ=environ).ready()
    done = cli("run", profile, "Hello", "--max-tokens", "2", "--json", environ=environ)
    assert json.loads(done.stdout)["load_s"] is None, done.stderr


def test_run_whose_engine_dies_keeps_the_text_so_far_bad(cli: Cli, fake: Write) -> None:
    frail = fake("frail", {"crash_after": 2, "rate": 20}, restart={"attempts": 0})
    done = cli("run", frail, "Hello", "--max-tokens", "9")
    assert done.returncode == 4
    assert done.stdout.startswith(" the capital")
    assert "Traceback" not in done.stderr


def test_run_with_an_error_as_json_bad(cli: Cli, fake: Write) -> None:
    done = cli("run", fake(knobs={"exit_after": 0, "exit_code": 7}, restart={"attempts": 0}), "Hi", "--json")
    assert done.returncode == 3
    fault = msgspec.json.decode(done.stdout, type=documents.Error).error
    assert fault.exit_code == 3
    assert fault.type in {"ExitedEarly", "GaveUp"}


def test_run_without_a_text_reader_ugly(fake: Write) -> None:
    """``| head`` leaves early: no traceback, no engine left (the fixture of the whole run looks)."""
    profile = fake(knobs={"rate": 200, "eos_after": 100_000})
    run = subprocess.Popen(
        [*COMMAND, "run", profile, "Hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.read(4)
    run.stdout.close()
    assert run.wait(PATIENCE) == 141
    assert run.stderr.read() == b""
    run.stderr.close()


@pytest.mark.parametrize("knobs", [{"load_time": 600}, {"ttft": 600}])
def test_run_can_be_interrupted_ugly(start: Start, fake: Write, own_home, knobs: dict) -> None:
    run = start("run", fake(knobs=knobs), "Hello")
    while not list(own_home.glob("run/*/record.json")):
        assert run.process.poll() is None, run.err
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert not run.out
    assert not any("Traceback" in line for line in run.err)


@pytest.mark.parametrize("arguments", [["run", "-"], ["chat"]], ids=" ".join)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_stdin_that_is_not_text_bad(fake: Write, arguments: list[str], locale: str) -> None:
    command, *rest = arguments
    done = subprocess.run(
        [*COMMAND, command, fake(), *rest],
        input=b"\xff\xfe\n",
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "LC_ALL": locale},
    )
    assert done.returncode == 2
    assert b"stdin is not UTF-8" in done.stderr


def test_arguments_that_are_not_text_bad(fake: Write) -> None:
    for arguments, code, said in [
        ([b"\xff"], 2, b"run: PROMPT is not UTF-8"),
        (["x", "--stop", b"\xff"], 4, b"half of a surrogate pair"),
    ]:
        done = subprocess.run(
            [*COMMAND, "run", fake(), *arguments], capture_output=True, timeout=PATIENCE, check=False
        )
        assert (done.returncode, done.stdout) == (code, b"")
        assert said in done.stderr


def test_stdin_that_can_not_be_read_bad(fake: Write) -> None:
    for command in (["run", fake(), "-"], ["chat", fake()]):
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" 0>/dev/null', "sh", *COMMAND, *command],
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 2
        assert b"stdin can't be read: Bad file descriptor" in done.stderr


LATE = """
import atexit, sys, threading
import orchestrator

model = orchestrator.load(sys.argv[1])

def end():
    print(model.generate("Hello", max_tokens=2).text(), flush=True)
    model.close()
    print(model._source.state, flush=True)

if sys.argv[2] == "atexit":
    atexit.register(end)
else:  # a thread that outlives the main one
    threading.Thread(target=lambda: (threading.main_thread().join(), end())).start()
"""


@pytest.mark.parametrize("when", ["atexit", "thread"])
def test_a_model_can_be_used_and_closed_while_python_ends_ugly(fake: Write, when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, fake(), when],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.stdout, done.returncode) == (" the capital\nstopped\n", 0), done.stderr
    assert "Traceback" not in done.stderr


def test_chat_without_a_terminal_answers_each_line_good(cli: Cli, fake: Write) -> None:
    done = cli(
        "chat",
        fake(),
        "--max-tokens",
        "2",
        stdin="Hello\n\n/reset\n/system Be brief\n/what\nMore\n/quit\nNo\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == " the capital\n the capital\n"
    assert done.stderr == "there is no /what; /help says what there is\n"


@pytest.mark.real
def test_run_with_the_real_model_good(cli: Cli, real: str) -> None:
    asked = ["The capital of France is", "--max-tokens", "8", "--temperature", "0"]
    done = cli("run", real, *asked)
    assert done.returncode == 0, done.stderr
    answer = json.loads(cli("run", real, *asked, "--json").stdout)
    assert done.stdout.rstrip("\n") == answer["text"].rstrip("\n")
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["decode_tok_s"] > 0


def test_a_context_that_the_model_has_not_is_told_once_good(cli: Cli, start: Start, fake: Write) -> None:
    profile = fake("big", context=100_000)
    done = cli("run", profile, "Hi")
    assert done.returncode == 0
    assert done.stderr.count("big: context: 100000 asked for, 1024 given: the model's own limit") == 1
    assert "100000 asked for, 1024 given" in cli("plan", profile).stdout
    up = start("up", profile, "--port", "0")
    up.ready()
    assert [line.split("event=")[1] for line in up.err if "asked" in line] == [
        'context_reduced profile=big state=starting asked=100000 given=1024 why="the model\'s own limit"'
    ]


def test_a_context_that_nobody_asked_for_is_not_missed_good(cli: Cli, fake: Write, tmp_path: Path) -> None:
    path = Path(fake("small"))
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "context" not in line))
    done = cli("run", str(path), "Hi")
    assert (done.returncode, "asked for" in done.stderr) == (0, False)


def test_the_advice_names_no_log_that_is_gone_bad(cli: Cli, fake: Write) -> None:
    broken = fake("broken", {"say": ["bent"], "exit_after": 0, "exit_code": 7}, restart={"attempts": 0})
    said = cli("run", broken, "Hi").stderr
    assert "advice: its whole log stays when `orchestrator up` starts it: `orchestrator logs broken`" in said
    cli("up", broken, "--port", "0")
    assert "bent" in cli("logs", "broken").stdout


def test_run_with_nothing_on_stdin_wants_a_prompt_bad(cli: Cli, fake: Write) -> None:
    done = cli("run", fake(), stdin="")
    assert (done.returncode, done.stdout) == (2, "")
    assert "PROMPT is missing" in done.stderr
