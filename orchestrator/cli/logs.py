"""``orchestrator logs``: what engines wrote, across the rotation of their files."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from orchestrator.cli import completion

if TYPE_CHECKING:
    from orchestrator.home import RunFolder

READ = 1 << 16
TURN = 64  # pieces of one log before the others' turn: one that floods must not hide them
LOOKS = 3  # a rotation may pass between listing the files and looking at them
LOOK = 0.1  # seconds between two looks at files that grow; the kernel tells us nothing without inotify


def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]", help="Default: everything that runs.", autocompletion=completion.logged
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the engine's owner ends.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, metavar="N", help="The last N lines; default: all.")
    ] = None,
) -> None:
    """Show engines' logs, of those that have ended too when they are named."""
    from orchestrator.cli import console

    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(contextlib.closing(Source(folder))) for folder in _folders(names)]
        if not sources:
            console.err("nothing runs; name one to see its last log")
            return
        width = max(len(source.name) for source in sources)
        for source in sources:
            source.prefix = f"{source.name:{width}} | ".encode() if len(sources) > 1 else b""
            for lines in source.last(tail):
                console.raw(lines)
        if follow:
            _follow(sources, stack)


def _follow(sources: list[Source], stack: contextlib.ExitStack) -> None:
    """Write what is added until the owners of all have ended; a switch goes on in another folder."""
    from orchestrator.cli import console, services
    from orchestrator.home import home, run_folders

    names = {source.folder.title for source in sources}
    known = {source.name for source in sources}
    first = True
    while True:
        for folder in run_folders(home()):
            if folder.name not in known and folder.title in names:
                known.add(folder.name)
                sources.append(stack.enter_context(contextlib.closing(Source(folder))))
                if first and not folder.held:
                    for _ in sources[-1].last(0):  # what it holds is of an earlier time
                        pass
        first = False
        # asked before the read: what was written before its owner ended is still read after
        alive = any(source.folder.held for source in sources) or any(
            services.is_claimed(home(), name) for name in names
        )
        grown = False
        for source in sources:
            for lines in itertools.islice(source.more(), TURN):
                console.raw(lines)
                grown = True
        if not grown:
            if not alive:
                return
            time.sleep(LOOK)


def _folders(names: list[str] | None) -> list[RunFolder]:
    from orchestrator.cli.faults import UsageError
    from orchestrator.home import home, run_folders

    folders = [folder for folder in run_folders(home()) if folder.log.exists() or folder.held]
    if not names:
        return [folder for folder in folders if folder.held]
    found = []
    for name in dict.fromkeys(names):
        matching = [folder for folder in folders if name in {folder.name, folder.title}]
        if not matching:
            raise UsageError(f"logs: {name} has no log", advice="see `orchestrator ps`")
        found += matching
    return found


class Source:
    """One engine's log files, read like one file that never ends."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.name = folder.name
        self.prefix = b""
        self._file: BinaryIO | None = None
        self._rest = b""

    def _files(self) -> list[Path]:
        """Return the files there are, the oldest first."""
        number = 1
        while self._numbered(number).exists():
            number += 1
        return [*(self._numbered(older) for older in range(number - 1, 0, -1)), self.folder.log]

    def _numbered(self, number: int) -> Path:
        return self.folder.log.with_name(f"{self.folder.log.name}.{number}")

    def last(self, count: int | None) -> Iterator[bytes]:
        """Yield the last `count` lines so far, or all, in pieces; `more` goes on after them."""
        self._open(self._files()[0])
        if count is None:
            yield from self.more()
            return
        kept: deque[bytes] = deque(maxlen=count)
        part = b""
        for piece in self._raw():
            *lines, part = (part + piece).split(b"\n")
            kept.extend(line + b"\n" for line in lines)
        if part:
            kept.append(part)
        yield self._prefixed(b"".join(kept))

    def more(self) -> Iterator[bytes]:
        """Yield what has been written since, whole lines with the prefix."""
        yield from map(self._prefixed, self._raw())

    def _raw(self) -> Iterator[bytes]:
        while True:
            if self._file is None and not self._open(self.folder.log):
                return
            assert self._file is not None
            while data := self._file.read(READ):
                yield data
            following = self._following()
            if following is None:
                return
            # what was written between our last read and the rotation
            while data := self._file.read(READ):
                yield data
            self._open(following)

    def _following(self) -> Path | None:
        """Return the file after the one being read, None while that is the newest."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno()).st_ino
        for _ in range(LOOKS):
            files = self._files()
            for index, path in enumerate(files):
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_ino == mine:
                        return files[index + 1] if index + 1 < len(files) else None
        return files[0]  # ours fell off the end: go on with the oldest there is

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> bool:
        self.close()
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return False
        return True

    def _prefixed(self, data: bytes) -> bytes:
        """Return whole lines only when they get a prefix; without one, bytes as they come."""
        if not self.prefix:
            return data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self.prefix + line + b"\n" for line in lines)
