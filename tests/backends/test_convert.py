"""From GGUF to safetensors: names, refusals, and what becomes of a conversion that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from backends import convert, convert_gguf
from orchestrator.errors import BackendError, UnsupportedModel
from tests import gguf_files


def never() -> str:
    raise AssertionError("nothing is to be converted")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    gguf_files.tiny_llama(path)
    return path


@pytest.mark.parametrize(
    ("gguf", "transformers"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.17.attn_k_norm.weight", "model.layers.17.self_attn.k_norm.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
        ("blk.3.post_ffw_norm.weight", "model.layers.3.post_feedforward_layernorm.weight"),
        ("blk.3.post_attention_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_names_good(gguf: str, transformers: str) -> None:
    assert convert_gguf.renamed(gguf) == transformers


@pytest.mark.parametrize("name", ["output.weight", "blk.0.ssm_in.weight", "blk.x.attn_q.weight", ""])
def test_a_tensor_that_gemma_has_not_bad(name: str) -> None:
    with pytest.raises(KeyError):
        convert_gguf.renamed(name)


def test_a_model_that_can_t_be_converted_says_what_to_do_bad(llama: Path, environ: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModel, match="llama can't be converted") as raised:
        convert.converted(llama, environ, by=never, at_once=True)
    assert "model.hf" in str(raised.value.advice)


def test_what_was_converted_is_found_good(llama: Path, environ: dict[str, str]) -> None:
    folder = convert.place(llama, environ)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert convert.converted(llama, environ, by=never, at_once=False) == folder


def test_another_file_of_the_same_name_is_another_model_ugly(llama: Path, environ: dict[str, str]) -> None:
    before = convert.place(llama, environ)
    os.utime(llama, ns=(1, 1))
    assert convert.place(llama, environ) != before


def test_a_conversion_that_fails_leaves_nothing_bad(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    folder = convert.place(llama, environ)
    python = tmp_path / "python"
    python.write_text(f'#!{sys.executable}\nimport sys\nsys.exit("disk on fire")\n')
    python.chmod(0o755)
    with pytest.raises(BackendError, match="could not be converted") as raised:
        convert.convert(llama, folder, str(python))
    assert "disk on fire" in "\n".join(raised.value.log_tail)
    assert list(folder.parent.iterdir()) == []


def test_a_folder_appears_whole_good(llama: Path, environ: dict[str, str], tmp_path: Path) -> None:
    folder = convert.place(llama, environ)
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "pathlib.Path(sys.argv[4], 'config.json').write_text('{}')\n"
    )
    python.chmod(0o755)
    assert convert.convert(llama, folder, str(python)) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (folder / "config.json").is_file()
    assert convert.convert(llama, folder, str(python)) == folder  # again, in the place of the old one
