"""A GGUF model with other weights: made once, found again, and what becomes of it when that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from backends import requantise
from backends.llama_server import LlamaServer
from orchestrator import gguf_header
from orchestrator.backend import Binary
from orchestrator.errors import BackendError, BinaryMissing, ProfileError, UnsupportedModel
from orchestrator.profile import ModelSpec, Profile, load
from tests import gguf_files
from tests.backends.lacking import got, kept


def never() -> str:
    raise AssertionError("nothing is to be made")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    gguf_files.tiny_llama(path)
    return path


def program(folder: Path, body: str, name: str = "llama-quantize") -> str:
    """Write a program in Python."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport pathlib, shutil, sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


COPIES = "shutil.copy(sys.argv[2], sys.argv[3]); assert sys.argv[1::3] == ['--allow-requantize', 'BF16']"


def test_it_is_made_once_and_found_again_good(llama: Path, environ: dict[str, str], tmp_path: Path) -> None:
    quantize = program(tmp_path, COPIES)
    made = got(lambda: requantise.requantised(llama, "bf16", environ, by=lambda: quantize, at_once=True))
    assert made.read_bytes() == llama.read_bytes()
    assert kept(made.parent) == [made.name]
    assert requantise.requantised(llama, "bf16", environ, by=never, at_once=False) == made
    to_f16 = program(tmp_path, COPIES.replace("BF16", "F16"))
    other = got(lambda: requantise.requantised(llama, "f16", environ, by=lambda: to_f16, at_once=True))
    assert other != made


def test_weights_that_are_so_already_are_left_alone_good(llama: Path, environ: dict[str, str]) -> None:
    own = (gguf_header.read(llama).quantisation or "").lower()
    assert own == "f32"
    assert requantise.requantised(llama, own, environ, by=never, at_once=False) == llama


def test_what_is_large_is_made_when_asked_for_bad(llama: Path, environ: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModel, match="was not made into bf16 yet") as raised:
        requantise.requantised(llama, "bf16", environ, by=never, at_once=False)
    assert "orchestrator convert" in str(raised.value.advice)


def test_a_failure_leaves_nothing_bad(llama: Path, environ: dict[str, str], tmp_path: Path) -> None:
    quantize = program(tmp_path, "sys.exit('disk on fire')")
    with pytest.raises(BackendError, match="could not be made into bf16") as raised:
        got(lambda: requantise.requantised(llama, "bf16", environ, by=lambda: quantize, at_once=True))
    assert "disk on fire" in "\n".join(raised.value.log_tail)
    assert kept(tmp_path / "cache" / "orchestrator" / "models") == []


def test_a_tool_that_is_killed_is_told_as_such_ugly(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    quantize = program(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(BackendError, match="into bf16: killed by SIGKILL"):
        got(lambda: requantise.requantised(llama, "bf16", environ, by=lambda: quantize, at_once=True))


def test_the_tool_is_beside_the_server_or_on_path_good(tmp_path: Path) -> None:
    build, bin_, elsewhere = (tmp_path / name for name in ("build", "bin", "elsewhere"))
    for folder in (build, bin_, elsewhere):
        folder.mkdir()
    server = program(build, "", "llama-server")
    (bin_ / "llama-server").symlink_to(server)
    linked = Binary((str(bin_ / "llama-server"),), "PATH")
    with pytest.raises(BinaryMissing, match="not found beside"):
        requantise.tool(linked, {"PATH": str(elsewhere)})
    on_path = program(elsewhere, "")
    assert requantise.tool(linked, {"PATH": str(elsewhere)}) == on_path
    beside = program(build, "")
    assert requantise.tool(linked, {"PATH": str(elsewhere)}) == beside


def test_a_profile_asks_for_it_good(llama: Path, environ: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path, COPIES)
    server = program(tmp_path, "print('Available devices:')", "llama-server")
    environ |= {"LLAMA_SERVER_PATH": server}

    def plan(**options: Any) -> Path:
        profile = Profile(
            name="x",
            model=ModelSpec(gguf=str(llama)),
            backend="llama-server",
            options={"llama-server": options},
        )
        return LlamaServer(profile, environ=environ).plan().model_path

    assert plan() == llama
    with pytest.raises(UnsupportedModel, match="was not made"):
        plan(weights="bf16")
    profile = Profile(name="x", model=ModelSpec(gguf=str(llama)), backend="llama-server")
    made = got(lambda: LlamaServer.converted(profile, environ))
    assert plan(weights="bf16") == made


def test_other_weights_are_none_ugly(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model: x.gguf\nbackend: llama-server\nllama-server: {weights: q4}\n")
    with pytest.raises(ProfileError, match="weights"):
        load(str(path))
