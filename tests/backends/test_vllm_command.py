"""vLLM's argv and environment on each device: pure functions of a plan, compared whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends import vllm
from backends.planning import refuse_what_does_not_fit
from backends.vllm import Vllm, VllmCpu, VllmCuda, VllmRocm
from orchestrator import hf_model
from orchestrator.backend import Binary, Command, Plan
from orchestrator.errors import DeviceMissing, DoesNotFit, ProfileError, UnsupportedModel
from orchestrator.hardware import MASKS, Machine, choose, detect
from orchestrator.profile import ModelSpec, Profile
from tests import hf_models
from tests.hardware import captured

PYTHON = "/opt/engines/vllm/bin/python"
MODULE = "vllm.entrypoints.launchers.api_server.entry"
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ALWAYS = [
    *("--generation-config", "vllm", "--max-logprobs", "100", "--enable-prompt-tokens-details"),
    *("--disable-access-log-for-endpoints", "/health,/metrics,/v1/models"),
]


class Case:
    """An engine with a plan on a captured machine."""

    def __init__(self, engine: type[Vllm], root: Path, machine: str, **keys: Any) -> None:
        changed = keys.pop("config", {})
        tree = captured.unfold(machine, root / "machine")
        self.machine = detect(tree, captured.Programs(captured.load(machine)))
        self.folder = hf_models.tiny(root / "model", **changed)
        self.profile = Profile(
            **{"name": "m", "model": ModelSpec(hf=str(self.folder)), "backend": engine.name, **keys}
        )
        self.engine = engine(self.profile, environ={"PATH": "/usr/bin"})
        self.plan = Plan(
            profile=self.profile,
            backend=engine.name,
            binary=Binary(self.profile.command or (PYTHON, "-m", MODULE), "engine"),
            model_path=self.folder,
            model_id="m",
            header=hf_model.read(self.folder),
            context=2048,
            context_source="the profile",
            slots=self.profile.slots,
            device=choose(
                self.machine,
                self.profile.device,
                self.profile.gpus,
                supported=frozenset({engine.kind}),
                environ={},
            ),
        )

    def command(self) -> Command:
        return self.engine.command(self.plan, 9001)

    def settle(self, machine: Machine | None = None) -> Plan:
        return self.engine.settle(self.plan, machine or self.machine)


def between(model: Path, *memory: str, dtype: str = "auto", slots: str = "1") -> list[str]:
    return [
        *(PYTHON, "-m", MODULE, "--model", str(model), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", "9001", "--max-model-len", "2048", "--max-num-seqs", slots),
        *(*memory, "--kv-cache-dtype", "auto", "--dtype", dtype),
    ]


def test_one_card_beside_an_integrated_one_good(tmp_path: Path) -> None:
    case = Case(VllmRocm, tmp_path, "rx7800xt-then-9950x", slots=4)
    command = case.command()
    free = 1 - 1491832832 / 17163091968
    share = f"{int(0.9 * free * 1000) / 1000:g}"
    memory = ("--gpu-memory-utilization", share)
    assert list(command.argv) == [*between(case.folder, *memory, slots="4"), *ALWAYS]
    assert float(share) <= 0.9 * free  # more than is free would be refused
    assert dict(command.env) == {
        **QUIET,
        **OFFLINE,
        "PATH": "/opt/engines/vllm/bin:/usr/bin",
        "ROCR_VISIBLE_DEVICES": "GPU-644950a4e5f60a09",
        "HIP_VISIBLE_DEVICES": "0",
    }
    assert "CUDA_VISIBLE_DEVICES" in command.unset
    assert {"VLLM_*", "PYTHONPATH", "PYTHONHOME"} <= set(command.unset)


def test_two_cards_share_the_model_good(tmp_path: Path) -> None:
    command = Case(VllmRocm, tmp_path, "two-rx7900xtx").command()
    at = command.argv.index("--tensor-parallel-size")
    assert command.argv[at + 1] == "2"
    assert command.env["HIP_VISIBLE_DEVICES"] == "0,1"
    assert command.env["ROCR_VISIBLE_DEVICES"].count("GPU-") == 2


def test_one_named_card_of_two_good(tmp_path: Path) -> None:
    command = Case(VllmRocm, tmp_path, "two-rx7900xtx", gpus=(1,)).command()
    assert "--tensor-parallel-size" not in command.argv
    assert command.env["HIP_VISIBLE_DEVICES"] == "0"


def test_nvidia_cards_by_uuid_good(tmp_path: Path) -> None:
    case = Case(VllmCuda, tmp_path, "two-quadro-rtx4000", options={"vllm": {"tensor_parallel": 2}})
    command = case.command()
    uuids = command.env["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(uuids) == 2
    assert all(uuid.startswith("GPU-") for uuid in uuids)
    assert not {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} & set(command.env)
    assert {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} <= set(command.unset)


def test_the_processor_gets_the_cache_that_the_context_needs_good(tmp_path: Path) -> None:
    case = Case(VllmCpu, tmp_path, "nothing", slots=2)
    command = case.command()
    # (2 slots x 2048 tokens + the block of 128 that is never used) x 2 layers x 2 heads x (32 + 32) x 2 bytes
    cache = str((2 * 2048 + 128) * 2 * 2 * 64 * 2)
    memory = ("--kv-cache-memory-bytes", cache)
    assert list(command.argv) == [*between(case.folder, *memory, slots="2"), *ALWAYS]
    assert command.env["VLLM_TARGET_DEVICE"] == "cpu"
    assert {command.env["CUDA_VISIBLE_DEVICES"], command.env["HIP_VISIBLE_DEVICES"]} == {"-1"}


def test_float32_doubles_the_cache_good(tmp_path: Path) -> None:
    case = Case(VllmCpu, tmp_path, "nothing", options={"vllm": {"dtype": "float32"}})
    half = Case(VllmCpu, tmp_path, "nothing")
    sizes = [
        int(c.command().argv[c.command().argv.index("--kv-cache-memory-bytes") + 1]) for c in (case, half)
    ]
    assert sizes[0] == 2 * sizes[1]


def test_every_option_good(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    case = Case(
        VllmRocm,
        tmp_path,
        "mi300x-two-of-eight",
        args=("--swap", "a b"),
        env={"FOO": "bar"},
        kv_cache_type="fp8",
        options={
            "vllm": {
                "dtype": "bfloat16",
                "eager": True,
                "tensor_parallel": 2,
                "pipeline_parallel": 2,
                "nodes": 2,
                "kv_cache_gib": 1.5,
                "batched_tokens": 4096,
                "cpu_offload_gib": 2,
                "prefix_caching": False,
                "reasoning_parser": "qwen3",
                "tool_parser": "hermes",
            },
            "vllm-rocm": {"batched_tokens": 512},
        },
    )
    plan = case.plan
    object.__setattr__(plan, "chat_template_path", template)
    object.__setattr__(plan, "lora_paths", (Path("/adapters/a"),))
    argv = case.command().argv
    text = " ".join(argv)
    for part in (
        "--served-model-name m.base --enable-lora --lora-modules m=/adapters/a",
        f"--kv-cache-memory-bytes {3 << 29}",
        "--kv-cache-dtype fp8",
        "--dtype bfloat16",
        "--tensor-parallel-size 2 --pipeline-parallel-size 2 --distributed-executor-backend ray",
        "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes",
        f"--chat-template {template}",
        "--enforce-eager",
        "--max-num-batched-tokens 512",
        "--cpu-offload-gb 2",
        "--no-enable-prefix-caching",
    ):
        assert part in text
    assert argv[-2:] == ("--swap", "a b")
    assert case.command().env["FOO"] == "bar"
    assert "--gpu-memory-utilization" not in argv


@pytest.mark.parametrize(
    ("launch", "given"),
    [
        ((PYTHON, "-m", MODULE), ("--model", "FOLDER")),
        ((PYTHON, "-m", "vllm.entrypoints.cli.main", "serve"), ("FOLDER",)),
        (("docker", "run", "vllm/vllm-openai-rocm"), ("FOLDER",)),
    ],
)
def test_the_model_is_given_as_the_launch_form_wants_it_good(
    tmp_path: Path, launch: tuple[str, ...], given: tuple[str, ...]
) -> None:
    case = Case(VllmCpu, tmp_path, "nothing")
    object.__setattr__(case.plan, "binary", Binary(launch, "somewhere"))
    wanted = tuple(str(case.folder) if word == "FOLDER" else word for word in given)
    argv = case.command().argv
    assert argv[len(launch) : len(launch) + len(wanted)] == wanted


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        ("{{ '<think>' }}<tool_call>", ["--reasoning-parser", "qwen3"]),
        ("<|python_tag|>", ["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"]),
        ("<tool_call>", ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]),
        ("{{ messages }}", []),
    ],
)
def test_parsers_are_found_from_the_template_good(tmp_path: Path, template: str, parsers: list[str]) -> None:
    argv = list(Case(VllmCpu, tmp_path, "nothing", config={"template": template}).command().argv)
    assert argv[argv.index("/health,/metrics,/v1/models") + 1 :][: len(parsers)] == parsers
    assert bool(parsers) == any(word.startswith("--") and "parser" in word for word in argv)


def test_a_model_on_the_hub_may_be_fetched_good(tmp_path: Path) -> None:
    case = Case(VllmCpu, tmp_path, "nothing")
    object.__setattr__(case.plan, "header", None)
    command = case.command()
    assert not set(OFFLINE) & set(command.env)
    assert "--kv-cache-memory-bytes" in command.argv  # else vLLM takes half of the machine


@pytest.mark.parametrize("name", captured.NAMES)
@pytest.mark.parametrize("engine", [VllmRocm, VllmCuda, VllmCpu])
def test_exactly_one_consistent_set_of_masks_good(tmp_path: Path, name: str, engine: type[Vllm]) -> None:
    try:
        case = Case(engine, tmp_path, name)
    except DeviceMissing as error:
        assert error.advice  # noqa: PT017
        return
    command = case.command()
    masks = {mask: command.env[mask] for mask in MASKS if mask in command.env}
    assert set(masks) | set(command.unset) >= set(MASKS)  # what is not set is removed
    if engine is VllmRocm:
        assert "CUDA_VISIBLE_DEVICES" not in masks  # vLLM raises when it differs from HIP's
        seen = masks["HIP_VISIBLE_DEVICES"].split(",")
        if "ROCR_VISIBLE_DEVICES" in masks:  # it renumbers what is left
            assert seen == [str(at) for at in range(len(masks["ROCR_VISIBLE_DEVICES"].split(",")))]
        assert not any(gpu.integrated for gpu in case.plan.device.gpus)
        share = float(command.argv[command.argv.index("--gpu-memory-utilization") + 1])
        assert all(share * gpu.total <= gpu.free for gpu in case.plan.device.gpus)


# -- what it can't do -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "key", "word"),
    [
        ({"kv_cache_type": "q8_0"}, "kv_cache_type", "llama.cpp's"),
        ({"kv_cache_type": "fp8"}, "kv_cache_type", "FP8 does not run on gfx1101"),
        ({"gpu_layers": 20}, "gpu_layers", "cpu_offload_gib"),
        ({"flash_attention": "off"}, "flash_attention", "only fused"),
        ({"chat_template": "chatml"}, "chat_template", "give a file"),
        ({"options": {"vllm": {"tensor_parallel": 2}}}, "vllm", "nodes"),
    ],
)
def test_what_vllm_has_nothing_for_is_refused_by_key_bad(
    tmp_path: Path, keys: dict[str, Any], key: str, word: str
) -> None:
    with pytest.raises(ProfileError) as raised:
        Case(VllmRocm, tmp_path, "rx7800xt-then-9950x", **keys).settle()
    assert [problem.key for problem in raised.value.problems] == [key]
    assert word in str(raised.value)


def test_every_refusal_at_once_bad(tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as raised:
        Case(VllmRocm, tmp_path, "rx7900xtx", kv_cache_type="q4_0", flash_attention="off").settle()
    assert len(raised.value.problems) == 2


def test_heads_that_the_cards_can_t_share_bad(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="3 heads can't be shared by 2"):
        Case(VllmRocm, tmp_path, "two-rx7900xtx", config={"num_attention_heads": 3}).settle()


def test_cards_that_share_no_layer_need_no_common_divisor_of_its_heads_good(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"options": {"vllm": {"pipeline_parallel": 2}}}
    case = Case(VllmRocm, tmp_path, "two-rx7900xtx", config={"num_attention_heads": 3}, **keys)
    case.settle()
    assert "--tensor-parallel-size" not in case.command().argv


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "fp8"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}},
        },
    ],
)
def test_fp8_weights_need_a_card_that_has_them_bad(tmp_path: Path, quantisation: dict[str, Any]) -> None:
    changed = {"quantization_config": quantisation}
    with pytest.raises(UnsupportedModel, match="FP8") as raised:
        Case(VllmRocm, tmp_path / "a", "rx7800xt-then-9950x", config=changed).settle()
    assert "AWQ" in str(raised.value.advice)
    Case(VllmRocm, tmp_path / "b", "mi300x-two-of-eight", config=changed).settle()


def test_awq_runs_on_gfx11_good(tmp_path: Path) -> None:
    changed = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    Case(VllmRocm, tmp_path, "rx7800xt-then-9950x", config=changed).settle()


def test_weights_larger_than_the_memory_bad(tmp_path: Path) -> None:
    case = Case(VllmRocm, tmp_path, "rx7800xt-then-9950x")
    hf_models.weights(case.folder / "model.safetensors", {"w": ("BF16", [1 << 16, 1 << 17], 1 << 34)})
    object.__setattr__(case.plan, "header", hf_model.read(case.folder))
    plan = case.settle()
    assert plan.memory is not None
    assert plan.memory.verdict.answer == "no"
    with pytest.raises(DoesNotFit, match=r"needs 16[0-9]{3} MiB of the GPU") as raised:
        refuse_what_does_not_fit(plan)
    assert "the model in 4 bits" in str(raised.value.advice)


def test_a_model_without_a_chat_template_is_told_good(tmp_path: Path) -> None:
    assert any("chat template" in note for note in Case(VllmCpu, tmp_path, "nothing").settle().notes)
    with_one = Case(VllmCpu, tmp_path / "b", "nothing", config={"template": "{{ messages }}"})
    assert not any("chat template" in note for note in with_one.settle().notes)


def test_the_three_find_programs_of_their_own_good() -> None:
    assert {engine.program.environment for engine in (VllmRocm, VllmCuda, VllmCpu)} == {
        "vllm-rocm",
        "vllm-cuda",
        "vllm-cpu",
    }
    assert vllm.VllmRocm.recipe.python == "3.12"


def test_max_tokens_is_spelled_out_and_bounded_good(tmp_path: Path) -> None:
    from orchestrator.backend import Endpoint
    from orchestrator.request import chat_body, completion_body

    case = Case(VllmCpu, tmp_path, "nothing")
    endpoint = Endpoint("http://127.0.0.1:1", None, "m", case.engine.dialect_for(case.plan))
    assert completion_body(endpoint, "x", {})["max_tokens"] == 2048
    assert completion_body(endpoint, "x", {"max_tokens": 9999})["max_tokens"] == 2048
    assert chat_body(endpoint, [], {"max_tokens": 5})["max_tokens"] == 5
    neutral = completion_body(endpoint, "x", {})
    assert (neutral["temperature"], neutral["top_p"], neutral["top_k"], neutral["min_p"]) == (
        1.0,
        1.0,
        0,
        0.0,
    )
