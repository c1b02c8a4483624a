"""``orchestrator chat``: a conversation."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.model import TextModel

HELP = """/reset         forget the conversation
/system TEXT   say how to answer; without TEXT, say nothing of it
/help          this
/quit          leave (or Ctrl-D); Ctrl-C stops an answer"""
HISTORY = 1000  # lines


def chat(
    profile: options.ProfileFile,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repeat_penalty: options.RepeatPenalty = None,
    backend: options.Backend = None,
    sets: options.Set = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves; /help says more.

    Without a terminal each line of stdin is one turn.
    """
    from orchestrator.cli import answering, console

    asked = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repeat_penalty": repeat_penalty,
    }
    talking = sys.stdin.isatty()
    with answering.model(profile, sets, backend) as model, _history(talking):
        if talking:
            console.err(f"{model.name} on {model.backend}; /help says what can be typed")
        Conversation(model.text, asked).hold(talking)


class Conversation:
    """The turns so far, and the next one."""

    def __init__(self, model: TextModel, asked: dict[str, Any]) -> None:
        self._model = model
        self._asked = asked
        self._system = ""
        self._turns: list[Any] = []

    def hold(self, talking: bool) -> None:
        """Take turns until the other side leaves."""
        while True:
            line = _line(talking)
            if line is None:
                return
            word, _, rest = line.strip().partition(" ")
            if word in {"/quit", "/exit", "/bye"}:
                return
            if line.strip():
                self._take(word, rest.strip(), line)

    def _take(self, word: str, rest: str, line: str) -> None:
        from orchestrator.cli import console

        if word == "/reset":
            self._turns.clear()
        elif word == "/system":
            self._system = rest
        elif word == "/help":
            console.err(HELP)
        elif word.startswith("/") and word[1:].isalpha():
            console.err(f"there is no {word}; /help says what there is")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Stream one answer; what failed or was stopped before any text leaves no turn behind."""
        from orchestrator.cli import console, faults
        from orchestrator.cli.run import show
        from orchestrator.errors import RequestError
        from orchestrator.tokens import Message

        before = [Message("system", self._system)] if self._system else []
        turns = [*self._turns, Message("user", line)]
        with self._model.chat([*before, *turns], **self._asked) as answer:
            try:
                show(answer)
            except KeyboardInterrupt:
                console.err("(stopped)")
            except RequestError as error:
                if not sys.stdin.isatty():
                    raise
                console.err(faults.render(faults.describe(error)))
            if answer.partial:
                self._turns = [*turns, Message("assistant", answer.partial)]


def _line(talking: bool) -> str | None:
    """Return the next line; None at the end."""
    from orchestrator.cli import console
    from orchestrator.cli.faults import UsageError

    if not talking:
        try:
            read = sys.stdin.buffer.readline().decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"chat: stdin is not UTF-8: {error}") from error
        except OSError as error:
            raise UsageError(f"chat: stdin can't be read: {error.strerror}") from error
        return read.rstrip("\r\n") if read else None
    while True:
        try:
            return input("> ")
        except UnicodeDecodeError:
            console.err("that is not UTF-8")
        except EOFError:
            console.err("")
            return None
        except KeyboardInterrupt:
            console.err("\n(Ctrl-D or /quit leaves)")


@contextlib.contextmanager
def _history(talking: bool) -> Any:
    """Keep what is typed from one conversation to the next, for this user's eyes only."""
    if not talking:
        yield
        return
    import os
    import readline

    from orchestrator.home import home

    path = home() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(path)
