"""Stepping over strings in bulk: the same places as walking them one by one, or no answer."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import NotAModel
from orchestrator.gguf_header import read
from orchestrator.gguf_known import Known, measured
from tests.gguf_files import gguf_bytes, text
from tests.test_gguf_header import keys, write

# what vocabularies hold, and what no vocabulary should: nothing, zeros, lengths beyond a byte
STRINGS = st.one_of(
    st.binary(min_size=1, max_size=20),
    st.sampled_from([b"", b"\0", b"\0" * 7, b"\0" * 8, b"\0" * 40, b"\1" + b"\0" * 7 + b"x", b"a" * 300]),
    st.builds(lambda inner: struct.pack("<Q", len(inner)) + inner, st.binary(max_size=9)),
)


def measure(tmp_path, content: bytes, count: int, at: int = 0, window: int = 1 << 20) -> int | None:
    path = write(tmp_path, content, "strings")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return measured(descriptor, at, count, window)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("window", [1000, 1001, 4096, 1 << 20])
def test_ordinary_strings_are_measured_good(tmp_path, window):
    body = b"".join(text("token" * (number % 5 + 1)) for number in range(3000))
    assert measure(tmp_path, b"xyz" + body + b"behind", 3000, at=3, window=window) == len(body)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    strings=st.lists(STRINGS, min_size=1, max_size=60),
    behind=st.binary(max_size=30),
    window=st.integers(1000, 2000),
)
def test_measured_is_walked_or_nothing_ugly(tmp_path, strings, behind, window):
    parts = [text(each) for each in strings]
    # among enough ordinary ones, so that what is odd is not given up on at once
    body = b"".join(parts + [text("token")] * 4000)
    found = measure(tmp_path, body + behind, len(strings) + 4000, window=window)
    assert found == len(body) or (found is None and len(strings) > 10)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(noise=st.binary(max_size=400), count=st.integers(1, 60), window=st.integers(8, 400))
def test_any_bytes_are_walked_the_same_ugly(tmp_path, noise, count, window):
    place, walked = 0, True
    for _ in range(count):
        if place + 8 > len(noise):
            walked = False
            break
        place += 8 + struct.unpack_from("<Q", noise, place)[0]
    found = measure(tmp_path, noise, count, window=window)
    assert found in ({None, place} if walked and place <= len(noise) else {None})


# the last three would lead to the next string, were only the bytes looked at that the others have zero
@pytest.mark.parametrize(
    "wrong",
    [1 << 63, (1 << 64) - 4, (1 << 64) - 8, 300, 1 << 40, 5 + (1 << 40), 5 + (1 << 48), 5 + (1 << 56)],
)
def test_a_lying_length_is_not_believed_bad(tmp_path, wrong):
    # -4 as an unsigned number: added up without care it leads back to a place where a length may be
    strings = [text("token")] * 2000
    strings[1003] = struct.pack("<Q", wrong) + b"token"  # whose zeros are a word of their own
    assert measure(tmp_path, b"".join(strings), 2000) is None


def test_a_folder_reads_as_one_file_does_good(tmp_path):
    known = Known()
    for number in range(6):
        tokens = [f"t{each}" * (1 + each % 3) for each in range(2000 + number // 2)]
        path = write(
            tmp_path, gguf_bytes(keys(tokenizer__ggml__tokens=("arr:str", tokens))), f"{number}.gguf"
        )
        assert read(path, known) == read(path)


def test_a_fault_inside_is_told_with_its_place_bad(tmp_path):
    tokens = ["token"] * 2000
    content = gguf_bytes(keys(tokenizer__ggml__tokens=("arr:str", tokens)))
    place = content.index(text("token") * 2000) + 13 * 1500
    content = content[:place] + struct.pack("<Q", 1 << 50) + content[place + 8 :]
    path = write(tmp_path, content)
    with pytest.raises(NotAModel) as alone:
        read(path)
    with pytest.raises(NotAModel) as among:
        read(path, Known())
    assert among.value.offset == alone.value.offset == place
    assert str(among.value) == str(alone.value)


def test_big_endian_arrays_are_walked_ugly(tmp_path):
    tokens = ["token"] * 2000
    path = write(tmp_path, gguf_bytes(keys(tokenizer__ggml__tokens=("arr:str", tokens)), end=">"))
    assert read(path, Known()).vocabulary == 2000
