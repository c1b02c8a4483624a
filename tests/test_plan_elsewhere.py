"""`orchestrator plan` for a machine elsewhere: an RX 7800 XT beside a Ryzen's graphics, as captured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engines import STAMP
from tests.hardware import captured

PROFILES = Path(__file__).parent.parent / "profiles"
CARD = "GPU-644950a4e5f60a09"

# answers what the orchestrator asks a Python with a ROCm build of vLLM
PYTHON = """#!/bin/sh
echo '{"version": "0.18.0+rocm700", "distribution": true, "files": ["entrypoints/cli/main.py"],
"cuda": null, "hip": "7.0", "gguf": false}' | tr -d '\\n'
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """Return the environment of somebody with that machine and vLLM for ROCm."""
    captured.unfold("rx7800xt-then-9950x", tmp_path / "machine")
    place = tmp_path / "engines" / "vllm-rocm"
    python = place / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (place / STAMP).write_text(json.dumps({"version": "0.18.0", "program": str(python), "fingerprint": ""}))
    return {
        **os.environ,
        "ORCHESTRATOR_MACHINE": str(tmp_path / "machine"),
        "ORCHESTRATOR_ENGINES": str(tmp_path / "engines"),
        "CUDA_VISIBLE_DEVICES": "1",  # left in the shell; vLLM raises when it differs from HIP's
    }


def plan(profile: str, environ: dict[str, str], *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "plan", str(PROFILES / profile), "--json", *words],
        env=environ,
        capture_output=True,
        text=True,
    )
    document = json.loads(done.stdout)
    assert ("error" in document) == bool(done.returncode), done.stderr
    return document


@pytest.mark.parametrize(
    ("profile", "model"),
    [
        ("gemma3-4b-vllm-rocm.yaml", "google/gemma-3-4b-it"),
        ("llama3.1-8b-vllm-rocm.yaml", "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"),
        ("qwen3-8b-vllm-rocm.yaml", "Qwen/Qwen3-8B-AWQ"),
    ],
)
def test_a_shipped_profile_takes_the_card_and_not_the_processors_graphics_good(
    elsewhere: dict[str, str], profile: str, model: str
) -> None:
    document = plan(profile, elsewhere)
    assert document["device"]["kind"] == "rocm"
    assert [gpu["id"] for gpu in document["device"]["gpus"]] == [CARD]
    given = document["environment"]["set"]
    assert (given["ROCR_VISIBLE_DEVICES"], given["HIP_VISIBLE_DEVICES"]) == (CARD, "0")
    assert "CUDA_VISIBLE_DEVICES" not in given
    assert "CUDA_VISIBLE_DEVICES" in document["environment"]["removed"]
    argv = document["argv"]
    assert argv[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", model]
    share = float(argv[argv.index("--gpu-memory-utilization") + 1])
    free = 1 - 1491832832 / 17163091968
    assert 0.9 * free - 0.002 < share <= 0.9 * free
    assert argv[argv.index("--max-model-len") + 1] == "8192"
    assert "--enforce-eager" in argv


def test_naming_the_integrated_one_is_the_users_choice_good(elsewhere: dict[str, str]) -> None:
    document = plan("qwen3-8b-vllm-rocm.yaml", elsewhere, "--set", "gpus=[1]")
    assert [gpu["id"] for gpu in document["device"]["gpus"]] == ["0000:10:00.0"]
    assert document["environment"]["set"]["HIP_VISIBLE_DEVICES"] == "1"


def test_what_the_card_can_t_do_is_refused_in_the_plan_bad(elsewhere: dict[str, str]) -> None:
    document = plan("qwen3-8b-vllm-rocm.yaml", elsewhere, "--set", "kv_cache_type=fp8")
    assert "FP8 does not run on gfx1101" in document["error"]["message"]
    assert document["error"]["exit_code"] == 2


def test_nvidia_s_engine_has_nothing_there_bad(elsewhere: dict[str, str]) -> None:
    document = plan("qwen3-8b-vllm-rocm.yaml", elsewhere, "--backend", "vllm-cuda")
    assert "engine vllm-cuda" in document["error"]["message"]
    assert "orchestrator engines install vllm-cuda" in document["error"]["advice"]
