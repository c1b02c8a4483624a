"""Model files of strangers, shown on a terminal: no pipe hangs us, nothing steers the terminal."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.gguf_files import LLAMA_KEYS, gguf_bytes

STEERING = "\x1b]0;title\x07\x1b[2J\x1b[31mred\r\n\x9b31m\u202e"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with everything that a download or an archive may bring."""
    folder = tmp_path / "models"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "loop").symlink_to(folder)
    (folder / "self.gguf").symlink_to("self.gguf")
    os.mkfifo(folder / "pipe.gguf")
    for name, pipe in (
        ("one", "model.safetensors"),
        ("two", "config.json"),
        ("three", "tokenizer_config.json"),
    ):
        place = folder / name
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"model_type": STEERING}))
        (place / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        (place / pipe).unlink(missing_ok=True)
        os.mkfifo(place / pipe)
    named = [("general.architecture", "str", f"llama{STEERING}"), ("general.name", "str", STEERING)]
    (folder / "bad\nname\x1b[31m.gguf").write_bytes(gguf_bytes([*named, *LLAMA_KEYS[2:]]))
    (folder / "cut\x1b[31m.gguf").write_bytes(gguf_bytes()[:-100])
    shape = (1 << 40, 1 << 40, 1 << 40, 1)
    (folder / "huge.gguf").write_bytes(gguf_bytes(tensors=[("token_embd.weight", shape, 0)], data=False))
    return folder


def steers(text: str) -> bool:
    return any(not character.isprintable() for line in text.split("\n") for character in line)


def test_a_listing_of_strangers_files_is_plain_lines_ugly(cli: Cli, hostile: Path) -> None:
    done = cli("models", str(hostile), "--all")
    assert done.returncode == 0, done.stderr
    assert not steers(done.stdout)
    assert not steers(done.stderr)
    assert len(done.stdout.splitlines()) == 2  # headings, and the one that is whole
    faults = [line for line in done.stderr.splitlines() if line.startswith("broken: ")]
    assert len(faults) == 7, faults
    assert sum("not a regular file" in line for line in faults) == 4


def test_a_name_that_is_not_text_hides_no_model_ugly(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    names = [b"plain.gguf", b"od\xffd.gguf"]
    for name in names:
        (folder / os.fsdecode(name)).write_bytes(gguf_bytes())
    for _ in range(2):  # the second time with what is remembered
        assert cli("models", str(folder)).returncode == 0
        done = cli("models", str(folder), "--json")
        assert done.returncode == 0, done.stderr
        found = [os.fsencode(Path(each["path"]).name) for each in json.loads(done.stdout)["models"]]
        assert sorted(found) == sorted(names)


@pytest.mark.parametrize("name", ["pipe.gguf", "one", "two", "self.gguf", "huge.gguf", "cut\x1b[31m.gguf"])
def test_a_plan_of_what_is_no_model_ends_at_once_bad(
    cli: Cli, hostile: Path, tmp_path: Path, name: str
) -> None:
    whole = hostile / name
    profile = tmp_path / "p.yaml"
    key, backend = ("hf", "vllm-cpu") if whole.is_dir() else ("gguf", "llama-server")
    model = {"model": {key: str(whole)}, "backend": backend, "command": ["/bin/true"], "device": "cpu"}
    profile.write_text(json.dumps(model))
    done = cli("plan", str(profile))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert ("is not a regular file" in done.stderr) == (name == "one")
    assert not steers(done.stderr), done.stderr


def test_a_plan_of_a_model_with_such_names_is_plain_lines_ugly(
    cli: Cli, hostile: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "p.yaml"
    model = str(hostile / "bad\nname\x1b[31m.gguf")
    keys = {"model": {"gguf": model}, "backend": "llama-server", "command": ["/bin/true"], "device": "cpu"}
    profile.write_text(json.dumps(keys))
    done = cli("plan", str(profile))
    assert done.returncode == 0, done.stderr
    assert not steers(done.stdout), done.stdout
    command = done.stdout.splitlines()[-1]  # as it stands it is the command, in bash
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True).stdout.split(
        b"\0"
    )
    assert os.fsencode(model) in words
