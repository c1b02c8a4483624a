"""The safetensors forms of GGUF files: one folder each in the cache, made once, by vLLM's Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from backends import convert_gguf
from backends.conversion import Conversion, place
from orchestrator import gguf_header
from orchestrator.errors import NotFetched, UnsupportedModel

FORM = "safetensors"
WEIGHT = 2  # bytes of a weight in bfloat16


def converted(gguf: Path, environ: Mapping[str, str], *, by: Callable[[], str], at_once: bool) -> Path:
    """Return the folder with the converted form of a GGUF file.

    Args:
        gguf: the file.
        environ: says where the cache is.
        by: returns the Python that converts; asked only when there is something to convert.
        at_once: whether who starts the model shall convert it, instead of hearing how.

    Raises:
        NotFetched: it was not converted yet; tells what does it.
        UnsupportedModel: it can't be converted, or was not yet.

    """
    folder = place(gguf, environ, FORM)
    whole = folder / "config.json"
    if os.path.isfile(whole):  # noqa: PTH113  # Path.is_file raises where access is denied
        return folder
    header = gguf_header.read(gguf)
    if header.architecture != convert_gguf.ARCHITECTURE:
        raise UnsupportedModel(
            f"model: vLLM does not read GGUF, and {header.architecture} can't be converted",
            path=gguf,
            advice="fetch its safetensors form and name the folder under model.hf, or take llama-server",
        )
    if not at_once:
        raise UnsupportedModel(
            f"model: vLLM does not read GGUF: {gguf}",
            path=gguf,
            advice="orchestrator convert PROFILE makes its safetensors form, which is found from then on",
        )
    python = by()
    raise NotFetched(
        f"model: {gguf.name} will be converted to {FORM} first, half a minute for a small model",
        path=folder,
        download=Conversion(
            gguf,
            folder,
            FORM,
            header.parameters * WEIGHT,
            whole,
            lambda made: (python, "-I", convert_gguf.__file__, str(gguf), str(made)),
            {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "-1"},
        ),
    )
