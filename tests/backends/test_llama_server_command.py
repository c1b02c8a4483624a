"""llama-server's argv and environment: pure functions of a plan, compared whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.llama_server import LlamaServer
from orchestrator.backend import Binary, Plan
from orchestrator.errors import ProfileError
from orchestrator.hardware import DeviceChoice, choose, detect
from orchestrator.profile import ModelSpec, Profile
from tests.hardware import captured

MASKS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def make_plan(device: DeviceChoice, **keys: Any) -> tuple[LlamaServer, Plan]:
    profile = Profile(
        **{"name": "gemma", "model": ModelSpec(gguf="/models/m.gguf"), "backend": "llama-server", **keys}
    )
    plan = Plan(
        profile=profile,
        backend="llama-server",
        binary=Binary(tuple(keys.get("command", ("/bin/llama-server",))), "PATH"),
        model_path=Path("/models/m.gguf"),
        model_id="gemma",
        header=None,
        context=2048,
        context_source="the profile",
        slots=profile.slots,
        device=device,
    )
    return LlamaServer(profile, environ={}), plan


def test_context_times_slots_on_a_gpu_good() -> None:
    engine, plan = make_plan(DeviceChoice("rocm"), slots=4)
    assert list(engine.command(plan, 9001).argv) == [
        *("/bin/llama-server", "--model", "/models/m.gguf", "--alias", "gemma"),
        *("--host", "127.0.0.1", "--port", "9001"),
        *("--ctx-size", "8192", "--parallel", "4", "--fit", "off", "--n-gpu-layers", "all"),
        *("--flash-attn", "auto", "--cache-type-k", "f16", "--cache-type-v", "f16"),
        *("--cache-ram", "1024", "--threads-http", "68", "--metrics", "--offline", "--no-ui"),
    ]


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("llama3.1", ("--chat-template-kwargs", '{"date_string": "26 Jul 2024"}')),
        ("gemma3", ()),
        ("qwen3", ()),
    ],
)
def test_the_templates_own_date_is_kept_good(template: str, given: tuple[str, ...]) -> None:
    """llama-server would say today's, and vLLM would not."""
    engine, plan = make_plan(DeviceChoice("cuda"))
    path = Path(__file__).parent.parent / "data" / "chat_templates" / f"{template}.jinja"
    argv = engine.command(replace(plan, chat_template_path=path), 9001).argv
    assert argv == (*engine.command(plan, 9001).argv, "--chat-template-file", str(path), *given)


def test_a_template_that_asks_for_the_date_gets_it_good(tmp_path: Path) -> None:
    engine, plan = make_plan(DeviceChoice("cuda"))
    path = tmp_path / "t.jinja"
    path.write_text(
        '{% if strftime_now is defined %}{% else %}{% set date_string = "26 Jul 2024" %}{% endif %}'
    )
    assert engine.command(replace(plan, chat_template_path=path), 9001).argv[-1] == str(path)


def test_every_key_and_option_good() -> None:
    engine, plan = make_plan(
        DeviceChoice("cuda"),
        gpu_layers=20,
        flash_attention="on",
        kv_cache_type="q8_0",
        chat_template="chatml",
        args=("--verbose", "a b"),
        env={"FOO": "bar"},
        options={
            "llama-server": {
                "threads": 3,
                "threads_batch": 4,
                "batch_size": 512,
                "ubatch_size": 128,
                "cache_ram": 0,
                "split_mode": "row",
                "load_mode": "mlock",
            }
        },
    )
    command = engine.command(plan, 1)
    assert list(command.argv) == [
        *("/bin/llama-server", "--model", "/models/m.gguf", "--alias", "gemma"),
        *("--host", "127.0.0.1", "--port", "1"),
        *("--ctx-size", "2048", "--parallel", "1", "--fit", "off", "--n-gpu-layers", "20"),
        *("--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
        *("--cache-ram", "0", "--threads-http", "65", "--metrics", "--offline", "--no-ui"),
        *("--chat-template", "chatml", "--threads", "3", "--threads-batch", "4"),
        *("--batch-size", "512", "--ubatch-size", "128", "--split-mode", "row", "--load-mode", "mlock"),
        *("--verbose", "a b"),  # prior failure 24: an argument is never mangled by quoting
    ]
    assert command.env["FOO"] == "bar"


def test_cpu_offloads_nothing_good() -> None:
    engine, plan = make_plan(DeviceChoice("cpu"), gpu_layers="all")
    argv = engine.command(plan, 1).argv
    assert argv[argv.index("--n-gpu-layers") + 1] == "0"


@pytest.mark.parametrize(
    ("given", "batch", "ubatch"),
    [
        ({}, "256", "256"),
        ({"ubatch_size": 64}, "256", "64"),
        ({"ubatch_size": 1024}, "1024", "1024"),
        ({"batch_size": 2048}, "2048", None),
    ],
)
def test_cpu_reads_prompts_in_small_batches_so_that_a_cancel_is_noticed_good(
    given: dict[str, int], batch: str, ubatch: str | None
) -> None:
    engine, plan = make_plan(DeviceChoice("cpu"), options={"llama-server": given})
    argv = engine.command(plan, 1).argv
    assert argv[argv.index("--batch-size") + 1] == batch
    assert ("--ubatch-size" in argv) == (ubatch is not None)
    if ubatch:
        assert argv[argv.index("--ubatch-size") + 1] == ubatch


def test_files_beside_the_model_good() -> None:
    from dataclasses import replace

    engine, plan = make_plan(DeviceChoice("rocm"))
    plan = replace(
        plan,
        mmproj_path=Path("/m/p.gguf"),
        lora_paths=(Path("/m/a.gguf"), Path("/m/b.gguf")),
        chat_template_path=Path("/m/t.jinja"),
    )
    argv = list(engine.command(plan, 1).argv)
    assert argv[-8:] == [
        *("--chat-template-file", "/m/t.jinja", "--mmproj", "/m/p.gguf"),
        *("--lora", "/m/a.gguf", "--lora", "/m/b.gguf"),
    ]


def test_own_command_has_its_placeholders_filled_good() -> None:
    engine, plan = make_plan(
        DeviceChoice("cpu"), command=("run-it", "{port}", "{host}:{port}", "--", "{model}")
    )
    argv = engine.prepared(plan, 77).argv
    assert argv[:6] == ("run-it", "77", "127.0.0.1:77", "--", "/models/m.gguf", "--model")


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0", "--api-key", "-c", "--alias", "-m"])
def test_args_that_take_our_own_settings_away_are_refused_bad(flag: str, tiny_model: Path) -> None:
    profile = Profile(
        name="x",
        model=ModelSpec(gguf=str(tiny_model)),
        backend="llama-server",
        args=(flag, "1"),
        device="cpu",
    )
    with pytest.raises(ProfileError, match="is set by the orchestrator"):
        LlamaServer(profile).plan()


def test_inherited_variables_that_steer_engines_are_removed_good(tmp_path: Path) -> None:
    engine, plan = make_plan(
        choose(detect(captured.unfold("nothing", tmp_path)), "auto", supported=frozenset({"cpu"}), environ={})
    )
    inherited = {
        **{"LLAMA_ARG_CTX_SIZE": "1", "LLAMA_ARG_PORT": "1", "LLAMA_API_KEY": "theirs", "AIP_MODE": "x"},
        **{"CUDA_VISIBLE_DEVICES": "7", "PATH": "/bin", "HOME": "/root"},
    }
    child = engine.command(plan, 1).environ(inherited)
    assert not [name for name in child if name.startswith(("LLAMA_ARG_", "AIP_")) or name == "LLAMA_API_KEY"]
    assert child["PATH"] == "/bin"
    assert child["CUDA_VISIBLE_DEVICES"] != "7"


@pytest.mark.parametrize(
    ("machine", "kind", "masks"),
    [
        ("rx7900xtx", "rocm", {"ROCR": 1, "HIP_VISIBLE_DEVICES": "0"}),
        ("rx7800xt-then-9950x", "rocm", {"ROCR": 1, "HIP_VISIBLE_DEVICES": "0"}),
        ("7800x3d-then-rx7800xt", "rocm", {"ROCR": 1, "HIP_VISIBLE_DEVICES": "0"}),
        ("two-rx7900xtx", "rocm", {"ROCR": 2, "HIP_VISIBLE_DEVICES": "0,1"}),
        ("radeon-780m", "cpu", {}),
        ("nothing", "cpu", {}),
    ],
)
def test_masks_on_captured_machines_good(
    machine: str, kind: str, masks: dict[str, Any], tmp_path: Path
) -> None:
    """prior failures 20 and 21: one consistent mask, and the integrated GPU is never picked by itself."""
    found = detect(captured.unfold(machine, tmp_path))
    device = choose(
        found, "auto", supported=frozenset({"rocm", "cpu"}), environ={"CUDA_VISIBLE_DEVICES": "1"}
    )
    engine, plan = make_plan(device)
    child = engine.command(plan, 1).environ({"CUDA_VISIBLE_DEVICES": "1", "GPU_DEVICE_ORDINAL": "1"})
    argv = engine.command(plan, 1).argv
    assert device.kind == kind
    assert "GPU_DEVICE_ORDINAL" not in child
    if kind == "cpu":
        assert child["HIP_VISIBLE_DEVICES"] == "-1"
        assert argv[argv.index("--n-gpu-layers") + 1] == "0"
        return
    discrete = [gpu.id for gpu in found.gpus if not gpu.integrated]
    assert child["ROCR_VISIBLE_DEVICES"].split(",") == discrete
    assert len(discrete) == masks["ROCR"]
    assert child["HIP_VISIBLE_DEVICES"] == masks["HIP_VISIBLE_DEVICES"]
    assert "CUDA_VISIBLE_DEVICES" not in child
    assert argv[argv.index("--n-gpu-layers") + 1] == "all"
