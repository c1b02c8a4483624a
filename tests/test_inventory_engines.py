"""Which engines serve which form of a model: asked of their classes once, and again when those change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import discovery
from orchestrator.errors import UnknownBackend
from orchestrator.inventory_engines import serving

OURS = {"gguf": ("llama-server",), "safetensors": ("vllm",)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the engines whose classes are imported from now on."""
    names: list[str] = []
    find = discovery.find

    def noted(name: str) -> Any:
        names.append(name)
        return find(name)

    monkeypatch.setattr(discovery, "find", noted)
    return names


def test_each_form_has_the_engines_that_say_so_good() -> None:
    assert serving() == OURS


def test_what_they_said_is_remembered_good(tmp_path: Path, asked: list[str]) -> None:
    cache = tmp_path / "new" / "engines.json"
    assert serving(cache) == OURS
    assert asked == list(discovery.installed())
    asked.clear()
    assert serving(cache) == OURS
    assert asked == []
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize("changed", ["place", "engine", "base", "gone"])
def test_an_engine_that_changed_is_asked_again_good(tmp_path: Path, asked: list[str], changed: str) -> None:
    cache = tmp_path / "engines.json"
    serving(cache)
    asked.clear()
    kept = json.loads(cache.read_text())
    place, _, files = kept["engines"]["llama-server"]
    own, base = (
        next(path for path in files if path.endswith(end)) for end in ("llama_server.py", "engine.py")
    )
    if changed == "engine":
        files[own][0] += 1
    elif changed == "base":
        files[base][1] += 1
    elif changed == "gone":  # its module is another file now, as in another environment
        del files[own]
    kept["engines"]["llama-server"] = [f"{place}x" if changed == "place" else place, ["lies"], files]
    cache.write_text(json.dumps(kept))
    assert serving(cache) == OURS
    assert asked == ["llama-server"]


def test_an_engine_that_can_t_be_imported_serves_nothing_and_is_not_remembered_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise UnknownBackend(f"backend: {name!r} can't be imported")

    with monkeypatch.context() as patch:
        patch.setattr(discovery, "find", broken)
        assert serving(tmp_path / "engines.json") == {}
    assert serving(tmp_path / "engines.json") == OURS


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"format": 99, "engines": {}}', b"[]"])
def test_a_broken_memory_is_ignored_and_mended_ugly(tmp_path: Path, asked: list[str], content: bytes) -> None:
    cache = tmp_path / "engines.json"
    cache.write_bytes(content)
    assert serving(cache) == OURS
    asked.clear()
    assert serving(cache) == OURS
    assert asked == []


def test_a_memory_that_can_t_be_written_is_no_fault_ugly(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert serving(tmp_path / "file" / "engines.json") == OURS
    taken = tmp_path / "folder" / "engines.json"
    taken.mkdir(parents=True)
    assert serving(taken) == OURS
    assert list(taken.parent.iterdir()) == [taken]  # and nothing half-written is left
