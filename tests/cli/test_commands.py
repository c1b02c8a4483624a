"""The commands that start nothing, and what all commands have in common."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from orchestrator.cli import documents, faults, main
from orchestrator.discovery import installed
from orchestrator.errors import ExitedEarly, Incomparable, OrchestratorError, RequestError
from tests.cli.conftest import Cli, Start, Write

ROOT = Path(__file__).parent.parent.parent
BAD_PROFILES = sorted((ROOT / "tests" / "data" / "bad_profiles").glob("*.y*ml"))


# -- check ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", BAD_PROFILES, ids=lambda path: path.name)
def test_check_refuses_every_bad_profile_bad(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr()
    assert not said.out
    lines = [line for line in said.err.splitlines() if not line.startswith("advice: ")]
    assert lines
    assert all(line.startswith(f"profile: {path.parent}") for line in lines)


def test_check_goes_on_after_a_bad_profile_bad(cli: Cli, fake: Write, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("slots: 0\n")
    done = cli("check", str(tmp_path / "bad.yaml"), fake("fine"))
    assert done.returncode == 2
    assert done.stdout == f"ok {tmp_path / 'fine.yaml'}\n"
    document = msgspec.json.decode(
        cli("check", str(tmp_path / "bad.yaml"), fake("fine"), "--json").stdout, type=documents.Check
    )
    assert [entry.ok for entry in document.profiles] == [False, True]
    assert {problem.key for problem in document.profiles[0].problems} >= {"slots"}


def test_check_minds_overrides_bad(cli: Cli, fake: Write) -> None:
    assert cli("check", fake(), "--set", "slots=0").returncode == 2
    assert cli("check", fake(), "--backend", "nobody").returncode == 2


# -- plan, schema, doctor -----------------------------------------------------------------------------
def test_plan_shows_what_would_be_started_good(cli: Cli, fake: Write) -> None:
    profile = fake("one", slots=3, context=64, env={"HF_TOKEN": "hidden-from-view", "PLAIN": "yes"})
    done = cli("plan", profile, "--json")
    found = msgspec.json.decode(done.stdout, type=documents.Plan)
    assert found.argv[found.argv.index("--ctx-size") + 1] == "192"
    assert (found.slots, found.context) == (3, 64)
    assert found.binary.source == "the profile's `command`"
    assert found.environment.set["LLAMA_API_KEY"].startswith("(a fresh key")
    assert found.environment.set["PLAIN"] == "yes"
    assert "LLAMA_ARG_*" in found.environment.removed
    assert not {*found.environment.removed} & {*found.environment.set}
    assert found.memory is not None
    assert found.memory.host.weights > 0
    assert found.memory.verdict in {"fits", "tight", "no", "unknown"}
    text = cli("plan", profile).stdout
    assert "--ctx-size 192" in text
    assert "hidden-from-view" not in text + done.stdout


def test_plan_quotes_for_a_shell_good(cli: Cli, fake: Write, tmp_path: Path) -> None:
    done = cli("plan", fake(args=["--foo", "it's; rm -rf $HOME"]))
    assert done.stdout.splitlines()[-1].endswith("""--foo 'it'"'"'s; rm -rf $HOME'""")


@pytest.mark.parametrize(("content", "word"), [(b"", "GGUF"), (b"GGUF\x03\x00", "GGUF")])
def test_plan_with_a_broken_model_bad(
    cli: Cli, fake: Write, tmp_path: Path, content: bytes, word: str
) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    done = cli("plan", fake(model=str(tmp_path / "broken.gguf")))
    assert done.returncode == 2
    assert word.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_schema_is_a_json_schema_good(cli: Cli) -> None:
    assert json.loads(cli("schema").stdout)["$schema"].startswith("https://json-schema.org/")


def test_doctor_says_what_it_found_good(cli: Cli) -> None:
    done = cli("doctor", "--json")
    found = msgspec.json.decode(done.stdout, type=documents.Doctor)
    assert done.returncode == (0 if found.ok else 3)
    assert any(finding.subject.startswith("llama-server") for finding in found.findings)


# -- all of them ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments", [[], ["bogus"], ["up"], ["up", "--port", "x", "a.yaml"], ["ps", "--wrong"], ["run"]]
)
def test_a_wrong_command_line_ends_with_2_bad(cli: Cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--port", "-1", "x"], "'--port': must be at least 0"),
        (["run", "--top-p", "2", "x"], "'--top-p': must be at most 1"),
        (["models", "/no/such/folder"], "models: no such folder: /no/such/folder"),
    ],
)
def test_a_wrong_value_is_told_in_our_words_bad(cli: Cli, arguments: list[str], says: str) -> None:
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_without_a_word_it_shows_its_help_as_it_is_bad(cli: Cli) -> None:
    done = cli()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == cli("--help").stdout


def test_a_wrong_command_line_with_json_is_a_document_bad(cli: Cli) -> None:
    fault = msgspec.json.decode(cli("ps", "--json", "--wrong").stdout, type=documents.Error).error
    assert (fault.type, fault.exit_code) == ("UsageError", 2)


def test_every_command_explains_itself_good(cli: Cli) -> None:
    done = cli("-h")
    assert done.returncode == 0
    for name in ("up", "ps", "logs", "down", "run", "chat", "plan", "check", "schema", "doctor"):
        assert f"  {name} " in done.stdout
        assert cli(name, "--help").stdout.startswith(f"Usage: orchestrator {name}")


def test_the_ways_to_call_it_are_one_good(cli: Cli) -> None:
    wanted = cli("--version").stdout
    assert wanted.startswith("orchestrator ")
    script = Path(sys.executable).with_name("orchestrator")
    for command in ([sys.executable, "-m", "orchestrator.cli"], [str(script)]):
        assert subprocess.run([*command, "--version"], capture_output=True, text=True).stdout == wanted


def test_help_loads_nothing_heavy_good() -> None:
    code = "import sys, orchestrator.cli as cli; cli.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    heavy = {
        "pydantic",
        "httpx",
        "aiohttp",
        "rich",
        "yaml",
        "gguf",
        "numpy",
        "asyncio",
        "structlog",
        "msgspec",
    }
    assert not heavy & set(done.stderr.split())


def test_completion_can_be_had_good(cli: Cli) -> None:
    done = cli(
        "--show-completion",
        environ={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "SHELL": "/bin/bash"},
    )
    assert done.returncode == 0 or "--show-completion" in done.stderr


def offered(cli: Cli, line: str, **environ: str) -> list[str]:
    """Return what bash is offered at the Tab key after `line`."""
    words = f"orchestrator {line}"
    done = cli(environ={"_ORCHESTRATOR_COMPLETE": "complete_bash", "COMP_WORDS": words,
                        "COMP_CWORD": str(words.count(" ")), **environ})  # fmt: skip
    assert done.returncode == 0
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "line", ["up --backend ", "plan x --backend ", "switch --backend ", "engines install "]
)
def test_the_tab_key_offers_engines_good(cli: Cli, line: str) -> None:
    assert offered(cli, line) == list(installed())
    assert offered(cli, f"{line}vllm-r") == ["vllm-rocm"]


def test_the_tab_key_offers_what_runs_good(cli: Cli, start: Start, fake: Write) -> None:
    assert not offered(cli, "down ")
    up = start("up", fake("one"), fake("two"), "--port", "0")
    up.ready()
    up.ready()
    for command in ("down", "switch", "logs"):
        assert offered(cli, f"{command} ") == ["one", "two"]
        assert offered(cli, f"{command} t") == ["two"]
    up.signal(signal.SIGINT)
    up.wait()
    assert not offered(cli, "down ")
    assert offered(cli, "logs ") == ["one", "two"], "of what has ended too"


def test_the_tab_key_is_silent_where_nothing_can_be_read_bad(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in ("down", "switch", "logs"):
        assert not offered(cli, f"{command} ", ORCHESTRATOR_HOME=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OrchestratorError("x: y"), 1),
        (faults.UsageError("x: y"), 2),
        (ExitedEarly("x: y", code=1, signal=None, log_tail=["a", "b\x1b[31m"], advice="mend it"), 3),
        (RequestError("x: y"), 4),
        (Incomparable(["x: y"]), 5),
        (ZeroDivisionError("x: y"), 1),
    ],
)
def test_every_error_has_its_exit_code_and_document_good(error: Exception, code: int) -> None:
    found = faults.describe(error)
    assert found["exit_code"] == code
    assert "x: y" in found["message"]
    msgspec.json.decode(msgspec.json.encode({"error": found}), type=documents.Error)


def test_an_error_is_rendered_with_the_engines_lines_and_advice_good() -> None:
    error = ExitedEarly("x: y", code=1, signal=None, log_tail=["one", "two \x1b[31mred"], advice="mend it")
    assert faults.render(faults.describe(error)) == "x: y\n    one\n    two  [31mred\nadvice: mend it"


def test_a_fault_of_ours_shows_its_traceback_only_when_asked_ugly(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    environ = {"ORCHESTRATOR_HOME": str(tmp_path / "blocked" / "home")}
    done = cli("ps", environ=environ)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "Traceback" in cli("ps", environ={**environ, "ORCHESTRATOR_DEBUG": "1"}).stderr


def test_the_first_profile_is_right_good(cli: Cli) -> None:
    path = str(ROOT / "profiles" / "gemma.yaml")
    done = cli("check", path)
    assert (done.returncode, done.stdout) == (0, f"ok {path}\n")


def test_a_copy_of_the_first_profile_is_right_wherever_it_lies_good(cli: Cli, tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    copy.write_text((ROOT / "profiles" / "gemma.yaml").read_text())
    assert cli("check", str(copy)).returncode == 0
    (tmp_path / "same.yaml").write_text("extends: mine.yaml\nbackend: llama-server\n")
    for name in ("mine.yaml", "same.yaml"):
        done = cli("plan", str(tmp_path / name), "--json")
        argv = msgspec.json.decode(done.stdout, type=documents.Plan).argv
        template = Path(argv[argv.index("--chat-template-file") + 1])
        assert "<start_of_turn>" in template.read_text()
