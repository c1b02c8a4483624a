"""vLLM's budget: its share of the cards, what of it the cache gets, ``auto``, and who is turned away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.planning import refuse_what_does_not_fit
from backends.vllm import Vllm, VllmCpu, VllmCuda, VllmRocm
from orchestrator import hf_model
from orchestrator.backend import Plan
from orchestrator.errors import DoesNotFit, ProfileError
from orchestrator.hardware.fit_advice import Budget
from tests import hf_models
from tests.backends.test_vllm_command import Case

GIB = 1 << 30
# Qwen/Qwen3-8B's published configuration, as far as memory goes
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip


def settled(
    engine: type[Vllm], root: Path, machine: str, bits: float, config: dict[str, Any] = QWEN3_8B, **keys: Any
) -> Plan:
    """Plan an 8-billion-parameter model with so many bits a weight on a captured machine."""
    case = Case(engine, root, machine, **keys)
    path = case.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    count = 8_190_735_360 * 2 // 8 * 4
    hf_models.weights(case.folder / "model.safetensors", {"w": ("BF16", [count], int(count * bits / 8))})
    model = hf_model.read(case.folder)
    native = model.context or 0
    context = native if keys.get("context") == "auto" else min(native, keys.get("context", 2048))
    case.plan = replace(case.plan, header=model, context=context)
    return case.settle()


def budget(plan: Plan) -> Budget:
    assert plan.memory is not None
    return plan.memory


def test_the_cache_gets_what_the_weights_leave_good(tmp_path: Path) -> None:
    plan = settled(VllmRocm, tmp_path, "rx7800xt-then-9950x", 5.9, context=8192)
    found = budget(plan)
    gpu = plan.device.gpus[0]
    assert found.verdict.answer == "fits"
    assert found.free.device == pytest.approx(0.9 * gpu.free, rel=0.003)
    # 8192 tokens and the unused block of 16 x 36 layers x 8 heads x (128 + 128) x 2 bytes
    assert found.estimate.device.kv == (8192 + 16) * 36 * 8 * 256 * 2
    part = found.estimate.device
    left = found.free.device - (part.total - part.kv)
    tokens = left // (16 * 36 * 8 * 256 * 2) * 16
    assert f"{left / GIB:.1f} GiB: {tokens} tokens" in found.estimate.notes[-1]


def test_slots_that_fit_one_by_one_are_tight_and_start_good(tmp_path: Path) -> None:
    plan = settled(VllmRocm, tmp_path, "rx7800xt-then-9950x", 5.9, context=16384, slots=8)
    found = budget(plan)
    assert found.verdict.answer == "tight"
    refuse_what_does_not_fit(plan)
    assert any("requests wait" in note for note in found.estimate.notes)
    (context,) = (each for each in found.advice if each.startswith("context"))
    (slots,) = (each for each in found.advice if each.startswith("slots"))
    for change in ({"context": int(context.split()[1])}, {"slots": int(slots.split()[1])}):
        keys = {"context": 16384, "slots": 8, **change}
        other = settled(VllmRocm, tmp_path / next(iter(change)), "rx7800xt-then-9950x", 5.9, **keys)
        assert budget(other).verdict.answer == "fits", change


def test_one_request_that_does_not_fit_is_refused_bad(tmp_path: Path) -> None:
    plan = settled(VllmRocm, tmp_path, "rx7800xt-then-9950x", 16)
    found = budget(plan)
    assert found.verdict.answer == "no"
    with pytest.raises(DoesNotFit, match="MiB of the GPU") as raised:
        refuse_what_does_not_fit(plan)
    assert "the model in 4 bits (AWQ or GPTQ)" in str(raised.value.advice)
    assert "cpu_offload_gib" in str(raised.value.advice)
    refuse_what_does_not_fit(replace(plan, profile=plan.profile.model_copy(update={"check_memory": False})))


def test_a_request_longer_than_what_is_left_is_refused_bad(tmp_path: Path) -> None:
    """The weights fit, a few tokens too: vLLM would load them all and then not start."""
    keys: dict[str, Any] = {"context": 40960, "slots": 4}
    plan = settled(VllmRocm, tmp_path, "rx7800xt-then-9950x", 8, **keys)
    found = budget(plan)
    assert found.verdict.answer == "no"
    assert found.estimate.device.kv == (40960 + 16) * 36 * 8 * 256 * 2  # of one request
    with pytest.raises(DoesNotFit) as raised:
        refuse_what_does_not_fit(plan)
    assert "context: " in str(raised.value.advice)


def test_auto_takes_the_longest_context_that_fits_good(tmp_path: Path) -> None:
    plan = settled(VllmRocm, tmp_path / "a", "rx7800xt-then-9950x", 5.9, context="auto", slots=4)
    assert budget(plan).verdict.answer == "fits"
    assert plan.context % 128 == 0
    assert "auto: the most that fits" in plan.context_source
    longer = settled(
        VllmRocm, tmp_path / "b", "rx7800xt-then-9950x", 5.9, context=plan.context + 128, slots=4
    )
    assert budget(longer).verdict.answer == "tight"
    whole = settled(VllmRocm, tmp_path / "c", "mi300x-two-of-eight", 16, context="auto")
    assert (whole.context, whole.context_source) == (40960, "auto: all that the model allows")


def test_two_cards_hold_more_good(tmp_path: Path) -> None:
    one = budget(settled(VllmCuda, tmp_path / "a", "two-quadro-rtx4000", 4.5, gpus=(0,)))
    two = budget(settled(VllmCuda, tmp_path / "b", "two-quadro-rtx4000", 4.5))
    assert two.free.device == pytest.approx(2 * (one.free.device or 0), rel=0.1)
    assert two.estimate.device.kv == one.estimate.device.kv


def test_the_processor_takes_system_memory_good(tmp_path: Path) -> None:
    plan = settled(VllmCpu, tmp_path, "nothing", 16, context=8192, slots=2)
    found = budget(plan)
    assert found.estimate.device.total == 0
    assert found.estimate.host.kv == (2 * 8192 + 128) * 36 * 8 * 256 * 2
    assert found.free.host


def test_float32_doubles_weights_and_cache_good(tmp_path: Path) -> None:
    plain = budget(settled(VllmCpu, tmp_path / "a", "nothing", 16))
    wide = budget(settled(VllmCpu, tmp_path / "b", "nothing", 16, options={"vllm": {"dtype": "float32"}}))
    assert wide.estimate.host.weights == 2 * plain.estimate.host.weights
    assert wide.estimate.host.kv == 2 * plain.estimate.host.kv


def test_a_given_cache_is_what_it_takes_good(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"options": {"vllm": {"kv_cache_gib": 1.5}}, "context": "auto", "slots": 2}
    plan = settled(VllmRocm, tmp_path, "rx7900xtx", 5.9, **keys)
    assert budget(plan).estimate.device.kv == 3 * GIB // 2
    # two requests of the whole context in it, and not of 128 tokens more
    assert 2 * plan.context * 36 * 8 * 256 * 2 < 3 * GIB // 2 < 2 * (plan.context + 128) * 36 * 8 * 256 * 2


def test_a_given_cache_too_small_for_a_request_bad(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"options": {"vllm": {"kv_cache_gib": 0.5}}, "context": 8192}
    with pytest.raises(ProfileError, match=r"vllm.kv_cache_gib: a request of 8192 tokens takes 1\.13 GiB"):
        settled(VllmRocm, tmp_path, "rx7900xtx", 5.9, **keys)


def test_what_the_folder_does_not_say_is_left_open_ugly(tmp_path: Path) -> None:
    silent = {**QWEN3_8B, "num_hidden_layers": None}
    assert settled(VllmRocm, tmp_path, "rx7900xtx", 5.9, silent).memory is None
    case = Case(VllmRocm, tmp_path / "b", "rx7900xtx")
    case.plan = replace(case.plan, header=None)
    assert case.settle().memory is None
