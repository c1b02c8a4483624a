"""Finding an engine's program and asking it what it is."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import engines
from orchestrator.backend import Binary
from orchestrator.errors import BinaryMissing
from orchestrator.home import expand_home

PROBE_SECONDS = 30.0  # a ROCm build initialises every card before it answers


@dataclass(frozen=True, slots=True)
class Program:
    """Where an engine's program may be, in the order of preference.

    Attributes:
        name: what it is called on PATH.
        variables: environment variables that name it.
        packages: ``module:function`` of installed packages that bring it; the function returns its path.
        install: what to do when it is nowhere.
        environment: the name of the environment that ``orchestrator engines install`` makes for it.

    """

    name: str
    variables: tuple[str, ...] = ()
    packages: tuple[tuple[str, str], ...] = ()
    install: str = ""
    environment: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said when it was run for a moment.

    Attributes:
        code: its exit code; None when it was killed for taking too long or could not be run.
        text: stdout and stderr together.
        late: whether it was killed for taking too long.

    """

    code: int | None
    text: str
    late: bool = False

    def refuse_silence(self, program: str) -> None:
        """Raise `BinaryMissing` when no answer came in time: that says nothing of what it is."""
        if self.late:
            raise BinaryMissing(
                f"{program}: no answer within {PROBE_SECONDS:g} s",
                advice="is the machine busy? try again, or see whether it runs by hand",
            )


def find(program: Program, command: Sequence[str] | None, environ: Mapping[str, str]) -> Binary:
    """Find the program: the profile's own command, variables, its own environment, PATH, packages.

    Raises:
        BinaryMissing: it is nowhere, or what was named is not an executable file.

    """
    if command:
        # a container's client or an interpreter is looked up like a shell would
        path = shutil.which(command[0], path=environ.get("PATH")) or command[0]
        if "/" not in path:
            raise BinaryMissing(
                f"{path}: not found on PATH (named by the profile)",
                advice=f"install {path}, or write its path",
            )
        return Binary(
            (_executable(Path(path), "the profile's `command`"), *command[1:]), "the profile's `command`"
        )
    for variable in program.variables:
        if value := environ.get(variable):
            return Binary((_executable(Path(expand_home(value, environ)), variable),), variable)
    if program.environment and (own := engines.installed(program.environment, environ)):
        return Binary((own["program"],), f"engine {program.environment}")
    if found := shutil.which(program.name, path=environ.get("PATH")):
        return Binary((found,), "PATH")
    for package, locate in program.packages:
        module, _, function = locate.partition(":")
        try:
            path = str(getattr(importlib.import_module(module), function)())
        except ImportError:
            continue
        except Exception as error:  # a broken package is no reason for a traceback
            raise BinaryMissing(
                f"{program.name}: package {package} is broken: {error}", advice=program.install
            ) from error
        return Binary((_executable(Path(path), f"package {package}"),), f"package {package}")
    own_place = [f"engine {program.environment}"] if program.environment else []
    looked = [*program.variables, *own_place, "PATH", *(f"package {name}" for name, _ in program.packages)]
    raise BinaryMissing(
        f"{program.name}: not found; looked in {', '.join(looked)}", advice=program.install or None
    )


def _executable(path: Path, source: str) -> str:
    if path.is_dir():
        fault = "is a folder, not a program"
    elif not path.exists():
        fault = "does not exist"
    elif not os.access(path, os.X_OK):
        fault = "is not executable"
    else:
        return str(path)
    raise BinaryMissing(
        f"{path}: {fault} (named by {source})", advice=f"correct {source}, or unset it to look elsewhere"
    )


def ask(argv: Sequence[str], environ: Mapping[str, str]) -> Answer:
    """Run a program for a moment and return what it says; asked once for as long as its file is the same."""
    try:
        stat = Path(argv[0]).stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
    except OSError:
        stamp = (0, 0)
    try:
        return _ask(tuple(argv), tuple(sorted(environ.items())), stamp)
    except subprocess.TimeoutExpired:  # not remembered: it may have been busy
        return Answer(None, "", late=True)


@functools.lru_cache(maxsize=64)
def _ask(argv: tuple[str, ...], environ: tuple[tuple[str, str], ...], stamp: tuple[int, int]) -> Answer:  # noqa: ARG001
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except OSError as error:
        return Answer(None, str(error))
    return Answer(done.returncode, done.stdout.decode("utf-8", "replace"))
