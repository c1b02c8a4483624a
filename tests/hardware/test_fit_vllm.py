"""How vLLM cuts its cache, layer by layer, against what vLLM itself logged for the same configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import hf_model
from orchestrator.hardware.fit_vllm import VllmWish, blocks, estimate, layers
from tests import hf_models


def model(folder: Path, **changed: Any) -> hf_model.HfModel:
    return hf_model.read(hf_models.tiny(folder / "model", **changed))


def windows(found: hf_model.HfModel) -> list[int | None]:
    return [layer.window if layer.key else None for layer in layers(found) or ()]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 3}, [0, 0, 0]),
        ({"model_type": "mistral", "sliding_window": 64}, [64, 64]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, [0, 0]),
        ({"model_type": "gemma2", "sliding_window": 64, "num_hidden_layers": 4}, [64, 0, 64, 0]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 7}, [64] * 5 + [0, 64]),
        ({"model_type": "cohere2", "sliding_window": 64, "num_hidden_layers": 4}, [64, 64, 64, 0]),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, [0, 64]),
        ({"attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"]}, [64, 0]),
        ({"layer_types": ["linear_attention", "full_attention"]}, [None, 0]),
        ({"num_hidden_layers": 4, "num_kv_shared_layers": 1}, [0, 0, 0, None]),
        ({"text_config": {"sliding_window": 32, "sliding_window_pattern": 2}}, [32, 0]),
        ({"num_hidden_layers": None}, []),
    ],
)
def test_the_windows_of_each_architecture_good(
    tmp_path: Path, config: dict[str, Any], expected: list[int]
) -> None:
    assert windows(model(tmp_path, **config)) == expected


GEMMA3_270M: dict[str, Any] = {
    "model_type": "gemma3_text", "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "wish", "cache", "tokens"),
    [
        # Gemma 3 270M, as the orchestrator converts it: "CPU KV cache size: 23,589 tokens ... 5.76x"
        (GEMMA3_270M, VllmWish(context=4096, slots=4), 310247424, 23589),
        # a Qwen 3 of two layers, one KV head of 32: "CPU KV cache size: 4,125 tokens ... 1.03x"
        (
            {"model_type": "qwen3", "num_key_value_heads": 1},
            VllmWish(context=4000, element=4),
            2162688,
            4125,
        ),
    ],
)
def test_vllm_counts_the_tokens_of_its_cache_as_we_do_good(
    tmp_path: Path, config: dict[str, Any], wish: VllmWish, cache: int, tokens: int
) -> None:
    """What vLLM 0.32 logged on the CPU."""
    cut = blocks(model(tmp_path, **config), wish)
    assert cut is not None
    assert cut.tokens_in(cache) == tokens


def test_latent_attention_keeps_one_vector_good(tmp_path: Path) -> None:
    found = model(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)
    assert {(layer.key, layer.value) for layer in layers(found) or ()} == {(576, 0)}
    cut = blocks(found, VllmWish(context=160, kind="rocm"))
    assert cut is not None
    assert (cut.size, cut.request) == (16 * 576 * 2 * 2, 10)


def test_heads_fewer_than_the_cards_are_on_each_good(tmp_path: Path) -> None:
    found = model(tmp_path)  # two heads
    sizes = [
        cut.size
        for cards in (1, 2, 4)
        if (cut := blocks(found, VllmWish(context=160, kind="cuda", cards=cards, tensor_parallel=cards)))
    ]
    assert sizes == [sizes[0], sizes[0], 2 * sizes[0]]


def test_a_window_saves_cache_only_beyond_it_and_a_step_good(tmp_path: Path) -> None:
    found = model(tmp_path, model_type="mistral", sliding_window=256)
    short, long = (blocks(found, VllmWish(context=each, step=256)) for each in (512, 8192))
    assert short is not None
    assert long is not None
    assert short.request == 512 // 128 + 1
    assert long.request == -(-(255 + 256) // 128) + 1
    card = blocks(found, VllmWish(context=8192, step=256, kind="cuda"))
    assert card is not None
    assert card.request == -(-(255 + 2 * 256) // 16) + 1  # there the next step is prepared meanwhile


KEYS = (
    *("num_hidden_layers", "sliding_window", "layer_types", "sliding_window_pattern", "kv_lora_rank"),
    *("qk_rope_head_dim", "num_kv_shared_layers", "attention_chunk_size", "model_type", "head_dim"),
)
SIMPLE = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(max_size=4)
VALUES = SIMPLE | st.lists(st.none() | st.text(max_size=9), max_size=3)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_configuration_has_an_estimate_or_none_ugly(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = hf_models.tiny(tmp_path / "model")
    hf_models.weights(folder / "model.safetensors", {"w": ("BF16", [64], 128)})
    path = folder / "config.json"
    path.write_text(json.dumps({**hf_models.config(), **config}))
    found = hf_model.read(folder)
    wish = VllmWish(context=4096, slots=2)
    cut, estimated = blocks(found, wish), estimate(found, wish)
    assert (cut is None) == (estimated is None)
    assert cut is None or (cut.size > 0 and cut.request > 0)
