"""The profile's ``vllm:`` section, and what vLLM calls what we offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.backend import Dialect

Positive = Annotated[int, Field(ge=1, le=4096)]


class VllmOptions(BaseModel):
    """What only vLLM has; unset options are left to vLLM."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="what is computed with; auto is the model's own type"
    )
    eager: bool = Field(False, description="start without compiling: quicker to start, slower to answer")
    tensor_parallel: Positive | None = Field(
        None, description="cards that share each layer; default: all that the profile uses"
    )
    pipeline_parallel: Positive = Field(1, description="groups of cards that share the layers among them")
    nodes: Positive = Field(1, description="machines of a Ray cluster that is there; above 1 Ray is used")
    kv_cache_gib: Annotated[float, Field(gt=0, le=1 << 20)] | None = Field(
        None, description="memory for keys and values, in GiB, in the place of memory_fraction"
    )
    batched_tokens: Annotated[int, Field(ge=16, le=1 << 24)] | None = Field(
        None, description="tokens computed in one step; fewer need less memory, more read prompts faster"
    )
    cpu_offload_gib: Annotated[float, Field(ge=0, le=1 << 20)] | None = Field(
        None, description="weights kept in system memory, in GiB a card"
    )
    prefix_caching: bool | None = Field(None, description="keep what prompts have in common")
    reasoning_parser: str | None = Field(
        None, min_length=1, description="how thoughts are told from answers; default: by the model's template"
    )
    tool_parser: str | None = Field(
        None, min_length=1, description="how calls of tools are found; default: by the model's template"
    )

    def tensor_parallel_size(self, cards: int) -> int:
        """Return how many cards share each layer where every machine has `cards`: as given, else all."""
        return self.tensor_parallel or max(1, cards * self.nodes // self.pipeline_parallel)


# What stands in a model's chat template -> the parser, as vLLM names them. llama-server finds both from the
# template by itself; vLLM has to be told, and does not start with one that the model has no tokens for.
REASONING: Final[Mapping[str, str]] = {"<think>": "qwen3"}
TOOLS: Final[Mapping[str, str]] = {
    "<|python_tag|>": "llama3_json",
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
}

KV_TYPES: Final[Mapping[str, str]] = {
    "f16": "auto",  # the profile's default; vLLM keeps them in the type that it computes with
    "bf16": "bfloat16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
"""A profile's `kv_cache_type` -> vLLM's ``--kv-cache-dtype``."""

DIALECT: Final = Dialect(
    "vllm",
    {
        **{
            name: name
            for name in (
                *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "logprobs"),
                *("presence_penalty", "frequency_penalty", "ignore_eos", "logit_bias", "tools"),
            )
        },
        "repeat_penalty": "repetition_penalty",
        "grammar": "structured_outputs.grammar",
        "json_schema": "response_format.json_schema.schema",
        "reasoning": "chat_template_kwargs.enable_thinking",
    },
    {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
    },
)
