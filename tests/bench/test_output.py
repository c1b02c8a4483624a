"""What ``--output DIR`` leaves: a page, Markdown and JSON of a result, or of a refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.bench import from_json
from orchestrator.bench.html import page
from orchestrator.bench.text import markdown
from orchestrator.bench.values import Measurement
from orchestrator.cli import report
from orchestrator.errors import Incomparable
from tests.bench.conftest import Write
from tests.bench.test_cli import PATIENCE, SHORT, orchestrator

THREE = ["report.html", "report.json", "report.md"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "command", [("bench", "--preset", "decode", "--rounds", "2"), ("compare", "--aa", "--pairs", "6")]
)
def test_a_result_is_kept_in_three_forms_that_agree_good(
    fake: Write, tmp_path: Path, command: tuple[str, ...]
) -> None:
    out = tmp_path / "not" / "there yet"
    profile = fake("quick", {"rate": 300, "ttft": 0.01})
    done = orchestrator(command[0], profile, *command[1:], *SHORT, "--output", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert names(out) == THREE
    found = from_json((out / "report.json").read_bytes())
    assert found == from_json(done.stdout.encode())
    assert (out / "report.html").read_text(encoding="utf-8") == page(found)
    assert (out / "report.md").read_text(encoding="utf-8") == markdown(found)


def test_a_refusal_is_kept_with_its_reasons_good(fake: Write, tmp_path: Path) -> None:
    well, cached = fake("well", {"rate": 300}), fake("cached", {"rate": 300, "cached_tokens": 15})
    (tmp_path / "report.json").write_text("of an earlier run")
    done = orchestrator("compare", well, cached, *SHORT, "--output", str(tmp_path), "--json")
    assert done.returncode == 5
    document = json.loads((tmp_path / "report.json").read_text())
    assert document == json.loads(done.stdout)
    for name in ("report.html", "report.md"):
        said = (tmp_path / name).read_text(encoding="utf-8")
        assert "came from a cache" in said
        assert "tok/s" not in said  # nobody is to believe a figure


# root may write everywhere, unless it lacks two capabilities: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
BOUND_BY_MODES = """
import ctypes, os, sys
PR_CAPBSET_DROP = 24
for capability in (1, 2) if os.geteuid() == 0 else ():
    if ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
os.execv(sys.executable, [sys.executable, "-m", "orchestrator", *sys.argv[1:]])
"""


def test_a_folder_that_is_read_only_is_told_before_it_is_measured_bad(fake: Write, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    done = subprocess.run(
        [sys.executable, "-c", BOUND_BY_MODES, "bench", fake("p"), "--output", str(locked / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


def test_a_folder_that_takes_nothing_is_told_before_it_is_measured_bad(fake: Write) -> None:
    done = orchestrator("bench", fake("p"), "--output", "/proc")
    assert done.returncode == 2
    assert "--output /proc: can't be written" in done.stderr
    assert "warm-up" not in done.stderr


FULL = """
import os, sys, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a page is larger
os.execv(sys.executable, [sys.executable, "-m", "orchestrator", *sys.argv[1:]])
"""


@pytest.mark.parametrize("asked", ["--json", "--markdown"])
def test_a_disk_that_is_full_in_the_end_costs_nothing_but_the_files_ugly(
    fake: Write, tmp_path: Path, own_home: Path, asked: str
) -> None:
    words = ("bench", fake("quick", {"rate": 300}), *SHORT, "--preset", "decode", "--rounds", "1")
    done = subprocess.run(
        [sys.executable, "-c", FULL, *words, "--output", str(tmp_path / "out"), asked],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "can't be written: File too large" in done.stderr
    assert names(tmp_path / "out") == []  # the half of a page would be taken for one
    if asked == "--json":
        assert isinstance(from_json(done.stdout.encode()), Measurement)
    else:
        assert "decode_tok_s" in done.stdout


def test_a_refusal_is_told_though_its_files_can_not_be_written_ugly(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refuse() -> None:
        out.rmdir()
        out.write_text("in the way")
        raise Incomparable(["too busy"])

    with pytest.raises(Incomparable, match="too busy"), report.kept(out):
        refuse()


def test_void_rounds_are_kept_in_a_refusal_good(tmp_path: Path) -> None:
    lines = ["void: round 1 (a): <too> busy", "void: round 2 (b): gone"]
    with pytest.raises(Incomparable), report.kept(tmp_path):
        raise Incomparable(["too many rounds were void"], voids=lines)
    assert json.loads((tmp_path / "report.json").read_text())["error"]["voids"] == lines
    assert "\n- void: round 1 (a): \\<too> busy\n" in (tmp_path / "report.md").read_text()
    assert "<li>void: round 1 (a): &lt;too&gt; busy</li>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_folder_that_can_not_be_is_told_before_it_is_measured_bad(
    fake: Write, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    extra = ("--aa",) if command == "compare" else ()
    done = orchestrator(command, fake("p"), *extra, "--output", str(tmp_path / "file" / "out"))
    assert done.returncode == 2
    assert "--output" in done.stderr
    assert "can't be written" in done.stderr
    assert "warm-up" not in done.stderr
