"""`Source`: several files read like one, while they are rotated under the reader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.guardian import Log
from orchestrator.cli.logs import Source
from orchestrator.home import RunFolder


@pytest.fixture
def read() -> Iterator[Callable[[RunFolder], Source]]:
    """Make sources that are closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda run: stack.enter_context(contextlib.closing(Source(run)))


Read = Callable[[RunFolder], Source]


def folder(path: Path) -> RunFolder:
    """Return an empty run folder."""
    path.mkdir()
    return RunFolder(path)


@pytest.mark.parametrize(("count", "expected"), [(None, 9), (0, 0), (1, 1), (4, 4), (99, 9)])
def test_the_last_lines_across_files_good(
    tmp_path: Path, read: Read, count: int | None, expected: int
) -> None:
    run = folder(tmp_path / "one")
    lines = [f"line {number}\n".encode() for number in range(9)]
    for number, part in ((2, lines[:3]), (1, lines[3:6]), (0, lines[6:])):
        name = "engine.log" + (f".{number}" if number else "")
        (run.path / name).write_bytes(b"".join(part))
    assert b"".join(read(run).last(count)) == b"".join(lines[9 - expected :])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=40))
def test_nothing_is_lost_or_repeated_while_files_rotate_good(
    tmp_path_factory: pytest.TempPathFactory, read: Read, steps: list[tuple[int, bool]]
) -> None:
    """A reader that looks at least once a rotation sees every byte once, whenever it looks."""
    run = folder(tmp_path_factory.mktemp("run") / "one")
    log = Log(str(run.log), size=50, files=3)
    source = read(run)
    written, seen = b"", b"".join(source.last(None))
    behind = 0
    for number, (length, looks) in enumerate(steps):
        data = bytes([65 + number % 26]) * (length - 1) + b"\n"
        log.write(data)
        written += data
        behind += length
        if looks or behind > 60:
            seen += b"".join(source.more())
            behind = 0
    assert seen + b"".join(source.more()) == written


def test_a_reader_that_fell_far_behind_goes_on_with_the_oldest_ugly(tmp_path: Path, read: Read) -> None:
    run = folder(tmp_path / "one")
    log = Log(str(run.log), size=10, files=3)
    source = read(run)
    log.write(b"first\n")
    assert b"".join(source.last(None)) == b"first\n"
    for number in range(6):
        log.write(b"line %d....\n" % number)
    assert b"".join(source.more()) == b"line 0....\nline 4....\nline 5....\n"


def test_a_prefix_goes_before_whole_lines_only_good(tmp_path: Path, read: Read) -> None:
    run = folder(tmp_path / "one")
    source = read(run)
    source.prefix = b"one | "
    run.log.write_bytes(b"a\nb")
    assert b"".join(source.last(None)) == b"one | a\n"
    with run.log.open("ab") as file:
        file.write(b"c\n")
    assert b"".join(source.more()) == b"one | bc\n"
