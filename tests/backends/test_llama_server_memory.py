"""What llama-server's plan says of memory: auto values, the budget, and who is turned away."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.llama_server import LlamaServer
from backends.planning import refuse_what_does_not_fit
from orchestrator.backend import Binary, Plan
from orchestrator.errors import DoesNotFit
from orchestrator.gguf_header import read
from orchestrator.hardware import DeviceChoice, Gpu, Machine, fit
from orchestrator.profile import ModelSpec, Profile
from tests.gguf_files import gguf_bytes
from tests.hardware.shapes import SHAPES, write

GIB = 1 << 30
CARD = Gpu("amd", 0, "GPU-00", "RX 7800 XT", memory_total=16 * GIB, memory_used=GIB // 2)


@pytest.fixture
def settle(tmp_path: Path) -> Any:
    """Plan one of the shapes for a card, or for the CPU, and settle it."""

    def settle(
        shape: str,
        *,
        card: Gpu | None = CARD,
        memory: int = 32 * GIB,
        binary: str = "/bin/llama-server",
        mmproj: Path | None = None,
        **keys: Any,
    ) -> Plan:
        path = write(SHAPES[shape], tmp_path / f"{shape}.gguf")
        header = read(path)
        profile = Profile(name="m", model=ModelSpec(gguf=str(path)), backend="llama-server", **keys)
        wished = header.context if profile.context == "auto" else profile.context
        assert isinstance(wished, int)
        plan = Plan(
            profile=profile, backend="llama-server", binary=Binary((binary,), "PATH"), model_path=path,
            model_id="m", header=header, context=wished, context_source="the profile", slots=profile.slots,
            device=DeviceChoice("rocm", (card,)) if card else DeviceChoice("cpu"), mmproj_path=mmproj,
        )  # fmt: skip
        return LlamaServer(profile, environ=dict(os.environ)).settle(plan, Machine(memory_available=memory))

    return settle


def flag(plan: Plan, name: str) -> str:
    argv = LlamaServer(plan.profile, environ={}).command(plan, 1).argv
    return argv[argv.index(name) + 1]


def test_what_fits_is_let_through_good(settle: Any) -> None:
    plan = settle("qwen3-8b")
    assert plan.memory.verdict.answer == "fits"
    assert plan.memory.free == fit.Room(CARD.free, 32 * GIB)
    refuse_what_does_not_fit(plan)


def test_context_auto_takes_the_most_that_fits_good(settle: Any) -> None:
    plan = settle("llama-3.1-8b", context="auto", slots=2)
    assert 4096 < plan.context < 131072
    assert plan.context_source == "auto: the most that fits"
    assert plan.memory.verdict.answer == "fits"
    assert flag(plan, "--ctx-size") == str(2 * plan.context)
    assert fit.verdict(
        fit.estimate(plan.header, replace(plan.memory.wish, context=plan.context + 256)), plan.memory.free
    ).answer != "fits"  # fmt: skip


def test_context_auto_takes_all_that_the_model_allows_good(settle: Any) -> None:
    plan = settle("qwen3-0.6b", context="auto")
    assert (plan.context, plan.context_source) == (40960, "auto: all that the model allows")


def test_layers_auto_puts_as_many_on_the_card_as_fit_good(settle: Any) -> None:
    plan = settle("mixtral-8x7b", gpu_layers="auto")
    assert 1 < plan.gpu_layers < 33
    assert flag(plan, "--n-gpu-layers") == str(plan.gpu_layers)
    assert plan.memory.verdict.answer == "fits"
    assert any(f"auto puts {plan.gpu_layers} of 33" in note for note in plan.notes)
    assert settle("qwen3-8b", gpu_layers="auto").gpu_layers == 37


def test_layers_and_context_auto_leave_room_for_each_other_good(settle: Any) -> None:
    plan = settle("mixtral-8x7b", gpu_layers="auto", context="auto")
    assert plan.gpu_layers > 1
    assert plan.context >= 4096
    assert plan.memory.verdict.answer == "fits"


def test_layers_auto_on_the_cpu_is_none_good(settle: Any) -> None:
    plan = settle("qwen3-0.6b", card=None, gpu_layers="auto", context="auto")
    assert plan.gpu_layers is None
    assert flag(plan, "--n-gpu-layers") == "0"


def test_layers_auto_without_any_room_is_none_ugly(settle: Any) -> None:
    full = replace(CARD, memory_used=16 * GIB)
    plan = settle("qwen3-0.6b", card=full, gpu_layers="auto")
    assert flag(plan, "--n-gpu-layers") == "0"


def test_what_cant_fit_is_turned_away_with_what_would_bad(settle: Any) -> None:
    plan = settle("mixtral-8x7b")
    with pytest.raises(DoesNotFit, match=r"m: needs 2\d{4} MiB of the GPU, 15872 MiB are free") as caught:
        refuse_what_does_not_fit(plan)
    advice = str(caught.value.advice)
    assert "gpu_layers: " in advice
    assert "IQ2_XXS" in advice
    assert "check_memory: false" in advice
    assert caught.value.profile == "m"


def test_system_memory_counts_too_bad(settle: Any) -> None:
    with pytest.raises(DoesNotFit, match="of system memory"):
        refuse_what_does_not_fit(settle("qwen3-8b", card=None, memory=2 * GIB))


def test_a_user_who_knows_better_is_let_through_good(settle: Any) -> None:
    refuse_what_does_not_fit(settle("mixtral-8x7b", check_memory=False))


def test_what_is_tight_is_let_through_and_said_ugly(settle: Any) -> None:
    """The runtime's own share is an estimate: it warns, it turns nobody away."""
    found = settle("qwen3-8b").memory.estimate.device
    used = 16 * GIB - (found.total - found.overhead) - 1
    plan = settle("qwen3-8b", card=replace(CARD, memory_used=used))
    assert plan.memory.verdict.answer == "no"
    assert any(note.startswith("memory: no; what would fit: ") for note in plan.notes)
    refuse_what_does_not_fit(plan)


def test_what_cant_be_told_is_let_through_ugly(settle: Any) -> None:
    plan = settle("mixtral-8x7b", card=replace(CARD, memory_total=0, memory_used=0))
    assert plan.memory.verdict.answer == "unknown"
    refuse_what_does_not_fit(plan)


def test_a_model_without_a_header_has_no_budget_ugly(settle: Any) -> None:
    plan = replace(settle("qwen3-8b"), header=None, memory=None)
    settled = LlamaServer(plan.profile, environ={}).settle(plan, Machine())
    assert settled.memory is None
    refuse_what_does_not_fit(settled)


def test_a_projector_counts_good(settle: Any, tmp_path: Path) -> None:
    mmproj = tmp_path / "mmproj.gguf"
    mmproj.write_bytes(gguf_bytes([("general.architecture", "str", "clip")]))
    bare, seeing = (
        settle("gemma-3-4b", mmproj=path).memory.estimate.device.weights for path in (None, mmproj)
    )
    assert seeing - bare == read(mmproj).tensor_bytes


def script(path: Path, answer: str) -> str:
    """Put a llama-fit-params that says `answer` beside a llama-server; it notes its call in `called`."""
    tool = path / "llama-fit-params"
    tool.write_text(
        f'#!/bin/sh\necho "$ROCR_VISIBLE_DEVICES" > {path}/called\necho "$@" >> {path}/called\n{answer}\n'
    )
    tool.chmod(stat.S_IRWXU)
    return str(path / "llama-server")


def test_llama_cpp_itself_is_asked_before_anybody_is_turned_away_good(settle: Any, tmp_path: Path) -> None:
    """The formula says no, the tool says that it takes 1 GiB: it is right."""
    server = script(tmp_path, "echo 'ROCm0 1000 20 4'; echo 'Host 100 0 5 '")
    plan = settle("mixtral-8x7b", binary=server)
    assert plan.memory.estimate.source == "llama-fit-params"
    assert plan.memory.estimate.device.kv == 20 << 20
    assert plan.memory.verdict.answer == "fits"
    refuse_what_does_not_fit(plan)
    called = (tmp_path / "called").read_text()
    assert "--n-gpu-layers 33" in called
    assert "--fit-print on" in called


def test_llama_cpp_is_not_asked_where_there_is_plenty_of_room_good(settle: Any, tmp_path: Path) -> None:
    """Asking takes half a second, which a start should not."""
    settle("qwen3-0.6b", binary=script(tmp_path, "exit 1"))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    "answer",
    [
        "exit 1",
        "kill -ABRT $$",
        "echo nonsense",
        "echo 'Host 1 2 3 '",
        "echo 'ROCm0 x y z'; echo 'Host 1 2'",
        ":",
    ],
)
def test_the_formula_stands_where_the_tool_fails_ugly(settle: Any, tmp_path: Path, answer: str) -> None:
    """The tool aborts, says nothing, or sees no card where the engine shall have one."""
    plan = settle("mixtral-8x7b", binary=script(tmp_path, answer))
    assert (tmp_path / "called").exists()
    assert plan.memory.estimate.source == "formula"
    assert plan.memory.verdict.answer == "no"
