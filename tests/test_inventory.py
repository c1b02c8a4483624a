"""The inventory: what is found, what it says, what it survives, and what it remembers."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import inventory
from orchestrator.inventory import Entry, scan, select
from orchestrator.inventory_files import UNFINISHED
from orchestrator.model_files import default_cache
from orchestrator.model_hub_store import Hub
from tests.gguf_files import F32, LLAMA_KEYS, Q8_0, Key, gguf_bytes, tiny_llama

MMPROJ: list[Key] = [
    ("general.architecture", "str", "clip"),
    ("general.type", "str", "mmproj"),
    ("clip.vision.projection_dim", "u32", 64),
]
ADAPTER: list[Key] = [("general.architecture", "str", "llama"), ("general.type", "str", "adapter")]


def gguf(path: Path, keys: list[Key] = LLAMA_KEYS, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(keys, **options))
    return path


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], size: int | None = None) -> None:
    width = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "U8": 1, "F8_E4M3": 1}
    at, header = 0, {}
    for name, (kind, shape) in tensors.items():
        length = width[kind]
        for each in shape:
            length *= each
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at if size is None else size))


def folder(path: Path, config: dict[str, Any] | None = None, **files: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = config or {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
        "hidden_size": 64,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    safetensors(path / "model.safetensors", {"a.weight": ("BF16", [64, 32]), "norm.weight": ("F32", [64])})
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def one(place: Path) -> Entry:
    found = scan([place])
    assert not found.troubles
    (only,) = found.entries
    return only


# -- what an entry says -----------------------------------------------------------------------------


def test_a_gguf_file_says_what_it_is_good(tmp_path: Path) -> None:
    path = gguf(tmp_path / "deep" / "er" / "small.gguf")
    found = one(tmp_path)
    assert found.path == str(path)
    assert (found.kind, found.architecture, found.name) == ("model", "llama", "Small")
    assert (found.parameters, found.quantisation) == (64 * 5 + 64 * 32 + 64, "Q8_0")
    # 74 blocks of 32 at 34 bytes, and 64 weights in f32
    assert found.bits_per_weight == pytest.approx((74 * 34 + 64 * 4) * 8 / 2432)
    assert (found.context, found.chat_template, found.engines) == (2048, True, ("llama-server",))
    assert found.size == path.stat().st_size
    assert found.fault is None


def test_a_safetensors_folder_says_what_it_is_good(tmp_path: Path) -> None:
    folder(tmp_path / "tiny", tokenizer_config={"chat_template": "{{ messages }}"})
    found = one(tmp_path)
    assert found.path == str(tmp_path / "tiny")
    assert (found.format, found.kind, found.architecture) == ("safetensors", "model", "llama")
    assert (found.parameters, found.quantisation, found.context) == (64 * 32 + 64, "bf16", 4096)
    assert found.bits_per_weight == pytest.approx((64 * 32 * 16 + 64 * 32) / (64 * 32 + 64))
    assert (found.chat_template, found.engines, found.files) == (True, ("vllm",), 1)


def test_packed_weights_are_counted_as_what_they_are_good(tmp_path: Path) -> None:
    place = folder(
        tmp_path / "awq", {"model_type": "qwen2", "quantization_config": {"quant_method": "awq", "bits": 4}}
    )
    tensors = {"q.qweight": ("I32", [64, 8]), "q.qzeros": ("I32", [1, 8]), "q.scales": ("F16", [1, 64])}
    safetensors(place / "model.safetensors", tensors)
    found = one(tmp_path)
    assert (found.parameters, found.quantisation) == (64 * 8 * 8, "awq")
    assert found.bits_per_weight == pytest.approx(4 + (8 * 32 + 64 * 16) / 4096)


def test_a_language_model_inside_a_multimodal_one_is_described_good(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 99},
    }
    folder(tmp_path / "m", config)
    found = one(tmp_path)
    assert (found.architecture, found.context) == ("gemma3_text", 99)


def test_shards_are_one_model_good(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m.gguf", split_tensors=10)
    found = one(tmp_path)
    assert found.files == 3
    assert found.path.endswith("m-00001-of-00003.gguf")
    assert found.size == sum(each.stat().st_size for each in tmp_path.iterdir())


def test_projectors_are_attached_to_the_models_they_were_made_for_good(tmp_path: Path) -> None:
    gguf(tmp_path / "model.gguf")
    wider = [
        ("llama.embedding_length", "u32", 128) if key[0] == "llama.embedding_length" else key
        for key in LLAMA_KEYS
    ]
    gguf(tmp_path / "other.gguf", wider)
    projector = gguf(tmp_path / "mmproj-f16.gguf", MMPROJ)
    gguf(tmp_path / "lora.gguf", ADAPTER)
    gguf(tmp_path / "elsewhere" / "model.gguf")
    found = {Path(each.path).relative_to(tmp_path).as_posix(): each for each in scan([tmp_path]).entries}
    assert found["model.gguf"].mmproj == (str(projector),)
    assert found["other.gguf"].mmproj == found["elsewhere/model.gguf"].mmproj == ()
    assert found["mmproj-f16.gguf"].kind == "mmproj"
    assert found["lora.gguf"].kind == "adapter"
    assert found["lora.gguf"].engines == ()


def test_an_adapters_folder_is_an_adapter_good(tmp_path: Path) -> None:
    place = folder(tmp_path / "lora", adapter_config={"peft_type": "LORA"})
    (place / "config.json").unlink()
    assert one(tmp_path).kind == "adapter"


# -- links ------------------------------------------------------------------------------------------


def hub(root: Path, commits: dict[str, str], main: str) -> Path:
    """Make the cache of one repository: commit -> blob that it names model.gguf."""
    repository = root / "models--google--gemma--it"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(main)
    for commit, blob in commits.items():
        content = repository / "blobs" / blob
        content.write_bytes(gguf_bytes())
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model.gguf").symlink_to(f"../../blobs/{blob}")
    return repository


def test_the_hugging_face_cache_is_understood_good(tmp_path: Path) -> None:
    repository = hub(tmp_path, {"aaa": "one", "bbb": "one", "ccc": "one"}, main="bbb")
    found = one(tmp_path)
    assert found.path == str(repository / "snapshots" / "bbb" / "model.gguf")
    assert found.repository == "google/gemma--it"


def test_another_commits_other_content_is_listed_too_good(tmp_path: Path) -> None:
    hub(tmp_path, {"aaa": "one", "bbb": "two"}, main="bbb")
    assert len(scan([tmp_path]).entries) == 2


def test_links_that_lead_in_circles_end_ugly(tmp_path: Path) -> None:
    gguf(tmp_path / "a" / "m.gguf")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "self").symlink_to("self")
    found = scan([tmp_path, tmp_path / "a"])
    assert len(found.entries) == 1


def test_two_names_of_one_file_are_one_model_ugly(tmp_path: Path) -> None:
    gguf(tmp_path / "m.gguf")
    (tmp_path / "n.gguf").symlink_to("m.gguf")
    os.link(tmp_path / "m.gguf", tmp_path / "o.gguf")
    assert one(tmp_path).path == str(tmp_path / "m.gguf")


# -- what is wrong ----------------------------------------------------------------------------------


def test_broken_files_are_listed_with_their_fault_bad(tmp_path: Path) -> None:
    gguf(tmp_path / "good.gguf")
    (tmp_path / "cut.gguf").write_bytes(gguf_bytes()[:-100])
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "gone.gguf").symlink_to("blob")
    os.mkfifo(tmp_path / "pipe.gguf")
    tiny_llama(tmp_path / "s.gguf", split_tensors=10)
    (tmp_path / "s-00001-of-00003.gguf").unlink()
    faults = {Path(each.path).name: each.fault for each in scan([tmp_path]).entries if each.kind == "broken"}
    assert sorted(faults) == [
        "cut.gguf", "empty.gguf", "gone.gguf", "page.gguf", "pipe.gguf", "s-00002-of-00003.gguf",
    ]  # fmt: skip
    assert "tensors need" in str(faults["cut.gguf"])
    assert "web page" in str(faults["page.gguf"])
    assert faults["gone.gguf"] == "the link gone.gguf leads to blob, which is not there"
    assert faults["pipe.gguf"] == "pipe.gguf is not a regular file"
    assert "s-00001-of-00003.gguf" in str(faults["s-00002-of-00003.gguf"])
    assert not any(
        str(tmp_path) in str(fault) for name, fault in faults.items() if name != "s-00002-of-00003.gguf"
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda place: (place / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda place: (place / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
        (lambda place: (place / "model.safetensors").write_bytes(b"\xff" * 20), "not a safetensors file"),
        (
            lambda place: (place / "model.safetensors").write_bytes(b"\x10" + bytes(7)),
            "ends inside its header",
        ),
        (lambda place: os.truncate(place / "model.safetensors", 200), "the download is incomplete"),
        (
            lambda place: (place / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}'
            ),
            "1 of 2 files missing: model-00001-of-00002.safetensors",
        ),
    ],
)
def test_a_broken_folder_is_listed_with_its_fault_bad(tmp_path: Path, damage: Any, says: str) -> None:
    damage(folder(tmp_path / "m"))
    found = one(tmp_path)
    assert found.kind == "broken"
    assert says in str(found.fault)


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
            os.seteuid(own)


def test_what_may_not_be_read_is_reported_bad(guest: Path) -> None:
    gguf(guest / "m.gguf").chmod(0)
    locked = guest / "locked"
    locked.mkdir(mode=0)
    found = scan([guest])
    locked.chmod(0o700)
    assert [each.fault for each in found.entries] == ["permission denied"]
    assert [(each.path, each.reason) for each in found.troubles] == [(str(locked), "permission denied")]


def test_a_place_that_is_not_there_is_reported_bad(tmp_path: Path) -> None:
    found = scan([tmp_path / "nowhere"])
    assert [each.reason for each in found.troubles] == ["no such file or directory"]


def test_other_folders_and_files_are_no_models_ugly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("GGUF")
    (tmp_path / "dir.gguf").mkdir()
    (tmp_path / "diffusion").mkdir()
    safetensors(tmp_path / "diffusion" / "unet.safetensors", {"a": ("F16", [2])})
    assert scan([tmp_path]).entries == ()


def test_what_is_being_made_is_no_model_yet_ugly(tmp_path: Path) -> None:
    work = tmp_path / f"{UNFINISHED}gemma-x1"
    work.mkdir()
    (work / "model.safetensors").write_bytes(b"half")
    assert scan([tmp_path]).entries == ()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mangled_folder_stops_a_scan_ugly(tmp_path: Path, data: st.DataObject) -> None:
    place = folder(tmp_path / "m", tokenizer_config={"chat_template": "x"})
    for path in place.iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
    assert len(scan([tmp_path]).entries) == 1


# -- the cache --------------------------------------------------------------------------------------


def test_what_has_not_changed_is_not_read_again_good(tmp_path: Path) -> None:
    models, cache = tmp_path / "models", tmp_path / "deep" / "cache.json"
    gguf(models / "a.gguf")
    folder(models / "b")
    first = scan([models], cache=cache)
    second = scan([models], cache=cache)
    assert (first.read, second.read) == (2, 0)
    assert second.entries == first.entries


def test_what_has_changed_is_read_again_good(tmp_path: Path) -> None:
    models, cache = tmp_path / "models", tmp_path / "cache.json"
    path = gguf(models / "a.gguf")
    gguf(models / "b.gguf")
    scan([models], cache=cache)
    renamed: list[Key] = [
        ("general.name", "str", "Other") if key[0] == "general.name" else key for key in LLAMA_KEYS
    ]
    gguf(path, renamed)
    os.utime(path, ns=(0, 0))
    (models / "b.gguf").unlink()
    again = scan([models], cache=cache)
    assert again.read == 1
    assert [each.name for each in again.entries] == ["Other"]


def test_a_projector_that_arrives_is_seen_although_the_model_is_remembered_good(tmp_path: Path) -> None:
    models, cache = tmp_path / "models", tmp_path / "cache.json"
    gguf(models / "a.gguf")
    scan([models], cache=cache)
    gguf(models / "mmproj.gguf", MMPROJ)
    assert scan([models], cache=cache).entries[0].mmproj == (str(models / "mmproj.gguf"),)
    (models / "mmproj.gguf").unlink()
    assert scan([models], cache=cache).entries[0].mmproj == ()


def test_broken_files_are_looked_at_again_good(tmp_path: Path) -> None:
    models, cache = tmp_path / "models", tmp_path / "cache.json"
    models.mkdir()
    (models / "a.gguf").write_text("<html>")
    scan([models], cache=cache)
    assert scan([models], cache=cache).read == 1


def test_other_folders_stay_remembered_good(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    gguf(tmp_path / "one" / "a.gguf")
    gguf(tmp_path / "two" / "b.gguf")
    scan([tmp_path / "one"], cache=cache)
    scan([tmp_path / "two"], cache=cache)
    assert scan([tmp_path / "one"], cache=cache).read == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b'{"format": 1, "kept": {"x": 3}}', b'{"format": 99, "kept": {}}', b"[]"],
)
def test_a_broken_cache_is_ignored_and_mended_ugly(tmp_path: Path, content: bytes) -> None:
    models, cache = tmp_path / "models", tmp_path / "cache.json"
    gguf(models / "a.gguf")
    cache.write_bytes(content)
    assert scan([models], cache=cache).read == 1
    assert scan([models], cache=cache).read == 0
    assert {path.name for path in tmp_path.iterdir()} == {"models", "cache.json", "engines.json"}


def test_a_cache_that_cant_be_written_is_no_fault_ugly(tmp_path: Path) -> None:
    gguf(tmp_path / "models" / "a.gguf")
    (tmp_path / "file").write_text("")
    assert len(scan([tmp_path / "models"], cache=tmp_path / "file" / "cache.json").entries) == 1


# -- places, order and choice -----------------------------------------------------------------------


def test_the_usual_places_are_those_that_exist_good(tmp_path: Path) -> None:
    wanted = ["own", ".cache/llama.cpp", ".cache/huggingface/hub", ".lmstudio/models"]
    for name in wanted:
        (tmp_path / name).mkdir(parents=True)
    environ = {"HOME": str(tmp_path), "ROCM_MODEL_DIR": "~/own"}
    assert inventory.places(environ) == tuple(tmp_path / name for name in wanted)


def test_variables_move_the_usual_places_good(tmp_path: Path) -> None:
    for name in ("llama", "hub", "hf/hub"):
        (tmp_path / name).mkdir(parents=True)
    environ = {"HOME": str(tmp_path), "LLAMA_CACHE": str(tmp_path / "llama"), "HF_HOME": str(tmp_path / "hf")}
    assert inventory.places(environ) == (tmp_path / "llama", tmp_path / "hf/hub")
    environ["HF_HUB_CACHE"] = str(tmp_path / "hub")
    assert inventory.places(environ) == (tmp_path / "llama", tmp_path / "hub")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_what_is_fetched_or_put_together_is_found_good(tmp_path: Path, variable: str) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "not/absolute", variable: str(tmp_path / "hub")}
    ours = (Hub.of(environ).cache, default_cache(environ))
    for folder in ours:
        folder.mkdir(parents=True)
    assert inventory.places(environ) == ours


def listed(letter: str, **fields: Any) -> Entry:
    return Entry(path=f"/m/{letter}", format="gguf", kind=fields.pop("kind", "model"), **fields)


ENTRIES = (
    listed("b", name="beta", size=2, parameters=None, engines=("llama-server",)),
    listed("a", name="Alpha", size=3, parameters=7, architecture="qwen2", engines=("vllm",)),
    listed("c", name=None, size=1, parameters=9, kind="mmproj"),
)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "abc"),
        ({"reverse": True}, "cba"),
        ({"sort": "size"}, "cba"),
        ({"sort": "size", "reverse": True}, "abc"),
        ({"sort": "parameters", "reverse": True}, "cab"),
        ({"sort": "name"}, "abc"),
        ({"sort": "name", "reverse": True}, "bac"),
        ({"words": ["ALPHA"]}, "a"),
        ({"words": ["qwen", "/m/"]}, "a"),
        ({"words": ["qwen", "beta"]}, ""),
        ({"kinds": ("mmproj",)}, "c"),
        ({"engine": "llama-server"}, "b"),
        ({"engine": "vllm-rocm"}, "a"),
        ({"engine": "vllm"}, "a"),
    ],
)
def test_entries_are_sorted_and_chosen_good(options: dict[str, Any], order: str) -> None:
    assert "".join(each.path[-1] for each in select(ENTRIES, **options)) == order


def test_the_same_vocabulary_is_compared_not_believed_ugly(tmp_path: Path) -> None:
    """Two vocabularies that begin alike and are as long: the second is walked like the first."""
    tokens = [f"token{number:05}" for number in range(3000)]
    other = [*tokens[:2000], "x", *("longer than before" for _ in range(999))]
    for name, words in (("a", tokens), ("b", tokens), ("c", other)):
        keys = [
            ("tokenizer.ggml.tokens", "arr:str", words) if key[0] == "tokenizer.ggml.tokens" else key
            for key in LLAMA_KEYS
        ]
        keys = [key for key in keys if key[0] != "tokenizer.ggml.scores"]
        gguf(
            tmp_path / f"{name}.gguf",
            keys,
            tensors=[("token_embd.weight", (64, 3000), Q8_0), ("n", (64,), F32)],
        )
    found = scan([tmp_path]).entries
    assert [each.fault for each in found] == [None] * 3
    assert {each.parameters for each in found} == {64 * 3000 + 64}
