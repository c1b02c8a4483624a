"""Keeps unquantised forms of GGUF files, made once by llama-quantize, which comes with llama-server.

An engine that reads no GGUF gets weights in 16 bits. A comparison with it is one of engines, and not one of
precisions, when llama-server reads the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from backends.conversion import Conversion, place
from orchestrator import gguf_header
from orchestrator.backend import Binary
from orchestrator.errors import BinaryMissing, NotFetched, UnsupportedModel

PROGRAM = "llama-quantize"
BYTES = {"bf16": 2, "f16": 2, "f32": 4}  # of a weight
HINT = "take a build of llama.cpp that has it, or put it on PATH"


def tool(server: Binary, environ: Mapping[str, str]) -> str:
    """Return llama-quantize: beside the server's program, else on PATH.

    Raises:
        BinaryMissing: it is in neither place.

    """
    given = Path(server.argv[0])
    for folder in (given.parent, given.resolve().parent):
        if found := shutil.which(PROGRAM, path=str(folder)):
            return found
    if found := shutil.which(PROGRAM, path=environ.get("PATH")):
        return found
    raise BinaryMissing(f"{PROGRAM}: not found beside {given} and not on PATH", advice=HINT)


def requantised(
    gguf: Path, weights: str, environ: Mapping[str, str], *, by: Callable[[], str], at_once: bool
) -> Path:
    """Return the file that holds a model's weights in another form; itself when it holds them already.

    Args:
        gguf: the model's file, the first of its shards.
        weights: the form in llama-quantize's words, such as ``bf16``.
        environ: says where the cache is.
        by: returns the program that makes it; asked only when there is something to make.
        at_once: whether who starts the model shall make it, instead of hearing how.

    Raises:
        NotFetched: it was not made yet; tells what does it.
        UnsupportedModel: it was not made yet.

    """
    header = gguf_header.read(gguf)
    if (header.quantisation or "").lower() == weights:
        return gguf
    target = place(gguf, environ, f"{weights}.gguf")
    if os.path.isfile(target):  # noqa: PTH113  # Path.is_file raises where access is denied
        return target
    if not at_once:
        raise UnsupportedModel(
            f"model: {gguf} was not made into {weights} yet",
            path=gguf,
            advice="orchestrator convert PROFILE --backend llama-server does it, found from then on",
        )
    program = by()
    raise NotFetched(
        f"model: {gguf.name} will be made into {weights} first",
        path=target,
        download=Conversion(
            gguf,
            target,
            weights,
            header.parameters * BYTES[weights],
            target,
            lambda made: (program, "--allow-requantize", str(gguf), str(made), weights.upper()),
            {},
        ),
    )
