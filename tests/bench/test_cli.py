"""``bench`` and ``compare`` as a user has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.bench import from_json, to_frame, to_json
from orchestrator.bench.values import Comparison, Measurement
from orchestrator.errors import OrchestratorError
from tests.bench.conftest import Write

PATIENCE = 200
SHORT = ("--prompt-tokens", "16", "--output-tokens", "12")


def orchestrator(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environ},
    )


def test_bench_measures_and_keeps_everything_good(fake: Write, tmp_path: Path) -> None:
    profile = fake("quick", {"rate": 300, "ttft": 0.02})
    done = orchestrator(
        "bench", profile, *SHORT, "--preset", "decode,ttft", "--output", str(tmp_path / "out"), "--json"
    )
    assert done.returncode == 0, done.stderr
    found = from_json(done.stdout.encode())
    assert isinstance(found, Measurement)
    assert [part.workload.name for part in found.results] == ["decode", "ttft"]
    figures = {each.metric: each.value for each in found.results[0].summaries}
    assert 0 < figures["decode_tok_s"] < 310
    assert figures["ttft_s"] > 0.019
    assert found.self_test.ceiling_events_s > 0
    assert from_json((tmp_path / "out" / "report.json").read_bytes()) == found
    assert "decode_tok_s" in (tmp_path / "out" / "report.md").read_text()


def test_compare_answers_good(fake: Write) -> None:
    fast, slow = fake("fast", {"rate": 300}), fake("slow", {"rate": 40})
    done = orchestrator("compare", fast, slow, *SHORT, "--pairs", "6", "--void-budget", "60", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first = found["decisions"][0]
    quiet = first["low"] > 1 + first["explainable"]  # whether other programs left the machine to us
    assert found["verdict"] == ("a_faster" if quiet else "inconclusive")
    assert first["ratio"] > 2
    assert found["format"] == "orchestrator-bench/1"
    assert len(found["decisions"][0]["ratios"]) == 6
    again = msgspec.convert(found, Comparison)
    assert again == from_json(to_json(again))


def test_compare_refuses_with_5_and_says_why_bad(fake: Write) -> None:
    well, cached = fake("well", {"rate": 300}), fake("cached", {"rate": 300, "cached_tokens": 15})
    done = orchestrator("compare", well, cached, *SHORT, "--json")
    assert done.returncode == 5
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "Incomparable"
    assert "came from a cache" in error["message"]


def test_a_refusal_of_bench_is_its_own_bad(fake: Write) -> None:
    done = orchestrator("bench", fake("cached", {"rate": 300, "cached_tokens": 15}), *SHORT)
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines()[-2].startswith("bench: cached: 15 of 16 prompt tokens came from a cache")


# how a measurement is asked to end: by Ctrl-C; as `timeout` does it, and from a script that runs it with &;
# by a terminal that is closed
ASKED = pytest.mark.parametrize(
    ("setting", "signals"),
    [
        (":", [signal.SIGINT]),
        ("trap '' INT", [signal.SIGTERM, signal.SIGTERM]),
        (":", [signal.SIGHUP]),
    ],
    ids=["ctrl-c", "timeout", "hangup"],
)


def asked_to_end(
    *arguments: str, setting: str, signals: list[signal.Signals], moment: str
) -> tuple[int, str, str]:
    """Run a command until it says a word, ask it to end, and return its exit code and what it printed."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'{setting}; exec "$@"', "sh", sys.executable, "-m", "orchestrator", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if moment in line:
            for number in signals:
                process.send_signal(number)
            break
    out, rest = process.communicate(timeout=PATIENCE)
    return process.returncode, out, "".join(lines) + rest


@ASKED
@pytest.mark.parametrize("command", [("compare", "--aa"), ("bench", "--preset", "decode")])
def test_an_end_before_anything_was_measured_is_said_bad(
    fake: Write, command: tuple[str, ...], setting: str, signals: list[signal.Signals]
) -> None:
    profile = fake("loads", {"load_time": 60.0})
    words = (command[0], profile, *command[1:], *SHORT)
    code, out, err = asked_to_end(*words, setting=setting, signals=signals, moment="starting")
    assert code == 130, err
    assert err.splitlines()[-1] == "interrupted before anything was measured"
    assert not out


@ASKED
@pytest.mark.parametrize(
    ("command", "moment", "said"),
    [
        (("compare", "--aa", "--pairs", "200"), "pair 3 of 200", "interrupted after 2 of 200 pairs"),
        (("bench", "--rounds", "200", "--preset", "decode"), "round 3 of 200", "interrupted in decode"),
    ],
)
def test_an_end_keeps_what_was_measured_good(
    fake: Write,
    command: tuple[str, ...],
    moment: str,
    said: str,
    setting: str,
    signals: list[signal.Signals],
) -> None:
    profile = fake("slow", {"rate": 60})
    words = (command[0], profile, *command[1:], *SHORT)
    code, out, err = asked_to_end(*words, setting=setting, signals=signals, moment=moment)
    assert code == 130, err
    assert said in out
    assert "decode_tok_s" in out
    assert "kept as run" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench",), "PROFILE or URL is missing"),
        (("bench", "{profile}", "--preset", "decod"), "no preset named"),
        (("bench", "{profile}", "--output-tokens", "x"), "must be numbers"),
        (("bench", "{profile}", "--api-key-env", "NOT_SET_ANYWHERE"), "is not set"),
        (("bench", "{profile}", "--prompt-tokens", "5000"), "exceeds the context"),
        (("compare", "{profile}"), "one arm is not enough"),
        (("compare", "{profile}", "--aa", "--residency", "both"), "must be auto"),
        (("compare", "{profile}", "--aa", "--metric", "speed"), "no metric named"),
    ],
)
def test_mistakes_on_the_command_line_bad(fake: Write, arguments: tuple[str, ...], said: str) -> None:
    profile = fake("p", {"rate": 300})
    done = orchestrator(*(word.replace("{profile}", profile) for word in arguments))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_a_report_of_another_format_is_refused_with_the_reason_bad() -> None:
    with pytest.raises(OrchestratorError, match="has the format orchestrator-bench/9"):
        from_json(b'{"format": "orchestrator-bench/9", "kind": "bench"}')
    for data in (b"", b"[]", b"{}", b'{"format": "orchestrator-bench/1", "kind": "bench"}', b"\xff"):
        with pytest.raises(OrchestratorError, match=r"^report: "):
            from_json(data)


def test_without_pandas_there_is_advice_ugly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    empty: Any = None
    with pytest.raises(OrchestratorError, match="pandas is not installed"):
        to_frame(empty)
