"""What a model takes, by arithmetic that is written out here, and what follows from it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.gguf_header import Header, read
from orchestrator.hardware import fit, fit_layers
from orchestrator.hardware.fit import MARGIN, MIB, Estimate, Part, Room, Wish, estimate, verdict
from orchestrator.hardware.fit_advice import budget
from tests.gguf_files import F32, Q8_0, gguf_bytes
from tests.hardware.shapes import SHAPES, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def header(folder: Path, name: str, **changes: Any) -> Header:
    path = folder / f"{name}-{abs(hash(str(changes)))}.gguf"
    return read(write(replace(SHAPES[name], **changes), path))


def kv(header: Header, **wish: Any) -> int:
    return estimate(header, Wish(**wish)).host.kv


# -- the cache --------------------------------------------------------------------------------------


def test_grouped_query_attention_keeps_only_key_value_heads_good(folder: Path) -> None:
    llama = header(folder, "llama-3.1-8b")
    # 32 layers, 8 heads of 128 for keys and for values, 2 bytes
    assert kv(llama, context=8192) == 32 * 8192 * 8 * (128 + 128) * 2
    assert kv(llama, context=8192, slots=4) == 4 * kv(llama, context=8192)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("f32", 32), ("bf16", 16), ("q8_0", 8.5), ("q5_1", 6), ("q5_0", 5.5), ("q4_1", 5), ("q4_0", 4.5)],
)
def test_a_quantised_cache_takes_what_its_blocks_take_good(folder: Path, kind: str, bits: float) -> None:
    assert kv(header(folder, "llama-3.1-8b"), context=4096, kv_type=kind) == 32 * 4096 * 2048 * bits / 8


@pytest.mark.parametrize(
    ("name", "full"), [("gemma-3-4b", 5), ("gemma-2-9b", 21), ("gpt-oss-20b", 12), ("phi-4", 40)]
)
def test_windowed_layers_keep_their_window_and_a_batch_good(folder: Path, name: str, full: int) -> None:
    shape = SHAPES[name]
    cell = int(shape.kv_heads) * shape.head_length * 2 * 2  # type: ignore[call-overload]
    window = -(-(shape.window + 512) // 256) * 256
    cells = full * 131072 + (shape.layers - full) * window
    assert kv(header(folder, name, context=131072), context=131072) == cells * cell


def test_a_window_is_never_larger_than_the_context_ugly(folder: Path) -> None:
    gemma = header(folder, "gemma-2-2b")
    assert kv(gemma, context=2048) == 26 * 2048 * 4 * 512 * 2


def test_a_pattern_in_the_file_wins_good(folder: Path, tmp_path: Path) -> None:
    keys = [
        ("general.architecture", "str", "unheard-of"),
        ("unheard-of.block_count", "u32", 4),
        ("unheard-of.embedding_length", "u32", 64),
        ("unheard-of.attention.head_count", "u32", 1),
        ("unheard-of.attention.sliding_window", "u32", 256),
        ("unheard-of.attention.sliding_window_pattern", "arr:bool", [True, False, True, True]),
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, [("token_embd.weight", (64, 32), F32)]))
    windows = [layer.window for layer in fit_layers.layers(read(path))]
    assert windows == [256, 0, 256, 256]
    keys[-1] = ("unheard-of.attention.sliding_window_pattern", "u32", 2)
    path.write_bytes(gguf_bytes(keys, [("token_embd.weight", (64, 32), F32)]))
    assert [layer.window for layer in fit_layers.layers(read(path))] == [256, 0, 256, 0]


def test_a_window_without_a_known_pattern_counts_every_layer_whole_ugly(tmp_path: Path) -> None:
    keys = [
        ("general.architecture", "str", "unheard-of"), ("unheard-of.block_count", "u32", 2),
        ("unheard-of.embedding_length", "u32", 64), ("unheard-of.attention.head_count", "u32", 1),
        ("unheard-of.attention.sliding_window", "u32", 256),
    ]  # fmt: skip
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, [("token_embd.weight", (64, 32), F32)]))
    assert kv(read(path), context=4096) == 2 * 4096 * 128 * 2


def test_latent_attention_keeps_one_vector_good(folder: Path) -> None:
    # 27 layers, one head of 512 latent and 64 rotated elements, no values beside
    assert kv(header(folder, "deepseek-v2-lite"), context=4096) == 27 * 4096 * 576 * 2


def test_recurrent_layers_keep_a_state_a_slot_whatever_the_context_good(folder: Path) -> None:
    mamba = header(folder, "mamba-2.8b")
    state = 64 * 4 * (3 * 5120 + 16 * 5120)
    assert kv(mamba, context=256) == kv(mamba, context=1 << 20) == state
    assert kv(mamba, context=256, slots=3) == 3 * state


def test_hybrid_layers_keep_what_each_is_made_for_good(folder: Path) -> None:
    granite = header(folder, "granite-4.0-h-micro")
    state = 36 * 4 * (3 * (4096 + 2 * 128) + 128 * 4096)
    assert kv(granite, context=4096, slots=2) == 2 * (state + 4 * 4096 * 8 * 128 * 2)
    assert kv(header(folder, "lfm2-1.2b"), context=4096) == 10 * 4 * 2048 * 2 + 6 * 4096 * 8 * 128 * 2


def test_contexts_are_rounded_up_as_llama_cpp_does_ugly(folder: Path) -> None:
    llama = header(folder, "llama-3.1-8b")
    assert kv(llama, context=1000) == kv(llama, context=1024)
    assert kv(llama, context=1, slots=3) == 3 * kv(llama, context=256)


def test_layers_that_predict_further_tokens_keep_nothing_good(tmp_path: Path) -> None:
    keys = [
        ("general.architecture", "str", "glm4moe"), ("glm4moe.block_count", "u32", 3),
        ("glm4moe.nextn_predict_layers", "u32", 1), ("glm4moe.embedding_length", "u32", 64),
        ("glm4moe.attention.head_count", "u32", 1),
    ]  # fmt: skip
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, [("token_embd.weight", (64, 32), F32)]))
    assert kv(read(path), context=256) == 2 * 256 * 128 * 2


# -- where things go --------------------------------------------------------------------------------


def test_on_the_cpu_everything_is_on_the_host_good(folder: Path) -> None:
    found = estimate(header(folder, "llama-3.1-8b"), Wish(context=4096, gpu_layers=10))
    assert found.device == Part()
    assert found.gpu_layers == 0
    assert found.host.weights == header(folder, "llama-3.1-8b").tensor_bytes


def test_layers_go_to_the_card_with_their_cache_the_output_first_good(folder: Path) -> None:
    llama = header(folder, "llama-3.1-8b")
    output = sum(each.bytes for each in llama.tensors if each.name.startswith("output"))
    embedding = next(each.bytes for each in llama.tensors if each.name == "token_embd.weight")
    layer = sum(each.bytes for each in llama.tensors if each.name.startswith("blk.31."))
    wish = Wish(context=4096, kind="rocm")
    one, eleven, whole = (estimate(llama, replace(wish, gpu_layers=count)) for count in (1, 11, None))
    assert (one.device.weights, one.device.kv) == (output, 0)
    assert eleven.device.weights == output + 10 * layer
    assert eleven.device.kv == 10 * 4096 * 2048 * 2
    assert eleven.host.kv == 22 * 4096 * 2048 * 2
    assert whole.device.weights == llama.tensor_bytes - embedding
    assert (whole.host.weights, whole.host.kv, whole.gpu_layers) == (embedding, 0, 33)


def test_an_embedding_that_is_the_output_too_is_copied_to_the_card_good(folder: Path) -> None:
    gemma = header(folder, "gemma-3-4b")
    found = estimate(gemma, Wish(context=4096, kind="cuda"))
    embedding = next(each.bytes for each in gemma.tensors if each.name == "token_embd.weight")
    assert found.device.weights == gemma.tensor_bytes
    assert found.host.weights == embedding


def test_every_card_has_a_runtime_of_its_own_good(folder: Path) -> None:
    llama = header(folder, "llama-3.1-8b")
    one, two = (estimate(llama, Wish(context=4096, kind="rocm", cards=count)).device for count in (1, 2))
    assert two.overhead == 2 * one.overhead


def test_projectors_and_adapters_are_loaded_too_good(folder: Path, tmp_path: Path) -> None:
    keys = [
        ("general.architecture", "str", "clip"), ("clip.vision.image_size", "u32", 896),
        ("clip.vision.patch_size", "u32", 14), ("clip.vision.embedding_length", "u32", 1152),
        ("clip.vision.feed_forward_length", "u32", 4304), ("clip.vision.attention.head_count", "u32", 16),
    ]  # fmt: skip
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(gguf_bytes(keys, [("v.patch", (1024, 64), Q8_0)]))
    projector = read(path)
    llama, wish = header(folder, "llama-3.1-8b"), Wish(context=4096, kind="rocm")
    bare, seeing = estimate(llama, wish), estimate(llama, replace(wish, mmproj=projector))
    assert seeing.device.weights - bare.device.weights == 1024 * 64 // 32 * 34
    assert seeing.device.compute - bare.device.compute >= 16 * 4096 * 4096 * 4
    assert estimate(llama, replace(wish, adapters=(projector,))).device.weights == seeing.device.weights


def test_the_logits_of_one_token_a_slot_take_less_than_those_of_all_good(folder: Path) -> None:
    gemma = header(folder, "gemma-3-1b")
    all_of_them, one = (
        estimate(gemma, Wish(context=4096, outputs=count)).host.compute for count in (None, 1)
    )
    assert all_of_them - one > 512 * 262144 * 4 - 3 * 512 * 6912 * 4 - MIB


def test_caches_that_are_not_counted_are_named_ugly(tmp_path: Path) -> None:
    keys = [("general.architecture", "str", "deepseek4"), ("deepseek4.block_count", "u32", 1)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, [("token_embd.weight", (64, 32), F32)]))
    assert estimate(read(path), Wish(context=4096)).notes


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(SHAPES)),
    context=st.integers(1, 200_000),
    slots=st.integers(1, 64),
    layers=st.none() | st.integers(0, 100),
    kind=st.sampled_from(["cpu", "rocm", "cuda", "vulkan"]),
    flash=st.booleans(),
)
def test_more_never_takes_less_good(
    folder: Path, name: str, context: int, slots: int, layers: int | None, kind: str, flash: bool
) -> None:
    path = folder / f"{name}.gguf"
    model = read(path if path.exists() else write(SHAPES[name], path))
    wish = Wish(context=context, slots=slots, gpu_layers=layers, kind=kind, flash_attention=flash)
    found = estimate(model, wish)

    def total(wish: Wish) -> int:
        other = estimate(model, wish)
        return other.device.total + other.host.total

    assert min(found.host.weights, found.host.kv, found.host.compute, found.device.total) >= 0
    assert found.device.weights + found.host.weights >= model.tensor_bytes
    assert total(replace(wish, context=context + 256)) >= total(wish)
    # not for any other number: a batch is rounded up to a multiple of the slots
    assert total(replace(wish, slots=slots * 2)) >= total(wish)
    assert total(replace(wish, kv_type="q4_0")) <= total(wish)


# -- the verdict, and what would fit ----------------------------------------------------------------


def asked(device: int, host: int) -> Estimate:
    return Estimate(Part(weights=device), Part(weights=host), 1)


@pytest.mark.parametrize(
    ("needs", "free", "answer", "short", "where"),
    [
        ((100, 10), (100 + MARGIN, 10 + MARGIN), "fits", 0, "host"),
        ((100, 10), (99 + MARGIN, 10 + MARGIN), "tight", 0, "device"),
        ((100, 10), (100, 10 + MARGIN), "tight", 0, "device"),
        ((100, 10), (99, 10 + MARGIN), "no", 1, "device"),
        ((100, 10), (100 + MARGIN, 7), "no", 3, "host"),
        ((0, 10), (0, 10 + MARGIN), "fits", 0, "host"),
        ((0, 10), (None, 10 + MARGIN), "fits", 0, "host"),
        ((100, 10), (None, 10 + MARGIN), "unknown", 0, "device"),
        ((100, 10), (None, 9), "no", 1, "host"),
    ],
)
def test_the_worse_place_decides_good(
    needs: tuple[int, int], free: tuple[int | None, int | None], answer: str, short: int, where: str
) -> None:
    found = verdict(asked(*needs), Room(*free))
    assert (found.answer, found.short, found.where) == (answer, short, where)


GIB = 1 << 30
ROOM = Room(16 * GIB, 32 * GIB)


def test_the_largest_context_fits_and_a_larger_one_does_not_good(folder: Path) -> None:
    llama, wish = header(folder, "llama-3.1-8b"), Wish(context=1, kind="rocm")
    found = fit.largest_context(llama, wish, ROOM)
    assert found is not None
    assert 0 < found < 131072
    assert found % 256 == 0
    assert fit.fits(llama, replace(wish, context=found), ROOM)
    assert not fit.fits(llama, replace(wish, context=found + 256), ROOM)


def test_the_largest_context_is_the_models_own_at_most_good(folder: Path) -> None:
    wish = Wish(context=1, kind="rocm")
    assert fit.largest_context(header(folder, "qwen3-0.6b"), wish, ROOM) == 40960
    assert fit.largest_context(header(folder, "qwen3-0.6b", context=1000), wish, ROOM) == 1000
    assert fit.largest_context(header(folder, "qwen3-0.6b", context=100), wish, ROOM) == 100
    assert fit.largest_context(header(folder, "mixtral-8x7b"), wish, ROOM) is None


def test_the_most_layers_fit_and_one_more_does_not_good(folder: Path) -> None:
    mixtral, wish = header(folder, "mixtral-8x7b"), Wish(context=4096, kind="rocm")
    found = fit.largest_gpu_layers(mixtral, wish, ROOM)
    assert found is not None
    assert 1 < found < 33
    assert fit.fits(mixtral, replace(wish, gpu_layers=found), ROOM)
    assert not fit.fits(mixtral, replace(wish, gpu_layers=found + 1), ROOM)
    assert fit.largest_gpu_layers(mixtral, wish, Room(GIB // 2, None)) is None
    assert fit.largest_gpu_layers(header(folder, "qwen3-8b"), wish, ROOM) == 37


def test_what_fits_needs_no_advice_good(folder: Path) -> None:
    assert budget(header(folder, "qwen3-8b"), Wish(context=4096, kind="rocm"), ROOM).advice == ()


def test_advice_holds_good(folder: Path) -> None:
    """Every single piece of advice, followed, makes it fit."""
    llama, wish = header(folder, "llama-3.1-8b"), Wish(context=32768, slots=4, kind="rocm")
    found = budget(llama, wish, ROOM)
    assert found.verdict.answer == "no"
    said = dict(each.split(": ") for each in found.advice if each.startswith(("context", "slots", "kv")))
    assert set(said) == {"context", "slots", "kv_cache_type"}
    for change in (
        {"kv_type": said["kv_cache_type"]}, {"context": int(said["context"])}, {"slots": int(said["slots"])}
    ):  # fmt: skip
        assert fit.fits(llama, replace(wish, **change), ROOM)
    assert any(each.startswith("gpu_layers: ") for each in found.advice)


def test_a_model_that_is_too_large_is_wanted_smaller_or_partly_on_the_cpu_good(folder: Path) -> None:
    found = budget(header(folder, "mixtral-8x7b"), Wish(context=4096, kind="rocm"), ROOM)
    assert [each.partition(":")[0] for each in found.advice] == [
        "gpu_layers",
        "a smaller quantisation of the model, such as IQ2_XXS (2.4 bits a weight)",
    ]


def test_several_changes_are_advised_where_none_is_enough_good(folder: Path) -> None:
    llama, wish = header(folder, "llama-3.1-8b"), Wish(context=131072, slots=1024)
    (advice,) = budget(llama, wish, Room(None, 8 * GIB)).advice
    match = re.fullmatch(r"context: (\d+), slots: 1 and kv_cache_type: q8_0 together", advice)
    assert match
    assert 8192 < int(match[1]) < 131072
    assert fit.fits(llama, Wish(context=int(match[1]), kv_type="q8_0"), Room(None, 8 * GIB))


def test_nothing_is_advised_where_nothing_would_do_bad(folder: Path) -> None:
    assert budget(header(folder, "mixtral-8x7b"), Wish(context=4096), Room(None, GIB)).advice == ()


def test_shapes_are_those_that_were_published_good(folder: Path) -> None:
    """Parameter counts as their makers state them, in billions: a shape that is wrong would miss."""
    stated = {
        "llama-2-7b": 6.74, "llama-3.1-8b": 8.03, "llama-3.2-1b": 1.24, "mistral-7b-v0.3": 7.25,
        "mixtral-8x7b": 46.7, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88,
        "gemma-3-12b": 11.8, "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62, "qwen3-0.6b": 0.596, "qwen3-8b": 8.19,
        "qwen3-30b-a3b": 30.5, "phi-3-mini-4k": 3.82, "phi-4": 14.7, "gpt-oss-20b": 20.9, "mamba-2.8b": 2.77,
        "mamba-130m": 0.129, "lfm2-1.2b": 1.17, "granite-4.0-h-micro": 3.19, "deepseek-v2-lite": 15.7,
    }  # fmt: skip
    assert set(stated) == set(SHAPES)
    for name, billions in stated.items():
        assert header(folder, name).parameters / 1e9 == pytest.approx(billions, rel=0.01), name
