"""`Conversion`: another form of a model that can be made on this machine, once, and is kept in the cache.

A plan names it among what is lacking, as it names what a hub has; who starts the plan makes it first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar

from backends import tied
from orchestrator.errors import BackendError, describe_exit
from orchestrator.inventory_files import UNFINISHED
from orchestrator.model_files import default_cache

if TYPE_CHECKING:
    from filelock import BaseFileLock

STALL = 600.0  # seconds without a byte more, after which it hangs
EVERY = 0.2  # seconds between two looks at how far it has come
TAIL_LINES = 20
NAME = 160  # bytes of the model's name in that of its other form; those of its lock and folder are longer
LITTLE = 1 << 20  # bytes free on a disk that is as good as full
MEND = "mend what its last lines name, and do it again; nothing is left of this try"
ROOM = "make room, or set XDG_CACHE_HOME to a folder of yours on another disk"

Progress = Callable[[int, int], None]
"""Called with bytes done and in total; what it raises calls the work off."""


def place(gguf: Path, environ: Mapping[str, str], form: str) -> Path:
    """Return where another form of a file is kept; another file of the same name has another place."""
    stem = os.fsencode(gguf.stem)[:NAME].decode("utf-8", "ignore")
    return default_cache(environ) / f"{stem}-{_identity(gguf)}-{form}"


def _identity(gguf: Path) -> str:
    stat = gguf.stat()
    identity = os.fsencode(gguf.resolve()) + f"\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    return hashlib.sha256(identity).hexdigest()[:12]


@dataclass(frozen=True)
class Conversion:
    """The making of another form of a model.

    Attributes:
        gguf: the model's file, the first of its shards.
        target: the file or folder to be made, at its `place`; it appears whole or not at all.
        form: in words.
        size: bytes that it will have, about.
        whole: what is there only once `target` is whole: itself, or a file in it.
        argv: the program that makes it, given where to put it; it may tell how far it is in lines such as
            ``bytes 4096``.
        env: variables that the program needs.

    """

    gguf: Path
    target: Path
    form: str
    size: int
    whole: Path
    argv: Callable[[Path], tuple[str, ...]]
    env: Mapping[str, str]

    remote: ClassVar[bool] = False
    doing: ClassVar[str] = "converting"

    def __str__(self) -> str:
        """Return what is made of what."""
        return f"{self.gguf.name} to {self.form}, {self.size / (1 << 20):.0f} MiB"

    def fetch(self, progress: Progress | None = None) -> None:
        """Make it; harmless when it is there, and when several processes want it at once.

        Raises:
            BackendError: it failed, or the cache has no room or can't be written; the program's last lines
                are in the log tail.

        """
        try:
            self._make(progress or (lambda *_: None))
        except OSError as error:
            raise BackendError(
                f"convert: {self.target}: {(error.strerror or str(error)).lower()}", advice=ROOM
            ) from error

    def _make(self, tell: Progress) -> None:
        folder, name = self.target.parent, self.target.name
        folder.mkdir(parents=True, exist_ok=True)
        with self._alone(tell):
            if self.whole.is_file():
                return
            _tidy_up(folder, name)
            if self.size > (free := shutil.disk_usage(folder).free):
                raise BackendError(
                    f"convert: {self.target} needs {self.size >> 20} MiB, {free >> 20} MiB are free",
                    advice=ROOM,
                )
            with tempfile.TemporaryDirectory(dir=folder, prefix=f"{UNFINISHED}{name}-") as work:
                made = Path(work) / name
                self._run(made, tell)
                if not self._is_of_the_same():
                    raise BackendError(
                        f"convert: {self.gguf} was changed or removed while it was made into {self.form}",
                        advice="do it again once nobody writes to it; nothing is left of this try",
                    )
                _write_out(made)
                shutil.rmtree(self.target, ignore_errors=True)
                made.replace(self.target)

    def _is_of_the_same(self) -> bool:
        with contextlib.suppress(OSError):
            return _identity(self.gguf) in self.target.name
        return False

    @contextlib.contextmanager
    def _alone(self, tell: Progress) -> Iterator[None]:
        """Wait until nobody else makes the same; the kernel lets go of the lock however its owner ends."""
        from filelock import Timeout

        lock = _lock(self.target)
        while True:
            try:
                lock.acquire(timeout=EVERY)
                break
            except Timeout:
                tell(0, self.size)
        try:
            yield
        finally:
            lock.release()

    def _run(self, made: Path, tell: Progress) -> None:
        argv = (sys.executable, "-I", tied.__file__, str(os.getpid()), *self.argv(made))
        with open(os.memfd_create("log"), "w+b") as log:  # noqa: PTH123  # on a full disk it would say nothing
            child = subprocess.Popen(
                argv, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                self._watch(child, log, made, tell)
            finally:
                child.kill()
                child.wait()
            if child.returncode:
                log.seek(0)
                said = log.read().decode("utf-8", "replace").split("\n")
                full = shutil.disk_usage(made.parent).free < max(self.size - _size(made), LITTLE)
                raise BackendError(
                    f"convert: {self.gguf} could not be made into {self.form}: "
                    f"{describe_exit(child.returncode)}",
                    log_tail=[line for line in said if line.strip()][-TAIL_LINES:],
                    advice=f"the disk is full: {ROOM}" if full else MEND,
                )

    def _watch(self, child: subprocess.Popen[bytes], log: BinaryIO, made: Path, tell: Progress) -> None:
        before, still = -1, 0.0
        while True:
            done = _told(log) or _size(made)
            # looks are counted, since a clock goes on while Ctrl-Z holds both of us
            before, still = done, still + EVERY if done == before else 0.0
            if still > STALL:
                raise BackendError(
                    f"convert: {self.gguf} to {self.form}: nothing was written for {STALL:g} s",
                    advice="see whether its disk answers, and do it again; nothing is left of this try",
                )
            tell(min(done, self.size), self.size)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(EVERY)
                return


def _lock(target: Path) -> BaseFileLock:
    from filelock import FileLock

    return FileLock(target.parent / f".{target.name}.lock")


def _tidy_up(folder: Path, ours: str) -> None:
    """Remove what was left unfinished, of any model, by those who were killed; `ours` is locked by us."""
    from filelock import Timeout

    for left in [each for each in folder.iterdir() if each.name.startswith(UNFINISHED)]:
        name = left.name[len(UNFINISHED) :].rpartition("-")[0]  # the end is tempfile's
        with contextlib.suppress(Timeout), contextlib.ExitStack() as held:
            if name != ours:
                held.enter_context(_lock(folder / name).acquire(timeout=0))
            shutil.rmtree(left, ignore_errors=True)


def _told(log: BinaryIO) -> int:
    """Return how many bytes the program says are done, 0 when it says nothing of that."""
    size = os.fstat(log.fileno()).st_size
    lines = os.pread(log.fileno(), 4096, max(0, size - 4096))
    found: list[bytes] = re.findall(rb"^bytes (\d{1,18})$", lines, re.MULTILINE)
    return int(found[-1]) if found else 0


def _size(path: Path) -> int:
    """Return the bytes of a file, or of the files of a folder; 0 when it is not there."""
    files = path.iterdir() if path.is_dir() else (path,)
    with contextlib.suppress(OSError):
        return sum(each.stat().st_size for each in files)
    return 0


def _write_out(path: Path) -> None:
    """Have a file, or a folder with its files, on the disk before it is taken for whole."""
    for each in (*(path.iterdir() if path.is_dir() else ()), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
