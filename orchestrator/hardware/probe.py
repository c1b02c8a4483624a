"""How this package looks at a machine: files under a root, and programs with a deadline.

Everything read from a machine passes through a `Tree`, every program through a `Runner`, so that a
captured machine (or a broken one) answers in tests exactly as a real one would.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

READ_LIMIT = 1 << 18  # bytes; sysfs files are at most a page, libdrm's name table is about 25 kB
NO_ANSWER = "no answer"  # how the words for a passed deadline begin
PROGRAM_TIMEOUT = 10.0  # seconds; nvidia-smi takes some 2 s when the driver has to wake the card


class Tree:
    """The files of one machine; `root` is ``/`` for this one."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    @property
    def here(self) -> bool:
        """Whether this is the machine we run on, so that programs and libraries speak for it too."""
        return self.root == Path("/")

    def read(self, path: str) -> bytes:
        """Return the first `READ_LIMIT` bytes of a file.

        Raises:
            OSError: it is missing, not readable, or not a file.

        """
        # non-blocking, so that a pipe in a file's place can't hang us
        descriptor = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(descriptor, READ_LIMIT)
        finally:
            os.close(descriptor)

    def text(self, path: str, problems: list[str] | None = None) -> str | None:
        """Return a file's text without the space around it, or None.

        A missing file is normal; any other reason why there is no text is added to `problems`.
        """
        try:
            return self.read(path).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            if problems is not None:
                problems.append(f"/{path}: {(error.strerror or str(error)).lower()}")
            return None

    def number(self, path: str, problems: list[str] | None = None, base: int = 10) -> int | None:
        """Return the whole number that a file holds, or None when it holds anything else."""
        text = self.text(path, problems)
        return None if text is None else whole(text, base)

    def names(self, path: str, problems: list[str] | None = None) -> list[str]:
        """Return the names in a folder, unsorted; none when it can't be listed."""
        try:
            return os.listdir(self.root / path)  # noqa: PTH208 - names are all that is needed
        except FileNotFoundError:
            return []
        except OSError as error:
            if problems is not None:
                problems.append(f"/{path}: {(error.strerror or str(error)).lower()}")
            return []

    def exists(self, path: str) -> bool:
        """Say whether something is there, be it readable or not."""
        return os.path.lexists(self.root / path)

    def may_open(self, path: str) -> bool:
        """Say whether this process may open a device for reading and writing."""
        return os.access(self.root / path, os.R_OK | os.W_OK)

    def link(self, path: str) -> str:
        """Return what a link says, empty when it is none or may not be read."""
        try:
            return os.readlink(self.root / path)  # noqa: PTH115 - thousands are read in one go
        except OSError:
            return ""

    def leads_to(self, path: str) -> str:
        """Return the last component of where a link leads, the name itself when it is no link."""
        return Path(os.path.realpath(self.root / path)).name

    def group(self, path: str) -> str | None:
        """Return the name of the group that owns a device, None when it can't be told."""
        try:
            return grp.getgrgid((self.root / path).stat().st_gid).gr_name
        except (OSError, KeyError):
            return None

    def user(self) -> tuple[str, frozenset[str]]:
        """Return the name of the user we run as, and of the groups this process has."""
        groups = set()
        for gid in {os.getegid(), *os.getgroups()}:
            with contextlib.suppress(KeyError):
                groups.add(grp.getgrgid(gid).gr_name)
        try:
            name = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            name = str(os.geteuid())
        return name, frozenset(groups)


def whole(text: str, base: int = 10) -> int | None:
    """Return the unsigned 64-bit number written in `text`, or None."""
    text = text.strip().lower()
    if base == 16:
        text = text.removeprefix("0x")
    if not text.isascii() or not text.isalnum() or len(text) > 20:
        return None
    try:
        value = int(text, base)
    except ValueError:
        return None
    return value if value < 1 << 64 else None


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of running a program.

    Attributes:
        code: its exit code, or None when it could not be started or outlasted its deadline.
        out: its standard output.
        err: its standard error, or why it did not run.

    """

    code: int | None
    out: str = ""
    err: str = ""


Runner = Callable[[Sequence[str], float], Ran]
"""Runs argv with a deadline in seconds; never raises."""


def run_program(
    argv: Sequence[str], timeout: float = PROGRAM_TIMEOUT, *, environ: Mapping[str, str] | None = None
) -> Ran:
    """Run a program of this machine without input, by default in our own environment; see `Runner`."""
    try:
        done = subprocess.run(
            list(argv),
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return Ran(None, err=f"{NO_ANSWER} within {timeout:g} s")
    except (OSError, ValueError) as error:
        return Ran(None, err=(getattr(error, "strerror", None) or str(error)).lower())
    return Ran(
        done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    )
