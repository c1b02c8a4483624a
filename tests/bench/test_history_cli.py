"""``history``, and what ``bench`` and ``compare`` leave in it, as a user has them."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from orchestrator.bench.against import Against
from orchestrator.bench.frames import from_json, to_json
from orchestrator.bench.history import FILE, History, Listing
from orchestrator.bench.values import Comparison
from orchestrator.cli import main
from orchestrator.cli.against import complete
from orchestrator.cli.history import record
from tests.bench import reports
from tests.bench.conftest import Write
from tests.bench.test_against import run
from tests.bench.test_cli import SHORT, orchestrator

QUICK = (*SHORT, "--preset", "decode", "--rounds", "1")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def history(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``orchestrator history`` with some arguments, in this process: most of a start is imports."""

    def called(*arguments: str) -> Done:
        capsys.readouterr()
        code = main(["history", *arguments])
        return Done(code, *capsys.readouterr())

    return called


@pytest.fixture
def three(own_home: Path) -> History:
    """A history of three runs: as fast, slower, and a comparison."""
    kept = History()
    kept.record(run(1.0, 1).result)
    kept.record(run(0.8, 2, started_at=reports.BEGAN + 60).result)
    kept.record(reports.comparison(started_at=reports.BEGAN + 120))
    return kept


def write(path: Path, **changes: object) -> str:
    """Write a report of a slower run; returns its path."""
    path.write_bytes(to_json(run(0.8, 5, **changes).result))  # type: ignore[arg-type]
    return str(path)


# -- recorded by themselves ------------------------------------------------------------------------------


def test_bench_and_compare_are_kept_by_themselves_good(fake: Write, own_home: Path) -> None:
    profile = fake("quick", {"rate": 300})
    done = orchestrator("bench", profile, *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    assert "kept as run 1" in done.stderr
    done = orchestrator("compare", profile, "--aa", *SHORT, "--pairs", "6", "--void-budget", "60")
    assert done.returncode == 0, done.stderr
    compared, measured = History().entries()
    assert (measured.id, measured.kind, measured.arms[0].name) == (1, "bench", "quick")
    assert measured.arms[0].profile == profile
    assert (compared.id, compared.kind) == (2, "compare")
    shown = orchestrator("history", "show", "2")
    assert shown.stdout == done.stdout  # as it was printed


def test_no_history_keeps_nothing_good(fake: Write, own_home: Path) -> None:
    done = orchestrator("bench", fake("quick", {"rate": 300}), *QUICK, "--no-history")
    assert done.returncode == 0, done.stderr
    assert not (own_home / FILE).exists()
    assert "kept" not in done.stderr


def test_a_history_that_takes_nothing_costs_no_result_ugly(fake: Write, own_home: Path) -> None:
    own_home.mkdir(mode=0o700)
    (own_home / FILE).write_bytes(b"this was never a database" * 1000)
    done = orchestrator("bench", fake("quick", {"rate": 300}), *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    assert from_json(done.stdout.encode()).kind == "bench"
    assert "warning: this run is not in the history" in done.stderr
    assert "moved away" in done.stderr
    assert (own_home / FILE).read_bytes() == b"this was never a database" * 1000


def test_a_run_is_kept_though_its_reader_left_ugly(fake: Write, own_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "bench", fake("quick", {"rate": 300}), *QUICK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 141, said
    assert len(History().entries()) == 1


def test_an_interrupted_run_is_kept_if_it_measured_anything_ugly(own_home: Path) -> None:
    assert record(reports.measurement(interrupted=True, results=())) is None
    assert record(reports.measurement(interrupted=True, all_void=True)) is None
    assert not (own_home / FILE).exists()
    assert record(reports.measurement(interrupted=True)) == 1


def test_bench_against_a_baseline_good(history: Run, fake: Write, own_home: Path, tmp_path: Path) -> None:
    fast, slow = fake("fast", {"rate": 300}), fake("slow", {"rate": 60})
    four = (*SHORT, "--preset", "decode", "--rounds", "6")
    assert orchestrator("bench", fast, *four).returncode == 0
    done = orchestrator("bench", slow, *four, "--baseline", "1", "--fail-if-slower", "5%", "--json")
    assert from_json(done.stdout.encode()).kind == "bench"  # one document, whatever became of it
    found = against_of(history, "1", "2")
    assert found.changes[0].ratio > 2
    assert done.returncode == (1 if found.slower == "yes" else 0), done.stderr
    assert "run 2" in done.stderr
    # `latest` is of this profile
    done = orchestrator("bench", fast, *four, "--baseline", "latest", "--allow", "engine")
    assert done.returncode == 0, done.stderr
    assert "A is run 1" in done.stdout


def against_of(history: Run, a: str, b: str) -> Against:
    """Return what ``history compare --json`` says."""
    done = history("compare", a, b, "--fail-if-slower", "5%", "--json")
    return msgspec.json.decode(done.stdout, type=Against)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--baseline", "7"), "there is no run 7"),
        (("--baseline", "latest"), "there are 0 runs of quick so far"),
        (("--baseline", "nowhere.json"), "neither a run nor a readable file"),
        (("--fail-if-slower", "5%"), "need --baseline"),
        (("--baseline", "7", "--fail-if-slower", "5"), "must be a share"),
        (("--baseline", "7", "--fail-if-inconclusive"), "needs --fail-if-slower"),
        (("--baseline", "7", "--allow", "weather"), "must be one of machine"),
    ],
)
def test_a_mistaken_baseline_costs_no_measurement_bad(
    fake: Write, own_home: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = orchestrator("bench", fake("quick", {"rate": 300}), *QUICK, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert not (own_home / FILE).exists()


def test_a_baseline_of_something_else_is_refused_after_the_result_bad(
    fake: Write, three: History, own_home: Path
) -> None:
    done = orchestrator("bench", fake("quick", {"rate": 300}), *QUICK, "--baseline", "1", "--json")
    assert done.returncode == 5
    assert from_json(done.stdout.encode()).kind == "bench"
    assert "--allow machine" in done.stderr
    assert len(three.entries()) == 4


# -- list and show ---------------------------------------------------------------------------------------


def test_the_list_good(history: Run, three: History) -> None:
    done = history()
    assert done.returncode == 0
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:4] == ["ID", "STARTED", "KIND", "PROFILE"]
    assert [line.split()[0] for line in lines] == ["3", "2", "1"]
    assert history("list").stdout == done.stdout
    found = msgspec.json.decode(history("--kind", "bench", "--json").stdout, type=Listing)
    assert [each.id for each in found.runs] == [2, 1]
    assert found.path == str(three.path)


def test_an_empty_list_says_how_one_begins_good(history: Run, own_home: Path) -> None:
    done = history()
    assert (done.returncode, done.stdout) == (0, "")
    assert "orchestrator bench" in done.stderr
    assert json.loads(history("--json").stdout)["runs"] == []


@pytest.mark.parametrize(
    ("since", "count"),
    [("2001-01-01", 3), ("2525-01-01T00:00", 0), ("1m", 0), ("9999w", 3), ("2025-06-15T15:08:00+00:00", 1)],
)
def test_since_takes_dates_and_ages_good(history: Run, three: History, since: str, count: int) -> None:
    found = json.loads(history("--since", since, "--json").stdout)
    assert len(found["runs"]) == count


def test_a_run_is_shown_in_every_form_good(history: Run, three: History, tmp_path: Path) -> None:
    assert "A is llama-server" in history("show").stdout
    assert "decode_tok_s" in history("show", "1").stdout
    assert "### llama-server against" in history("show", "3", "--markdown").stdout
    assert from_json(history("show", "1", "--json").stdout.encode()) == run(1.0, 1).result
    page = tmp_path / "page.html"
    assert history("show", "latest", "--html", str(page)).returncode == 0
    assert "<html" in page.read_text()


@pytest.mark.parametrize(
    "arguments",
    [("show", "{}"), ("compare", "1", "{}"), ("compare", "{}"), ("import", "{}")],
)
@pytest.mark.parametrize("endless", [True, False], ids=["endless", "huge"])
def test_a_file_that_is_no_report_by_its_size_is_refused_ugly(
    history: Run,
    three: History,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    endless: bool,
) -> None:
    monkeypatch.setattr("orchestrator.bench.history.LARGEST_FILE", 3 << 20)
    path = tmp_path / "huge.json"
    path.write_bytes(b" " * ((3 << 20) + 1))
    name = "/dev/zero" if endless else str(path)
    done = history(*(word.replace("{}", name) for word in arguments))
    assert done.returncode == 2
    assert f"history: {name}: more than 3 MiB, which no report has" in done.stderr
    assert len(three.ids()) == 3
    path.write_bytes(to_json(run(0.8, 5).result).ljust(3 << 20))  # the largest that there may be
    assert history("show", str(path)).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show", "9"), 2, "there is no run 9"),
        (("show", "1", "--markdown", "--json"), 2, "exclude each other"),
        (("show", "1", "--html", "/nowhere/x.html"), 2, "can't be written"),
        (("list", "--since", "yesterday"), 2, "must be a date"),
        (("list", "--limit", "0"), 2, "at least 1"),
        (("--json", "show"), 2, "options go behind `show`"),
        (("compare", "1", "2", "--fail-if-slower", "x"), 2, "must be a share"),
        (("compare", "1", "2", "--metric", "speed"), 2, "no metric named"),
        (("compare", "1", "3"), 5, "not one workload is in both"),
        (("remove", "1", "9"), 2, "there is no run 9"),
        (("remove",), 2, "missing argument"),
        (("import", "/dev/null"), 2, "can't be read"),
        (("import", "nowhere.json"), 2, "neither a run nor a readable file"),
    ],
)
def test_mistakes_are_told_bad(
    history: Run, three: History, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = history(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(three.ids()) == 3


def test_a_damaged_history_is_named_with_advice_ugly(history: Run, three: History) -> None:
    three.path.write_bytes(three.path.read_bytes()[:5000])
    for command in ((), ("show", "1"), ("compare", "1", "2"), ("remove", "1")):
        done = history(*command)
        assert done.returncode == 1, done.stderr
        assert str(three.path) in done.stderr
        assert "advice: the file is damaged and was left as it is" in done.stderr
    assert json.loads(history("--json").stdout)["error"]["type"] == "HistoryError"
    assert complete("") == []
    assert three.path.stat().st_size == 5000


# -- compare ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "arguments", "code", "said"),
    [
        ("1", "2", (), 0, "run 2 is slower than run 1"),
        ("1", "2", ("--fail-if-slower", "5%"), 1, "slower beyond 5%: decode (decode_tok_s)"),
        ("1", "2", ("--fail-if-slower", "0.5"), 0, "not slower beyond 50%"),
        ("2", "1", ("--fail-if-slower", "5%"), 0, "not slower beyond 5%"),
        ("1", "2", ("--fail-if-slower", "25%"), 0, "inconclusive"),
        ("1", "2", ("--fail-if-slower", "25%", "--fail-if-inconclusive"), 1, "inconclusive"),
        ("1", "latest~1", ("--fail-if-slower", "5%"), 1, "slower beyond 5%"),
        ("1", "2", ("--markdown", "--fail-if-slower", "5%"), 1, "### run 2 against run 1"),
    ],
)
def test_an_earlier_run_and_a_later_one_good(
    history: Run, three: History, a: str, b: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = history("compare", a, b, *arguments)
    assert (done.returncode, done.stderr) == (code, "")
    assert said in done.stdout
    assert "two runs at two times" in done.stdout


def test_files_are_compared_with_runs_good(history: Run, three: History, tmp_path: Path) -> None:
    path = write(tmp_path / "report.json")
    found = against_of(history, "1", path)
    assert (found.a.id, found.b.id, found.b.path) == (1, None, path)
    assert found.slower == "yes"
    assert len(three.ids()) == 3  # comparing keeps nothing


def test_a_different_machine_refuses_unless_allowed_bad(history: Run, three: History, tmp_path: Path) -> None:
    path = write(tmp_path / "report.json", machine={"cpu": "another"})
    refused = history("compare", "1", path, "--fail-if-slower", "5%", "--json")
    assert refused.returncode == 5
    assert json.loads(refused.stdout)["error"]["type"] == "Incomparable"
    assert "processor: a processor and another" in refused.stderr
    allowed = history("compare", "1", path, "--fail-if-slower", "5%", "--allow", "machine")
    assert allowed.returncode == 1
    assert "differs: processor: a processor and another" in allowed.stdout


# -- import, remove, complete ----------------------------------------------------------------------------


def test_reports_are_imported_once_and_removed_good(history: Run, three: History, tmp_path: Path) -> None:
    path = write(tmp_path / "report.json")
    assert history("import", path).stdout == "4\n"
    again = history("import", path)
    assert (again.returncode, again.stdout) == (0, "4\n")
    assert "is run 4 already" in again.stderr
    exported = history("show", "4", "--json").stdout
    piped = tmp_path / "exported.json"
    piped.write_text(exported)
    assert history("import", str(piped)).stdout == "4\n"  # spaces make no other report
    assert history("remove", "4", "latest").returncode == 0
    assert three.ids() == [2, 1]


def test_an_import_with_a_bad_file_keeps_none_bad(history: Run, three: History, tmp_path: Path) -> None:
    good = write(tmp_path / "report.json")
    assert history("import", good, "/dev/null").returncode == 2
    assert len(three.ids()) == 3


def test_ids_are_completed_good(three: History) -> None:
    assert complete("") == ["latest", "latest~1", "3", "2", "1"]
    assert complete("la") == ["latest", "latest~1"]
    done = orchestrator(
        _ORCHESTRATOR_COMPLETE="complete_bash", COMP_WORDS="orchestrator history show ", COMP_CWORD="3"
    )
    assert done.stdout.split() == ["latest", "latest~1", "3", "2", "1"]


def test_a_strange_name_does_not_steer_the_terminal_ugly(history: Run, own_home: Path) -> None:
    History().record(run(arm={"version": "1\x1b[2J", "model": None, "model_path": None}).result)
    assert "\x1b" not in history().stdout


def test_the_file_can_be_read_with_other_tools_good(three: History) -> None:
    found = sqlite3.connect(three.path)
    query = "SELECT json_extract(report, '$.verdict') FROM run WHERE kind = 'compare'"
    verdict = three.open("3").result
    assert isinstance(verdict, Comparison)
    assert found.execute(query).fetchall() == [(verdict.verdict,)]
    found.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_letter_that_the_locale_lacks_is_written_as_its_code_ugly(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(to_json(reports.comparison(names=("漢", "b"))))
    for words in ((), ("--markdown",), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "history", "show", str(path), *words],
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout.decode(encoding)
        assert ("漢" if encoding == "utf-8" else "\\u6f22") in said
        if words == ("--json",):
            assert from_json(said.encode()).arms[0].name == "漢"  # type: ignore[union-attr]
