"""What people see: the commands on a real (pseudo) terminal."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, CRASHES, PATIENCE, Write, crash

TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A command on a terminal of its own, whose control characters work."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = os.openpty()
        self.seen = self.last = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(theirs)

    def until(self, text: str, again: str = "") -> None:
        """Read until `text` has been shown since the last time, typing `again` each second until then."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            left = max(0, deadline - time.monotonic())
            if not select.select([self.ours], [], [], min(1, left) if again else left)[0]:
                assert again, self.seen
                assert left, self.seen
                self.type(again)
                continue
            with contextlib.suppress(OSError):  # the other end is closed
                data = os.read(self.ours, 4096)
                self.seen += data.decode("utf-8", "replace")
                continue
            break
        assert text in self.seen, self.seen
        self.last, _, self.seen = self.seen.partition(text)

    def type(self, text: str) -> None:
        """Type."""
        os.write(self.ours, text.encode())

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):
            while select.select([self.ours], [], [], max(0, deadline - time.monotonic()))[0]:
                data = os.read(self.ours, 4096)
                if not data:
                    break
                self.seen += data.decode("utf-8", "replace")
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self.ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Start commands on terminals."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(contextlib.closing(Terminal(*arguments)))


def test_up_shows_stage_and_time_while_it_loads_good(terminal: Callable[..., Terminal], fake: Write) -> None:
    # the newest line is looked at about once a second, so none of few is sure to be seen
    up = terminal("up", fake("slow", {"load_time": 4, "load_lines": 400}), "--port", "0")
    up.until("slow")
    up.until("0:00:0")
    up.until("load_tensors: stage ")
    up.until("ready slow http://127.0.0.1:")
    up.type("\x03")
    up.until("slow: stopped")
    assert up.wait() == 0
    assert "Traceback" not in up.seen


def test_up_says_on_a_terminal_that_an_engine_restarts_bad(
    terminal: Callable[..., Terminal], fake: Write
) -> None:
    up = terminal("up", fake("frail", CRASHES, restart={"attempts": 1, "backoff": [0, 0]}), "--port", "0")
    up.until("ready frail ")
    up.until("/v1")
    url = up.last.split()[-1] + "/v1"
    crash(url, "frail")
    up.until("frail: restarting: ")
    up.until("gave up")  # the gateway sent the request once more, and it killed the next engine too
    assert up.wait() == 3


def test_chat_is_a_conversation_good(terminal: Callable[..., Terminal], fake: Write, own_home: Path) -> None:
    chat = terminal("chat", fake("one", {"rate": 30, "eos_after": 100_000}))
    chat.until("> ")
    chat.type("Hello\r")
    chat.until(" capital of")
    chat.type("\x03")
    chat.until("(stopped)")
    chat.until("> ")  # before it the terminal is not readline's yet, and takes what is typed in its own way
    chat.type("/bogus\r")
    chat.until("there is no /bogus")
    chat.until("> ")
    chat.type("\x03")
    chat.until("leaves)", again="\x03")  # Python's readline misses one that comes just before it waits
    chat.until("> ")
    chat.type("\x04")
    assert chat.wait() == 0
    assert "Hello" in (own_home / "chat_history").read_text()
    assert (own_home / "chat_history").stat().st_mode & 0o777 == 0o600


def test_run_on_a_terminal_wants_a_prompt_bad(terminal: Callable[..., Terminal], fake: Write) -> None:
    run = terminal("run", fake())
    assert run.wait() == 2
    assert "PROMPT is missing" in run.seen


def test_up_says_on_a_terminal_that_the_context_is_less_good(
    terminal: Callable[..., Terminal], fake: Write
) -> None:
    up = terminal("up", fake("big", context=100_000), "--port", "0")
    up.until("big: context: 100000 asked for, 1024 given")
    up.until("ready big ")
