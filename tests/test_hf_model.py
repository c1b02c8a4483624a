"""What a folder in Hugging Face's form says of itself, and what of it is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import hf_model
from orchestrator.errors import ModelError, NotAModel, UnsupportedModel
from tests import hf_models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_models.tiny(tmp_path / "model")


def change(folder: Path, **changed: Any) -> hf_model.HfModel:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return hf_model.read(folder)


def test_the_facts_of_a_model_good(folder: Path) -> None:
    hf_models.weights(
        folder / "model.safetensors", {"a": ("BF16", [8, 4], 64), "b": ("F32", [2], 8), "c": ("BF16", [], 2)}
    )
    model = hf_model.read(folder)
    assert (model.architecture, model.layers, model.heads, model.kv_heads) == ("LlamaForCausalLM", 2, 2, 2)
    assert (model.context, model.vocabulary, model.key_length) == (4096, 259, 32)
    assert (model.parameters, model.tensor_bytes, model.quantisation) == (8 * 4 + 2 + 1, 74, "bf16")
    assert model.chat_template is None
    assert not model.fp8


def test_a_model_that_sees_keeps_its_text_part_apart_good(folder: Path) -> None:
    model = change(folder, text_config={"num_hidden_layers": 34, "max_position_embeddings": 131072})
    assert (model.layers, model.context) == (34, 131072)


def test_kv_heads_and_head_length_have_their_usual_defaults_good(folder: Path) -> None:
    model = change(folder, num_key_value_heads=None, head_dim=None)
    assert (model.kv_heads, model.key_length) == (2, 32)


@pytest.mark.parametrize(
    ("quantisation", "name", "fp8"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq", False),
        ({"quant_method": "fp8"}, "fp8", True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"type": "float", "num_bits": 8}}},
            },
            "compressed-tensors",
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"type": "int", "num_bits": 4}}},
            },
            "compressed-tensors",
            False,
        ),
    ],
)
def test_quantisations_good(folder: Path, quantisation: dict[str, Any], name: str, fp8: bool) -> None:
    model = change(folder, quantization_config=quantisation)
    assert (model.quantisation, model.fp8) == (name, fp8)


def test_weights_in_8_bit_floats_without_a_word_good(folder: Path) -> None:
    hf_models.weights(folder / "model.safetensors", {"a": ("F8_E4M3", [64], 64)})
    assert hf_model.read(folder).fp8


@pytest.mark.parametrize("kind", ["own file", "setting", "named"])
def test_a_chat_template_wherever_it_stands_good(folder: Path, kind: str) -> None:
    settings_file = folder / "tokenizer_config.json"
    if kind == "own file":
        (folder / "chat_template.jinja").write_text("T")
    else:
        given = (
            "T"
            if kind == "setting"
            else [{"name": "x", "template": "X"}, {"name": "default", "template": "T"}]
        )
        settings_file.write_text(json.dumps({"chat_template": given}))
    assert hf_model.read(folder).chat_template == "T"


def test_a_folder_without_a_configuration_bad(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match=r"no config\.json"):
        hf_model.read(tmp_path)


def test_an_adapter_is_no_model_bad(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter") as raised:
        hf_model.read(tmp_path)
    assert "model.lora" in str(raised.value.advice)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "\x00", "[" * 100_000])
def test_a_configuration_that_is_none_ugly(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(NotAModel):
        hf_model.read(folder)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), header=st.booleans())
def test_any_bytes_as_weights_end_in_an_error_of_ours_ugly(folder: Path, data: bytes, header: bool) -> None:
    content = len(data).to_bytes(8, "little") + data if header else data
    (folder / "model.safetensors").write_bytes(content)
    try:
        hf_model.read(folder)
    except ModelError as error:
        assert "model:" in str(error)  # noqa: PT017 - it may also be read


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    given_config=st.dictionaries(
        st.sampled_from(
            [
                "num_attention_heads",
                "head_dim",
                "architectures",
                "quantization_config",
                "text_config",
                "dtype",
            ]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
            max_leaves=6,
        ),
    )
)
def test_any_values_are_read_or_left_out_ugly(folder: Path, given_config: dict[str, Any]) -> None:
    change(folder, **given_config)
