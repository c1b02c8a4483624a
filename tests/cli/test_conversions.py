"""Other forms of models on the command line: in a cache that is not ours, of a file with a hostile name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_output import BOUND_BY_MODES
from tests.cli.conftest import PATIENCE, Cli, Write

QUANTIZE = "import shutil, sys; shutil.copy(*sys.argv[-3:-1])"


@pytest.fixture
def wish(fake: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile that wants its model in another form, which a program on PATH makes."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llama-quantize"
    program.write_text(f"#!{sys.executable}\n{QUANTIZE}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return fake("wish", **{"llama-server": {"weights": "bf16"}})


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("plan", 2, "was not made into bf16 yet"),
        ("convert", 3, "permission denied"),
        ("models", 0, "not searched"),
        ("doctor", 1, "can't be written to"),
    ],
)
def test_a_cache_of_somebody_else_is_told_and_no_fault_of_ours_bad(
    wish: str, tmp_path: Path, command: str, code: int, said: str
) -> None:
    cache = tmp_path / "cache"
    (cache / "orchestrator").mkdir(mode=0o000, parents=True)
    more = {"plan": [wish], "convert": [wish, "--backend", "llama-server"]}.get(command, [])
    done = subprocess.run(
        [sys.executable, "-c", BOUND_BY_MODES, command, *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert "internal fault" not in done.stderr
    assert said in done.stdout + done.stderr
    assert done.returncode == code


@pytest.mark.usefixtures("wish")
def test_a_name_steers_no_terminal_ugly(fake: Write, tiny_model: Path, tmp_path: Path, cli: Cli) -> None:
    steering = tmp_path / "a\x1b]0;title\x07\n.gguf"
    steering.symlink_to(tiny_model)
    done = cli("convert", fake("named", model=str(steering)), "--backend", "llama-server")
    assert done.returncode == 0
    assert done.stderr == "converting a ]0;title  .gguf to bf16, 0 MiB\n"
