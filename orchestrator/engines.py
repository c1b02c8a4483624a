"""Environments of their own for engines: where they are, and how one is made and kept whole.

    $ORCHESTRATOR_ENGINES (default $XDG_DATA_HOME/orchestrator/engines)
      NAME/                 a virtual environment of that engine alone; nothing of it enters ours
      NAME/installed.json   written last: without it nobody uses what is there, and the next run goes on

Which packages go in is the engine's business: its class names a `Recipe`.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import BackendError, BinaryMissing, DeviceMissing, DoesNotFit, describe_exit
from orchestrator.hardware import Machine
from orchestrator.home import expand_home

STAMP = "installed.json"
VERIFY_SECONDS = 300  # the first import of a big engine compiles its Python files
ASK_SECONDS = 30.0  # for a Python to tell its version
END_SECONDS = 5.0  # between TERM and KILL of what installs
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``pip install``.

    Attributes:
        arguments: what follows ``pip install``.
        elsewhere: a package index to be asked when the configured ones do not have it, or None.

    """

    arguments: tuple[str, ...]
    elsewhere: str | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an engine gets an environment of its own.

    Attributes:
        steps: calls of pip, in order.
        finish: arguments with which the environment's Python is run after them, or none.
        program: the engine's program in the environment, a glob relative to it.
        question: arguments with which that program tells its version.
        version: finds it in the answer, a pattern with one group; the last match counts.
        env: variables that installing needs.
        locks: requirement files that `steps` name; another content is another installation.
        size: bytes that it takes on disk.
        device: the kind of GPU that it is for, or None.
        python: the only Python version it is made for, such as ``3.12``, or None.
        glibc: the oldest C library that it runs with, such as ``2.35``, or None.
        needs: programs that installing needs.
        remark: what takes long, or None.

    """

    steps: tuple[Step, ...]
    program: str
    question: tuple[str, ...]
    finish: tuple[str, ...] = ()
    version: str = r"(?m)^(\S+)$"
    env: Mapping[str, str] = field(default_factory=dict)
    locks: tuple[Path, ...] = ()
    size: int = 0
    device: str | None = None
    python: str | None = None
    glibc: str | None = None
    needs: tuple[str, ...] = ()
    remark: str | None = None

    @property
    def fingerprint(self) -> str:
        """What an installation depends on."""
        told = repr((self.steps, self.program, *([self.finish] if self.finish else [])))
        for lock in self.locks:  # its content counts, not where it lies
            told = told.replace(str(lock), lock.name) + lock.read_text()
        return hashlib.sha256(told.encode()).hexdigest()


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the engines' environments are."""
    if named := environ.get("ORCHESTRATOR_ENGINES"):
        return Path(expand_home(named, environ))
    data = environ.get("XDG_DATA_HOME") or ""
    base = Path(data if data.startswith("/") else expand_home("~/.local/share", environ))
    return base / "orchestrator" / "engines"


def installed(name: str, environ: Mapping[str, str] = os.environ) -> Mapping[str, Any] | None:
    """Return an environment's version, program and fingerprint; None when it is not there or not whole."""
    place = folder(environ) / name
    try:
        known = json.loads((place / STAMP).read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(known, dict) and os.access(str(known.get("program", "")), os.X_OK)
    return known if whole else None


def install(
    name: str,
    recipe: Recipe,
    machine: Machine,
    *,
    environ: Mapping[str, str] = os.environ,
    tell: Tell = lambda _: None,
) -> Mapping[str, Any]:
    """Make an engine's environment, or finish one that was begun; nothing is done when it is whole.

    Args:
        name: the engine.
        recipe: how.
        machine: what it will run on.
        environ: the environment; says where engines go.
        tell: hears one line at a time of how far it is.

    Returns:
        what `installed` returns afterwards.

    Raises:
        DeviceMissing: it is for a GPU that is not there.
        DoesNotFit: the disk has no room for it.
        BackendError: it can't be installed here, or pip failed; says what is missing.

    """
    _refuse_impossible(name, recipe, machine)
    place = folder(environ) / name
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(
            f"engines: {place} can't be made: {(error.strerror or str(error)).lower()}",
            advice="set ORCHESTRATOR_ENGINES to a folder of yours",
        ) from error
    with _alone(place, tell) as lock:
        known = installed(name, environ)
        expected = set((known or {}).get("changed", ()))
        broken = {info for info, files in _changed(place).items() if not files <= expected}
        if known is not None and known.get("fingerprint") == recipe.fingerprint and not broken:
            return known
        (place / STAMP).unlink(missing_ok=True)  # from here on it is not whole
        for info in sorted(broken):
            tell(f"{info.name.partition('-')[0]} is not whole and is installed again")
            shutil.rmtree(info)  # what pip does not know of it puts there anew, over what is left
        _make(name, place, recipe, environ, tell, lock)
    known = installed(name, environ)
    assert known is not None
    return known


def _refuse_impossible(name: str, recipe: Recipe, machine: Machine) -> None:
    """Refuse before anything is made; every reason is told at once."""
    missing = []
    ours, glibc = ".".join(platform.python_version_tuple()[:2]), platform.libc_ver()[1]
    if recipe.python is not None and _python(recipe) is None:
        missing.append(f"Python {recipe.python}, this is {ours} and no python{recipe.python} is on PATH")
    if recipe.glibc is not None and _numbers(glibc) < _numbers(recipe.glibc):
        missing.append(f"glibc {recipe.glibc} or newer, this is {glibc or 'another C library'}")
    missing += [f"the program {program}" for program in recipe.needs if shutil.which(program) is None]
    if recipe.device is not None:
        cards = [gpu for gpu in machine.gpus if recipe.device in gpu.kinds]
        usable = [gpu for gpu in cards if recipe.device not in gpu.blocked]
        if not usable:
            why = f": {cards[0].label}: {cards[0].blocked[recipe.device]}" if cards else ", none was found"
            raise DeviceMissing(
                f"engines: {name} needs a GPU for {recipe.device}{why}"
                + "".join(f"; it also needs {what}" for what in missing),
                advice="orchestrator doctor says what was found; the CPU's form of the engine runs anywhere",
            )
    if missing:
        raise BackendError(
            f"engines: {name} needs {'; and '.join(missing)}",
            advice="install what is missing, then try again",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _python(recipe: Recipe) -> str | None:
    """Return the Python that the environment is made with."""
    if recipe.python is None or ".".join(platform.python_version_tuple()[:2]) == recipe.python:
        return sys.executable
    found = shutil.which(f"python{recipe.python}")
    if found is None:
        return None
    asked = [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found if told.strip() == recipe.python else None  # a version manager's shim may lead nowhere


@contextlib.contextmanager
def _alone(place: Path, tell: Tell) -> Iterator[int]:
    """Hold an engine's environment for oneself, waiting for whoever has it; gives the lock's descriptor."""
    with (place / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell("another process installs it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _changed(place: Path) -> dict[Path, set[str]]:
    """Return the ``dist-info`` folder of each package -> its files that are not as they were installed.

    A killed process leaves such, and a full disk; pip itself takes a package for installed as soon as
    its metadata is there. Sizes are compared, not hashes: 60,000 files are looked at in a second. One may
    change its own when it is first used: the stamp holds what was changed when all was well.
    """
    found: dict[Path, set[str]] = {}
    for info in place.glob("lib/python*/site-packages/*.dist-info"):
        try:
            with (info / "RECORD").open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))
        except OSError:
            rows = []
        # Python writes its own compiled files over those that some packages bring
        sizes = {row[0]: row[2] for row in rows if len(row) == 3 and row[2] and not row[0].endswith(".pyc")}
        found[info] = {name for name, size in sizes.items() if _size(info.parent / name) != size}
        if not sizes:
            found[info].add(f"{info.name}/RECORD")
    return found


def _size(path: Path) -> str:
    try:
        return str(path.stat().st_size)
    except OSError:
        return "gone"


def _make(name: str, place: Path, recipe: Recipe, environ: Mapping[str, str], tell: Tell, lock: int) -> None:
    """Make or finish the environment and verify it; the stamp is written last."""
    free = shutil.disk_usage(place).free
    there = sum(file.stat().st_size for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    if free + there < recipe.size:
        raise DoesNotFit(
            f"engines: {name} takes {recipe.size / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB free",
            advice="make room, or set ORCHESTRATOR_ENGINES to a folder on another disk",
        )
    python = place / "bin" / "python"
    env = {key: value for key, value in environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    env |= recipe.env
    if not (place / "pyvenv.cfg").exists() or not os.access(python, os.X_OK):
        tell(f"making an environment in {place}")
        chosen = _python(recipe)
        assert chosen is not None
        _run(name, [chosen, "-m", "venv", "--without-pip", str(place)], env, tell, lock)
    if recipe.remark:
        tell(recipe.remark)
    for number, step in enumerate(recipe.steps, 1):
        tell(f"step {number} of {len(recipe.steps)}: {' '.join(step.arguments)}")
        # our own pip, so that every environment is made by the same one
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
        order = [*pip, "--progress-bar", "off", *step.arguments]
        try:
            _run(name, order, env, tell, lock)
        except BackendError:
            if step.elsewhere is None:
                raise
            tell(f"not there; asking {step.elsewhere}")
            _run(name, [*order, "--extra-index-url", step.elsewhere], env, tell, lock)
    if recipe.finish:
        _run(name, [str(python), *recipe.finish], env, tell, lock)
    tell("asking it for its version")
    program = next(iter(sorted(place.glob(recipe.program))), None)
    if program is None:
        raise BinaryMissing(f"engines: {name} was installed, but {place / recipe.program} is not there")
    version = _version(name, [str(program), *recipe.question], recipe.version, env)
    changed = sorted(set().union(*_changed(place).values()))
    stamp = {
        "version": version,
        "program": str(program),
        "fingerprint": recipe.fingerprint,
        "changed": changed,
    }
    with tempfile.NamedTemporaryFile("w", dir=place, delete=False) as file:
        json.dump(stamp, file)
    Path(file.name).replace(place / STAMP)
    tell(f"{name} {version} is installed")


def _run(name: str, argv: list[str], env: Mapping[str, str], tell: Tell, lock: int) -> None:
    """Run a program and pass its lines on; its last lines belong to the error when it fails.

    It is the first of a group, so that what it has started (pip another pip, compilers) ends with it; and it
    holds the lock too, so that nobody else begins while it outlives us for a moment.
    """
    tail: list[str] = []
    with subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
        pass_fds=(lock,),
    ) as child:
        assert child.stdout is not None
        try:
            for raw in child.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                if line:
                    tell(line)
                    tail = [*tail[-19:], line]
        except BaseException:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(END_SECONDS)
            raise
    if child.returncode:
        raise BackendError(
            f"engines: installing {name} failed: {argv[0]}: {describe_exit(child.returncode)}",
            log_tail=tail,
            advice="mend what its last lines name and run it again; what was fetched is kept",
        )


def _version(name: str, argv: list[str], pattern: str, env: Mapping[str, str]) -> str:
    """Ask what was installed for its version.

    Raises:
        BinaryMissing: it does not run.

    """
    try:
        done = subprocess.run(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=VERIFY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BinaryMissing(f"engines: {name} was installed but does not run: {error}") from error
    said = done.stdout.decode("utf-8", "replace").split("\n")
    if done.returncode:
        raise BinaryMissing(
            f"engines: {name} was installed but does not run: {describe_exit(done.returncode)}",
            log_tail=[line for line in said if line.strip()][-20:],
        )
    told = re.findall(pattern, "\n".join(said))
    if not told:
        raise BinaryMissing(
            f"engines: {name} was installed, but does not tell its version",
            log_tail=[line for line in said if line.strip()][-20:],
        )
    return str(told[-1])
