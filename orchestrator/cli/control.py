"""The control socket of one `orchestrator up`: who may ask what, and both ends of it.

One JSON object a line, one question a connection, mode 0600 in a folder of mode 0700:

    {"do": "status"}                                -> {"pid": .., "url": .., "backends": [status, ...]}
    {"do": "stop", "names": [..] or null, "grace": seconds or null}   -> {"stopped": [name, ...]}
    {"do": "switch", "name": .., "backend": .. or null, "profile": absolute path or null,
     "drain_s": .. or null, "beside": true, false or null}            -> a `Switched`
    {"do": "dialect", "name": ..}                   -> {"backend": .., "dialect": its `Dialect`}, once ready
    anything else                                   -> {"error": described error}

A socket's address holds 107 bytes, a path any number: both ends go by /proc/self/fd, which is short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.cli import faults
from orchestrator.errors import OrchestratorError

NAME = "control.sock"
MOST = 1 << 20  # bytes of a question
LAST_WORDS = 5.0  # seconds for answers under way at the end
PATIENCE = 10.0  # seconds for an answer that needs no work

Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class NotThere(OrchestratorError):
    """Nobody answers on a control socket."""

    exit_code = 3


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


class Server:
    """Answers questions on a folder's control socket."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self._folder = folder
        self._answer = answer
        self._answering: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        (self._folder / NAME).unlink(missing_ok=True)  # of a dead process, whose pid is ours now
        listener = socket.socket(socket.AF_UNIX)
        os.fchmod(listener.fileno(), 0o600)  # before the bind, so that it is never open to others
        with _address(self._folder) as address:
            listener.bind(address)
        listener.setblocking(False)
        self._server = await asyncio.start_unix_server(self._talk, sock=listener, limit=MOST)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            line = await reader.readline()
            self._answering.add(task)
            said = await _answered(line, self._answer)
            writer.write(json.dumps(said, default=str).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError):  # it left, or asked for more than MOST
            pass
        finally:
            self._answering.discard(task)
            writer.close()

    async def stop(self) -> None:
        """Take no more questions, and finish the answers under way."""
        if self._server is not None:
            self._server.close()
            (self._folder / NAME).unlink(missing_ok=True)
        if self._answering:
            await asyncio.wait(self._answering, timeout=LAST_WORDS)


async def _answered(line: bytes, answer: Answer) -> Mapping[str, Any]:
    try:
        question = json.loads(line)
    except ValueError:
        question = None
    if not isinstance(question, dict):
        return {"error": faults.describe(OrchestratorError("control: not a JSON object"))}
    try:
        return await answer(question)
    except Exception as error:
        return {"error": faults.describe(error)}


def ask(folder: Path, question: Mapping[str, Any], *, timeout: float | None = PATIENCE) -> dict[str, Any]:
    """Ask one question and return the answer.

    Raises:
        NotThere: nobody listens, or no answer came in time.

    """
    try:
        with _address(folder) as address, socket.socket(socket.AF_UNIX) as line:
            line.settimeout(timeout)
            line.connect(address)
            line.sendall(json.dumps(question).encode() + b"\n")
            with line.makefile("rb") as reader:
                answer = reader.readline()
            if not answer:
                raise EOFError("it ended before it answered")
            said = json.loads(answer)
    except (EOFError, OSError, ValueError) as error:
        raise NotThere(
            f"control: no answer from {folder.name}: {error}", advice="see `orchestrator ps`"
        ) from error
    return dict(said)
