"""Keeps the safetensors forms of GGUF files: one folder each in the cache, made once, by vLLM's Python."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backends import convert_gguf
from orchestrator import gguf_header
from orchestrator.errors import BackendError, UnsupportedModel, describe_exit
from orchestrator.model_files import default_cache


def place(gguf: Path, environ: Mapping[str, str], form: str = "safetensors") -> Path:
    """Return where another form of a file is kept; another file of the same name has another place."""
    stat = gguf.stat()
    identity = f"{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    return default_cache(environ) / f"{gguf.stem}-{hashlib.sha256(identity).hexdigest()[:12]}-{form}"


def converted(gguf: Path, environ: Mapping[str, str], *, by: Callable[[], str], at_once: bool) -> Path:
    """Return the folder with the converted form of a GGUF file.

    Args:
        gguf: the file.
        environ: says where the cache is.
        by: returns the Python that converts; asked only when there is something to convert.
        at_once: convert it when that was not done yet, instead of saying how.

    Raises:
        UnsupportedModel: it can't be converted, or was not yet.
        BackendError: converting failed.

    """
    folder = place(gguf, environ)
    if (folder / "config.json").is_file():
        return folder
    architecture = gguf_header.read(gguf).architecture
    if architecture != convert_gguf.ARCHITECTURE:
        raise UnsupportedModel(
            f"model: vLLM does not read GGUF, and {architecture} can't be converted",
            path=gguf,
            advice="fetch its safetensors form and name the folder under model.hf, or take llama-server",
        )
    if not at_once:
        raise UnsupportedModel(
            f"model: vLLM does not read GGUF: {gguf}",
            path=gguf,
            advice="orchestrator convert PROFILE makes its safetensors form, which is found from then on",
        )
    return convert(gguf, folder, by())


def convert(gguf: Path, folder: Path, python: str) -> Path:
    """Convert a file into a folder that appears whole or not at all.

    Raises:
        BackendError: it failed.

    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as unfinished:
        run(
            [python, "-I", convert_gguf.__file__, str(gguf), unfinished],
            f"{gguf} could not be converted",
            env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "-1"},
        )
        shutil.rmtree(folder, ignore_errors=True)
        try:
            Path(unfinished).replace(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was quicker
                raise
            return folder
        Path(unfinished).mkdir()  # for the context to remove
    return folder


def run(argv: Sequence[str], failed: str, *, env: Mapping[str, str] | None = None) -> None:
    """Run a program that writes another form of a model, however long it takes.

    Args:
        argv: the program.
        failed: what to say when it did not succeed.
        env: its environment, by default ours.

    Raises:
        BackendError: it failed; its last lines are in the log tail.

    """
    done = subprocess.run(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        tail = done.stdout.decode("utf-8", "replace").split("\n")
        raise BackendError(
            f"convert: {failed}: {describe_exit(done.returncode)}",
            log_tail=[line for line in tail if line.strip()][-20:],
        )
