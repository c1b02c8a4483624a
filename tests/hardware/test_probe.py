"""Reading files and running programs without ever hanging or raising."""

from __future__ import annotations

import os
import sys

import pytest

from orchestrator.hardware import Tree, run_program
from orchestrator.hardware.probe import whole


def test_program_gives_both_streams_and_its_code_good():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    ran = run_program([sys.executable, "-c", code])
    assert (ran.code, ran.out, ran.err) == (3, "out\n", "err\n")


def test_program_past_its_deadline_is_ended_bad():
    ran = run_program([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)
    assert (ran.code, ran.err) == (None, "no answer within 0.2 s")


@pytest.mark.parametrize("argv", [["/nowhere/at/all"], ["nul\0byte"], ["/"]])
def test_program_that_can_not_start_says_why_bad(argv):
    ran = run_program(argv)
    assert ran.code is None
    assert ran.err


def test_pipe_in_a_files_place_does_not_hang_ugly(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert Tree(tmp_path).text("pipe") == ""


def test_why_a_file_has_no_text_is_told_apart_good(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    problems: list[str] = []
    tree = Tree(tmp_path)
    assert [tree.text(name, problems) for name in ("missing", "folder", "loop")] == [None] * 3
    assert problems == ["/folder: is a directory", "/loop: too many levels of symbolic links"]


@pytest.mark.parametrize(
    ("text", "base", "number"),
    [
        ("42\n", 10, 42), ("0x1002", 16, 0x1002), ("C8", 16, 0xC8), ("", 10, None), ("-1", 10, None),
        ("1_0", 10, None),
        ("٣", 10, None), ("9" * 5000, 10, None), (str(2**64 - 1), 10, 2**64 - 1), (str(2**64), 10, None),
    ],
)  # fmt: skip
def test_only_plain_numbers_are_numbers_good(text, base, number):
    assert whole(text, base) == number
