"""A child in its own session that can't outlive us: our end of the guardian, its log, ports and sockets.

`Child` is one launch of one engine. Everything about *when* to launch or stop lives in `base`.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import re
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends import guardian
from orchestrator.backend import Command
from orchestrator.errors import StartError
from orchestrator.hardware import Live, Watch
from orchestrator.leftovers import TEMPORARY, end, read_proc, remove_temporary, start_time

if TYPE_CHECKING:
    from backends.containers import Container

LOG_BYTES = 16 << 20
LOG_FILES = 3
# ::1 and 127.0.0.1 in IPv6, as four little-endian words
LOOPBACK_6 = ("00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
SPAWN_SECONDS = 60.0  # a guardian takes milliseconds; this ends waits on one that can't go on
LISTEN = "0A"  # the state's number in /proc/net/tcp
# a socket's address holds 107 bytes: room for our folder's name and for what engines put into it, 36 at least
LONGEST_TEMPORARY = 40


@dataclass(frozen=True, slots=True)
class Exit:
    """How the engine's first process ended.

    Attributes:
        code: its exit code, None when a signal ended it (or when nobody knows: the guardian was killed).
        signal: the signal's number, or None.

    """

    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process tree has done so far; two of them show whether it moves.

    Attributes:
        cpu: seconds of CPU.
        read: bytes read.
        rss: resident bytes.
        log: bytes logged.

    """

    cpu: float
    read: int
    rss: int
    log: int

    def moved_since(self, earlier: Sample, seconds: float) -> bool:
        """Say whether this is progress and not just the answering of health probes."""
        return (
            self.cpu - earlier.cpu > 0.05 * seconds
            or self.read - earlier.read > 1 << 16
            or self.rss - earlier.rss > 1 << 20
            or self.log != earlier.log
        )


def free_port(avoid: Iterable[int] = ()) -> int:
    """Return a port of 127.0.0.1 that is free now; `avoid` holds those that are spoken for."""
    taken = set(avoid)
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in taken:
            return port


def is_free(port: int) -> bool:
    """Say whether nobody listens on a port of 127.0.0.1 and it can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is not an owner
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def listeners(port: int, *, beyond: bool = False) -> set[str]:
    """Return the inodes of the sockets that listen on a port; `beyond`: only those beyond loopback."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if fields[3] != LISTEN or int(number, 16) != port:
                    continue
                # an IPv4 address is one little-endian word: its first byte stands last
                inside = address in LOOPBACK_6 or (len(address) == 8 and address.endswith("7F"))
                if not (beyond and inside):
                    found.add(fields[9])
    return found


def owns_port(pids: Sequence[int], port: int, *, beyond: bool = False) -> bool:
    """Say whether one of `pids` holds a socket that listens on a port; `beyond`: beyond loopback."""
    links = {f"socket:[{inode}]" for inode in listeners(port, beyond=beyond)}
    for pid in pids if links else ():
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) in links:  # noqa: PTH115 - a socket is not a path
                        return True
    return False


def temporary(launch: str) -> Path:
    """Return the folder for a launch's temporary files, which goes when the launch is over.

    Engines leave sockets and more in the usual place even when they are asked to end.
    """
    try:
        usual = tempfile.gettempdir()
    except OSError:  # there is none: then nothing can be made in this one either, and the guardian says so
        usual = ""
    usual = usual if 0 < len(os.fsencode(usual)) <= LONGEST_TEMPORARY else "/tmp"  # noqa: S108
    return Path(usual) / f"{TEMPORARY}{launch[:16]}"


class Tail:
    """Reads what an engine logged since it was spawned, across one rotation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = path.stat().st_size if path.exists() else 0
        self.inode = path.stat().st_ino if path.exists() else None
        self.noise: re.Pattern[str] | None = None  # lines that are left out

    def text(self, limit: int = 1 << 18) -> str:
        """Return at most the last `limit` bytes of this launch's output, decoded leniently."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                begin = self.begin if self.inode in (None, stat.st_ino) else 0
                file.seek(max(begin, stat.st_size - limit))
                data = file.read(limit)
        except OSError:
            return ""
        return data.decode("utf-8", "replace")

    def lines(self, count: int) -> list[str]:
        """Return the last `count` non-empty lines of this launch."""
        lines = (line.rstrip() for line in self.text().split("\n") if line.strip())
        return [line for line in lines if not (self.noise and self.noise.search(line))][-count:]

    def size(self) -> int:
        """Return a number that grows whenever something is logged."""
        try:
            stat = self.path.stat()
        except OSError:
            return 0
        return stat.st_size + stat.st_ino * LOG_BYTES


class Child:
    """One launch of one engine, seen through its guardian's socket.

    `exited` is set when the engine's first process ended, `gone` when nothing of it is left.
    """

    def __init__(self, log: Path, cookie: str) -> None:
        self.tail = Tail(log)
        self.cookie = cookie
        self.temporary = temporary(cookie.partition("=")[2])
        self.pid = 0
        self.writer: asyncio.StreamWriter | None = None
        self.exit: Exit | None = None
        self.error: str | None = None
        self.missing = False  # the error is that the program could not be run
        self.killed: list[int] = []
        self.survivors: list[int] = []
        self.spawned = asyncio.Event()
        self.exited = asyncio.Event()
        self.gone = asyncio.Event()
        self.gone.set()  # nothing is there yet
        self.known: dict[int, int] = {}
        self.ever: set[int] = set()
        self.gpus: Watch | None = None
        self.cards: Live | None = None
        self.container: Container | None = None
        self.inside: int | None = None  # the container's first process, once it is known
        self._control: socket.socket | None = None

    async def launch(
        self, command: Command, *, inherited: Mapping[str, str], cwd: Path, grace: float
    ) -> None:
        """Start the guardian, hand it its order and wait until the engine runs; else `error` says why not.

        Args:
            command: the engine's.
            inherited: the environment over which the command's is laid.
            cwd: the engine's working directory.
            grace: seconds between TERM and KILL when we are gone.

        Raises:
            StartError: the guardian itself did not answer.

        """
        ours, theirs = socket.socketpair()
        self._control = ours
        _launched.add(self)
        with theirs:
            try:
                reader, self.writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            # from here to the listener nothing can be called off
            # the guardian itself gets no environment: an LD_PRELOAD meant for the engine is not for it
            self.process = subprocess.Popen(  # noqa: ASYNC220 - takes about a millisecond
                [sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
            )
        self.gone.clear()
        name, _, value = self.cookie.partition("=")
        self._say(
            argv=[str(word) for word in command.argv],
            env={**command.environ({**inherited, "TMPDIR": str(self.temporary)}), name: value},
            cwd=str(cwd),
            log=str(self.tail.path),
            log_bytes=LOG_BYTES,
            log_files=LOG_FILES,
            grace=grace,
            stop_argv=list(command.stop),
            clean_argv=list(command.clean),
            temporary=str(self.temporary),
        )
        self._listener = asyncio.create_task(self._listen(reader))
        try:
            async with asyncio.timeout(SPAWN_SECONDS):
                await self.spawned.wait()
        except TimeoutError:
            self.process.kill()
            raise StartError(
                f"the guardian did not start it within {SPAWN_SECONDS:g} s",
                advice="is the machine busy, or its disk? try again",
            ) from None

    def _say(self, **message: Any) -> None:
        if self.writer is None:  # nothing is there yet
            return
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(guardian.pack(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Follow the guardian's words to its end, then make sure that its tree ended too."""
        try:
            if not await self._hear(reader):
                await self._clean_up()
        finally:  # called off too, when something resists
            if self.writer is not None:
                self.writer.close()
            self.process.poll()
        await asyncio.to_thread(self.process.wait)
        if self.exit is None:
            self.exit = Exit(None, None)
        self.survivors = []
        self.spawned.set()
        self.exited.set()
        self.gone.set()

    async def _hear(self, reader: asyncio.StreamReader) -> bool:
        """Take in the guardian's words; says whether it came to its last ones."""
        finished = False
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the end, or half a word
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                message = marshal.loads(await reader.readexactly(size))  # noqa: S302 - our own guardian's
                if "spawned" in message:
                    self.pid = message["spawned"]
                    self.spawned.set()
                elif "error" in message:
                    self.error, self.missing = message["error"], "errno" in message
                    finished = True
                elif "exited" in message:
                    self.exit = Exit(**message["exited"])
                    self.exited.set()
                elif "survivors" in message:
                    self.survivors = message["survivors"]
                elif "gone" in message:
                    self.killed = message["gone"]
                    finished = True
        return finished

    async def _clean_up(self) -> None:
        """End the tree of a guardian that was killed."""
        while left := await asyncio.to_thread(end, self.pid, self.cookie, self.known):
            self.survivors = list(left)
        remove_temporary(str(self.temporary), self.cookie)

    @property
    def guardian_pid(self) -> int:
        """The guardian's pid."""
        return self.process.pid

    def tree(self) -> list[int]:
        """Return the pids of the engine's living processes; remembers them for a clean-up."""
        pids = guardian.descendants(self.process.pid)
        self.ever.update(pids)
        # kept while they live, in the tree or not: a killed guardian has none, and its clean-up needs them
        seen = self.known | {pid: started for pid in pids if (started := start_time(pid)) is not None}
        self.known = {pid: started for pid, started in seen.items() if start_time(pid) == started}
        return pids

    def everybody(self) -> list[int]:
        """Return the pids of the tree, and of its container where that is known."""
        # not in `tree`: a container's processes are its daemon's to end, and no signal goes to them
        inside = [self.inside, *guardian.descendants(self.inside)] if self.inside else []
        return [*self.tree(), *inside]

    def owns(self, port: int) -> bool:
        """Say whether what listens on a port is this engine."""
        return self.container.owns(port) if self.container else owns_port(self.tree(), port)

    def look(self) -> Sample:
        """Return what it has done so far, after finding out what there is."""
        if self.container is not None and self.inside is None:
            self.inside = self.container.init()
        return self.sample()

    def sample(self) -> Sample:
        """Return what the whole tree has done so far, and its container where that is known."""
        cpu, read, rss = 0.0, 0, 0
        tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        for pid in self.everybody():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = read_proc(pid, "stat").rpartition(b")")[2].split()
                cpu += sum(int(field) for field in fields[11:15]) / tick
                rss += int(fields[21]) * page
                for line in read_proc(pid, "io").splitlines():
                    name, _, value = line.partition(b": ")
                    if name in (b"rchar", b"read_bytes"):
                        read += int(value)
        return Sample(cpu, read, rss, self.tail.size())

    def stop(self, grace: float) -> None:
        """Ask for the end: TERM (or the command's own way) now, KILL to the tree after `grace` seconds."""
        self._say(stop=grace)

    def disown(self) -> None:
        """In a fork of the owner: let go of the inherited socket, which would hide the owner's end."""
        if self._control is not None and (fd := self._control.detach()) >= 0:
            os.close(fd)


_launched: weakref.WeakSet[Child] = weakref.WeakSet()


def _disown_all() -> None:
    for child in _launched:
        child.disown()


os.register_at_fork(after_in_child=_disown_all)
