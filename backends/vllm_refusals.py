"""What vLLM can't do, refused before it starts, each with what to do instead."""

from __future__ import annotations

from dataclasses import replace

from backends.vllm_options import KV_TYPES, VllmOptions
from orchestrator.backend import Plan
from orchestrator.errors import Problem, ProfileError, UnsupportedModel
from orchestrator.hf_model import HfModel

# AMD's cards that compute with 8-bit floats
FP8_TARGETS = frozenset({"gfx942", "gfx950", "gfx1200", "gfx1201"})


def check(plan: Plan, options: VllmOptions) -> Plan:
    """Return the plan with notes added.

    Args:
        plan: what is to be started.
        options: the profile's ``vllm:`` section.

    Raises:
        ProfileError: keys of the profile that vLLM has nothing for, all at once.
        UnsupportedModel: the model is one that it can't serve here.

    """
    problems = _keys(plan, options)
    if problems:
        raise ProfileError(problems)
    if plan.mmproj_path:
        raise UnsupportedModel(
            f"model.mmproj: {plan.backend} reads a projector from the model's own folder only",
            advice="name a folder that sees under model.hf, or take llama-server",
        )
    model = plan.header if isinstance(plan.header, HfModel) else None
    if model is not None:
        _fp8(plan, model)
    notes = plan.notes
    if model is not None and not model.chat_template and not plan.chat_template_path:
        notes += ("the model has no chat template: vLLM refuses chats; set `chat_template` to a Jinja file",)
    return replace(plan, notes=notes)


def _keys(plan: Plan, options: VllmOptions) -> list[Problem]:
    profile, where = plan.profile, str(plan.profile.source or plan.profile.name)
    gpus = [gpu for gpu in plan.device.gpus if gpu.gfx and plan.device.kind == "rocm"]
    slow = next((gpu for gpu in gpus if gpu.gfx not in FP8_TARGETS), None)
    heads = getattr(plan.header, "heads", None)
    found: dict[str, str] = {}
    if profile.kv_cache_type not in KV_TYPES:
        found["kv_cache_type"] = (
            f"{profile.kv_cache_type} is llama.cpp's; vLLM has {', '.join(KV_TYPES)}: leave it out"
        )
    elif profile.kv_cache_type.startswith("fp8") and slow is not None:
        found["kv_cache_type"] = f"FP8 does not run on {slow.gfx}: leave it out"
    if profile.gpu_layers not in {"all", "auto"} and plan.device.kind != "cpu":
        found["gpu_layers"] = (
            "vLLM puts all layers onto the GPU: leave it out, set vllm: {cpu_offload_gib: N}, "
            "or take llama-server"
        )
    if profile.flash_attention == "off":
        found["flash_attention"] = "vLLM has only fused attention: leave it out"
    if profile.chat_template and not plan.chat_template_path:
        found["chat_template"] = (
            f"{profile.chat_template} is no file, and vLLM brings no templates: give a file"
        )
    if len(plan.lora_paths) > 1:
        found["model.lora"] = "vLLM applies one adapter to a request: merge them, or take llama-server"
    tensor = options.tensor_parallel_size(len(plan.device.gpus))
    wanted = tensor * options.pipeline_parallel
    cards = max(1, len(plan.device.gpus)) * options.nodes
    if wanted > cards and plan.device.kind != "cpu":
        found["vllm"] = (
            f"tensor_parallel x pipeline_parallel is {wanted}, and there are {cards} cards: lower them, "
            "or set `nodes` where a Ray cluster is"
        )
    elif heads and heads % tensor:
        found["vllm.tensor_parallel"] = (
            f"the model's {heads} heads can't be shared by {tensor} cards: set a number that divides them, "
            "or name fewer `gpus`"
        )
    return [Problem(where, 0, 0, key, message) for key, message in found.items()]


def _fp8(plan: Plan, model: HfModel) -> None:
    """FP8 weights need a card that computes with them."""
    if not model.fp8 or plan.device.kind != "rocm":
        return
    for gpu in plan.device.gpus:
        if gpu.gfx and gpu.gfx not in FP8_TARGETS:
            raise UnsupportedModel(
                f"model: {model.path} is FP8, which does not run on {gpu.label}",
                path=model.path,
                advice="take its AWQ, GPTQ (4 bits) or unquantised form, or llama-server with a GGUF",
            )
