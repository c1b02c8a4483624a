"""The keys of a profile: their types, ranges, defaults and what they mean, as pydantic models.

The descriptions here are what editors show and what docs/reference/profile.md says at more length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.json_schema import WithJsonSchema

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ENV_NAME_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
PLACEHOLDERS: Final = ("{port}", "{host}", "{model}", "{name}")
DEFAULT_MEMORY_FRACTION: Final = 0.90
# with another network or name, or in the background, a container is not what is waited for, asked and stopped
CONTAINER_RESERVED: Final = frozenset(
    {"--name", "--network", "--net", "--publish", "-p", "--publish-all", "-P", "--detach", "-d", "--restart"}
)

Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=31_536_000)]
Wait: TypeAlias = Annotated[float, Field(ge=0, le=86_400)]
# a number is text here too when it can only be written in one way; orchestrator.profile sees to it
Argument: TypeAlias = Annotated[str, WithJsonSchema({"type": ["string", "number"]})]


def _distinct(values: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
    if values is not None and len(set(values)) < len(values):
        raise ValueError("must not name a card twice")
    return values


def _ordered(backoff: tuple[float, float]) -> tuple[float, float]:
    if backoff[0] > backoff[1]:
        raise ValueError("must have the shortest wait first")
    return backoff


def _unreserved(args: tuple[str, ...]) -> tuple[str, ...]:
    for word in args:
        if word.partition("=")[0] in CONTAINER_RESERVED:
            raise ValueError(f"{word.partition('=')[0]} is set by the orchestrator")
    return args


def _placeholders(command: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for word in command or ():
        for found in re.findall(r"(?<!\{)\{[a-z_]+\}(?!\})", word):
            if found not in PLACEHOLDERS:
                raise ValueError(f"there is no {found}; what is filled in: {', '.join(PLACEHOLDERS)}")
    return command


class _Keys(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSpec(_Keys):
    """The model, in the form that each engine reads."""

    gguf: Text | None = Field(
        default=None, description="A GGUF file, of several shards the first; or hf:OWNER/REPO[:QUANT]."
    )
    hf: Text | None = Field(
        default=None,
        description="A folder with safetensors, hf:OWNER/REPO, or OWNER/NAME for the engine to fetch.",
    )
    mmproj: Text | None = Field(
        default=None,
        description="The projector of a model that sees or hears: a file, or hf:OWNER/REPO[:QUANT].",
    )
    lora: tuple[Text, ...] = Field(default=(), description="LoRA adapters, applied in this order.")
    package: Text | None = Field(
        default=None, description="An installed Python package that brings the model."
    )

    @model_validator(mode="after")
    def _one_at_least(self) -> ModelSpec:
        if not (self.gguf or self.hf or self.package):
            raise ValueError("must name a model: gguf, hf or package")
        if self.gguf and self.package:
            raise ValueError("must not have both gguf and package, which name the same thing")
        return self


class Timeouts(_Keys):
    """How long is waited, in seconds; 0 means without an end."""

    start: Seconds = Field(default=600, description="From the spawn until the engine is ready.")
    stop: Seconds = Field(
        default=10, description="From the polite request to end until the engine is killed."
    )
    request: Seconds = Field(default=0, description="For a whole request.")
    stall: Seconds = Field(
        default=120, description="Without any progress, while loading or within a request."
    )


class Restart(_Keys):
    """What follows when an engine ends unasked."""

    attempts: int = Field(
        default=5, ge=0, le=1000, description="Restarts within the window; 0 = none at all."
    )
    window: float = Field(
        default=300, gt=0, le=31_536_000, description="Seconds over which restarts are counted."
    )
    backoff: Annotated[tuple[Wait, Wait], AfterValidator(_ordered)] = Field(
        default=(0.5, 30), description="Shortest and longest wait before a restart, in seconds."
    )


class Container(_Keys):
    """The image in which the engine runs; devices, mounts, port and name are filled in."""

    image: Text = Field(description="The image, whose entry point is the engine's program.")
    runtime: Literal["docker", "podman", "nerdctl"] = Field(
        default="docker", description="The container client that is used."
    )
    shm_size: Text | None = Field(
        default=None,
        description="Shared memory of the container's own, such as 16g; without it the host's is used.",
    )
    args: Annotated[tuple[Argument, ...], AfterValidator(_placeholders), AfterValidator(_unreserved)] = Field(
        default=(), description="Further options of `run`; {port}, {host}, {model} and {name} are filled in."
    )


class Sampling(_Keys):
    """Options sent with every request, unless the request says otherwise."""

    max_tokens: int | None = Field(default=None, ge=1, description="Tokens generated at most.")
    temperature: float | None = Field(
        default=None, ge=0, le=100, description="0 takes the likeliest token always."
    )
    top_k: int | None = Field(default=None, ge=0, description="Choose among the k likeliest; 0 = all.")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Choose among the likeliest up to this sum."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Drop tokens below this share of the likeliest."
    )
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1, description="The same seed, the same choices.")
    stop: Text | tuple[Text, ...] | None = Field(default=None, description="Texts that end an answer.")
    repeat_penalty: float | None = Field(
        default=None, gt=0, le=10, description="Above 1 makes repeats rarer."
    )
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="For tokens that occurred.")
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="For each time a token occurred."
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=100, description="Alternatives reported with each token."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on after the model's end token.")
    logit_bias: dict[int, float] | None = Field(
        default=None, description="Token id: what is added to its logit."
    )
    reasoning: bool | None = Field(default=None, description="Whether a model that can should think first.")
    grammar: Text | None = Field(default=None, description="A grammar that answers must follow.")
    json_schema: dict[str, Any] | None = Field(
        default=None, description="A JSON Schema that answers must follow."
    )
    extra: dict[str, Any] | None = Field(
        default=None, description="Fields sent as they are: what one engine alone understands."
    )


class Keys(_Keys):
    """Every key of a profile that is not an engine's own section."""

    name: str = Field(
        pattern=NAME_PATTERN, description="What it is called in commands and logs; default: the file's stem."
    )
    model: ModelSpec = Field(
        description="package:NAME, hf:OWNER/REPO[:QUANT], a GGUF file, a safetensors folder, OWNER/NAME, "
        "or a mapping of forms."
    )
    backend: Text = Field(description="The engine that serves it.")
    context: Annotated[int, Field(ge=1, le=2**31 - 1)] | Literal["auto"] = Field(
        default=4096,
        description="Tokens per slot at most, the model's own limit too; auto takes the most that fit.",
    )
    slots: int = Field(default=1, ge=1, le=4096, description="Requests served at once.")
    device: Literal["auto", "rocm", "cuda", "vulkan", "cpu"] = Field(
        default="auto", description="What computes; auto takes a GPU when there is one."
    )
    gpus: Annotated[
        tuple[Annotated[int, Field(ge=0, le=1023)] | Text, ...] | None, AfterValidator(_distinct)
    ] = Field(
        default=None,
        min_length=1,
        description="Stable ids or indices; default: all discrete cards of the device kind.",
    )
    gpu_layers: Annotated[int, Field(ge=0, le=100_000)] | Literal["all", "auto"] = Field(
        default="all", description="Layers that are put onto the GPU; auto puts as many there as fit."
    )
    check_memory: bool = Field(
        default=True, description="Whether to refuse what can't fit into the memory that is free."
    )
    flash_attention: Literal["on", "off", "auto"] = Field(
        default="auto", description="The fused attention kernel."
    )
    kv_cache_type: Literal[
        "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "fp8", "fp8_e4m3", "fp8_e5m2"
    ] = Field(
        default="f16",
        description="How keys and values are kept in memory; q and iq are llama.cpp's, fp8 is vLLM's.",
    )
    memory_fraction: float = Field(
        default=DEFAULT_MEMORY_FRACTION,
        gt=0,
        le=1,
        description="Share of the GPU memory free at the start; only for vLLM.",
    )
    chat_template: Text | None = Field(default=None, description="A Jinja file, or the name of a template.")
    sampling: Mapping[str, Any] = Field(
        default={}, description="Sent with every request unless the request says otherwise."
    )
    env: Mapping[Annotated[str, StringConstraints(pattern=ENV_NAME_PATTERN)], Argument] = Field(
        default={}, description="Added to the engine's environment."
    )
    args: tuple[Argument, ...] = Field(default=(), description="Appended to the engine's arguments.")
    command: Annotated[tuple[Argument, ...] | None, AfterValidator(_placeholders)] = Field(
        default=None,
        min_length=1,
        description="Replaces the engine's program; {port}, {host}, {model} and {name} are filled in.",
    )
    container: Container | None = Field(
        default=None, description="Runs the engine in a container; instead of `command`."
    )
    stop_command: Annotated[tuple[Argument, ...] | None, AfterValidator(_placeholders)] = Field(
        default=None,
        min_length=1,
        description="Asks the engine to end, instead of a TERM; filled in like `command`. "
        "Default for a container: its client's stop.",
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="Seconds; 0 = none.")
    restart: Restart = Field(default=Restart(), description="What follows when the engine ends unasked.")
    idle_timeout: Seconds = Field(
        default=0,
        description="Seconds without requests until the engine is stopped; 0 = never. Not supported yet.",
    )


def place_of(model: type[BaseModel], key: str) -> str | None:
    """Return where in the sections of `model` a key stands, dotted; None when in none."""
    sections = {name: known_keys(model, (name,)) for name in model.model_fields}
    if issubclass(model, Keys):
        sections["sampling"] = tuple(Sampling.model_fields)
    return next((f"{name}.{key}" for name, keys in sections.items() if key in keys), None)


def known_keys(model: type[BaseModel], steps: Sequence[str | int]) -> tuple[str, ...]:
    """Return the keys that may stand in the mapping at `steps` below `model`; empty when anything may."""
    for step in steps:
        field = next((f for name, f in model.model_fields.items() if step in (name, f.alias)), None)
        choices = (field.annotation, *get_args(field.annotation)) if field else ()
        nested = next(
            (each for each in choices if isinstance(each, type) and issubclass(each, BaseModel)), None
        )
        if nested is None:
            return ()
        model = nested
    return tuple(field.alias or name for name, field in model.model_fields.items())
