"""The real llama-server, measured and compared with itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.bench import compare, measure
from orchestrator.bench.gate import Limits
from orchestrator.bench.history import History
from orchestrator.bench.values import Workload
from tests.bench.test_cli import orchestrator

pytestmark = pytest.mark.real

SHORT = Workload(name="short", prompt_tokens=(24,), output_tokens=(12,))
PATIENT = Limits(cpu=10, lag_s=10)  # other tests and other people use this machine too


@pytest.fixture
def gemma(gemma_gguf: Path, llama_server_binary: Path, tmp_path: Path) -> str:
    """Write a profile of the real engine, on one thread so that it leaves the client a core."""
    path = tmp_path / "gemma.yaml"
    profile = {
        "model": str(gemma_gguf),
        "backend": "llama-server",
        "command": [str(llama_server_binary)],
        "device": "cpu",
        "context": 256,
        "slots": 2,
        "llama-server": {"threads": 1, "threads_batch": 1},
    }
    path.write_text(yaml.safe_dump(profile))
    return str(path)


def test_an_engine_against_itself_is_no_faster_good(gemma: str) -> None:
    """One control in thirty errs by design, two in a row hardly ever."""
    for seed in (1, 2):
        found = compare(gemma, workload=SHORT, control=True, pairs=6, seed=seed, limits=PATIENT)
        if found.verdict in ("equivalent", "inconclusive"):
            break
    assert found.verdict in ("equivalent", "inconclusive"), found.decisions
    assert [arm.quantisation for arm in found.arms] == ["Q4_K_M", "Q4_K_M"]
    for each in found.rounds:
        if not each.void:
            assert {sample.output_tokens for sample in each.samples} == {12}
            assert {sample.prompt_tokens for sample in each.samples} == {24}
            assert all((sample.cached_tokens or 0) <= 8 for sample in each.samples)


def test_the_prefix_cache_is_measured_on_purpose_good(gemma: str) -> None:
    load = Workload(
        name="prefix",
        prompt_tokens=(128,),
        output_tokens=(2,),
        prefix_tokens=100,
        requests=2,
        metric="ttft_s",
    )
    # without the flag, a model with a sliding window (Gemma) keeps no prefix that another prompt could use
    found = measure(gemma, [load], rounds=1, overrides=["args=[--swa-full]"], limits=PATIENT)
    cached = [sample.cached_tokens or 0 for each in found.results[0].rounds for sample in each.samples]
    assert max(cached) >= 96
    assert found.results[0].rounds[-1].memory is not None


def test_a_run_of_the_real_engine_is_kept_shown_and_compared_good(gemma: str) -> None:
    quick = ("--preset", "decode", "--rounds", "4", "--prompt-tokens", "16", "--output-tokens", "4")
    made = orchestrator("bench", gemma, *quick)
    assert made.returncode == 0, made.stderr
    assert orchestrator("history", "show").stdout == made.stdout
    again = orchestrator("bench", gemma, *quick, "--baseline", "latest", "--fail-if-slower", "99%")
    assert again.returncode == 0, again.stderr
    assert "A is run 1" in again.stdout
    later, earlier = History().entries(backend="llama-server", model="gemma")
    assert (later.id, earlier.id) == (2, 1)
    assert later.arms == earlier.arms
    assert later.arms[0].profile == gemma
