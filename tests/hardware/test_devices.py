"""Which cards an engine gets, and the exact masks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.errors import DeviceMissing
from orchestrator.hardware import MASKS, Gpu, Machine, choose, detect
from tests.hardware.captured import NAMES, Programs, load, unfold

ROCM = frozenset({"cpu", "rocm"})
CUDA = frozenset({"cpu", "cuda"})
VULKAN = frozenset({"cpu", "vulkan"})
CPU = frozenset({"cpu"})
HIDE_ALL = {"CUDA_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}

CARD = "GPU-644950a4e5f60a09"
APU = "0000:10:00.0"


@pytest.fixture
def machine(request, tmp_path) -> Machine:
    return captured(getattr(request, "param", "rx7800xt-then-9950x"), tmp_path)


def captured(name, root) -> Machine:
    return detect(unfold(name, root), Programs(load(name)))


def pick(machine, device="auto", gpus=None, supported=ROCM, environ=None):
    return choose(machine, device, gpus, supported=supported, environ=environ or {})


# -- the golden masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rocm", "cuda", "vulkan"])
@pytest.mark.parametrize("name", NAMES)
def test_automatic_masks_of_captured_machine_good(name, kind, tmp_path):
    expected = load(name)["expect"]
    machine = captured(name, tmp_path)
    choice = pick(machine, supported=frozenset({"cpu", kind}))
    if kind not in expected:
        assert choice.kind in {kind, "cpu"}
    elif expected[kind] == "cpu":
        assert (choice.kind, choice.gpus, choice.env) == ("cpu", (), HIDE_ALL)
        assert choice.notes
    else:
        assert (choice.kind, choice.env) == (kind, expected[kind])
        assert not any(gpu.integrated for gpu in choice.gpus)
    assert set(choice.unset) | set(choice.env) == set(MASKS)
    assert not set(choice.unset) & set(choice.env)


@pytest.mark.parametrize("name", [name for name in NAMES if "named" in load(name)["expect"]])
def test_named_integrated_gpu_is_used_good(name, tmp_path):
    machine = captured(name, tmp_path)
    for wish in (0, "0", machine.gpus[0].id, machine.gpus[0].render_node):
        choice = pick(machine, gpus=[wish])
        assert choice.env == load(name)["expect"]["named"]
        assert choice.unset == tuple(mask for mask in MASKS if mask != "HIP_VISIBLE_DEVICES")


def test_discrete_card_beside_an_integrated_one_good(machine):
    choice = pick(machine)
    assert choice.env == {"ROCR_VISIBLE_DEVICES": CARD, "HIP_VISIBLE_DEVICES": "0"}
    assert choice.unset == (
        "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    )  # fmt: skip


@pytest.mark.parametrize("machine", ["two-rx7900xtx"], indirect=True)
def test_named_order_is_the_engines_order_good(machine):
    choice = pick(machine, gpus=[1, 0])
    assert choice.env == {
        "ROCR_VISIBLE_DEVICES": "GPU-398a3f843a146602,GPU-1fb8a6a50ca222e3",
        "HIP_VISIBLE_DEVICES": "0,1",
    }


@pytest.mark.parametrize("machine", ["two-rx7900xtx"], indirect=True)
def test_second_of_two_cards_is_hips_only_one_good(machine):
    choice = pick(machine, "rocm", ["GPU-398a3f843a146602"])
    assert choice.env == {"ROCR_VISIBLE_DEVICES": "GPU-398a3f843a146602", "HIP_VISIBLE_DEVICES": "0"}


def test_card_and_named_integrated_gpu_fall_back_to_indices_good(machine):
    """One without a unique id can't be named to ROCr, so HIP's indices name both."""
    assert pick(machine, gpus=[CARD, APU]).env == {"HIP_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize("machine", ["7800x3d-then-rx7800xt"], indirect=True)
def test_vulkan_counts_discrete_cards_first_good(machine):
    integrated, card = machine.gpus
    machine = replace(machine, gpus=(replace(integrated, pci="0000:01:00.0"), card))
    assert pick(machine, supported=VULKAN).env == {"GGML_VK_VISIBLE_DEVICES": "0"}
    assert pick(machine, supported=VULKAN, gpus=[1]).gpus[0].integrated


def test_cpu_hides_every_gpu_good(machine):
    choice = pick(machine, "cpu")
    assert (choice.kind, choice.gpus, choice.env) == ("cpu", (), HIDE_ALL)
    assert choice.unset == ("CUDA_DEVICE_ORDER", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES")


def test_a_binary_with_two_runtimes_sees_a_card_once_good(machine):
    choice = pick(machine, supported=ROCM | VULKAN)
    assert choice.env == {
        "ROCR_VISIBLE_DEVICES": CARD, "HIP_VISIBLE_DEVICES": "0", "GGML_VK_VISIBLE_DEVICES": "",
    }  # fmt: skip
    choice = pick(machine, "vulkan", supported=ROCM | VULKAN | CUDA)
    assert choice.env == {
        "GGML_VK_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1",
    }  # fmt: skip


# -- what is inherited ----------------------------------------------------------------------------------


def test_inherited_masks_are_removed_and_said_good(machine):
    environ = {
        "CUDA_VISIBLE_DEVICES": "1", "GPU_DEVICE_ORDINAL": "0", "HIP_VISIBLE_DEVICES": "1", "HOME": "/root",
    }  # fmt: skip
    choice = pick(machine, environ=environ)
    assert {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"} <= set(choice.unset)
    assert choice.env["HIP_VISIBLE_DEVICES"] == "0"
    assert choice.notes == (
        "CUDA_VISIBLE_DEVICES=1 from the environment is removed",
        "GPU_DEVICE_ORDINAL=0 from the environment is removed",
        "HIP_VISIBLE_DEVICES=1 from the environment is replaced",
    )


def test_override_is_passed_through_and_said_good(machine):
    choice = pick(machine, environ={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert "HSA_OVERRIDE_GFX_VERSION" not in {*choice.env, *choice.unset}
    assert choice.notes == ("HSA_OVERRIDE_GFX_VERSION=11.0.0 from the environment is passed through",)


def test_override_is_never_invented_good(machine):
    assert not any("HSA" in text for text in (*pick(machine).env, *pick(machine).notes))


# -- why the processor ------------------------------------------------------------------------------------


def test_binary_without_the_runtime_is_said_good(machine):
    choice = pick(machine, supported=CPU)
    assert choice.kind == "cpu"
    assert choice.notes == (
        "a discrete AMD GPU is there, AMD Radeon RX 7800 XT (gfx1101), but this binary has no ROCm",
        "an integrated AMD GPU is there, AMD GPU 1002:13c0 (gfx1036), but this binary has no ROCm",
    )


@pytest.mark.parametrize("machine", ["strix-halo"], indirect=True)
def test_integrated_gpu_alone_is_left_alone_good(machine):
    assert pick(machine).notes == (
        "an integrated AMD GPU is there, AMD Radeon 8060S Graphics (gfx1151), "
        'but such a one is used only when named: gpus: ["0000:c3:00.0"]',
    )


@pytest.mark.parametrize("machine", ["permission-denied"], indirect=True)
def test_card_that_may_not_be_opened_is_said_good(machine):
    assert pick(machine).notes == (
        "a discrete AMD GPU is there, AMD Radeon RX 7800 XT (gfx1101), but no permission to open /dev/kfd",
    )


def test_gpus_are_ignored_for_the_processor_good(machine):
    assert pick(machine, "cpu", [0]).notes == ("gpus is ignored because device is cpu",)


# -- what was asked for and can't be had --------------------------------------------------------------------


def refused(*arguments, **keywords) -> DeviceMissing:
    with pytest.raises(DeviceMissing) as caught:
        pick(*arguments, **keywords)
    assert caught.value.advice
    return caught.value


def test_unknown_gpu_lists_what_is_there_bad(machine):
    fault = refused(machine, gpus=["GPU-0000000000000000"])
    assert str(fault) == "device: there is no GPU 'GPU-0000000000000000' for ROCm"
    assert fault.advice == (
        f"there are: 0 = {CARD} AMD Radeon RX 7800 XT (gfx1101); 1 = {APU} AMD GPU 1002:13c0 (gfx1036)"
    )


@pytest.mark.parametrize("wish", [2, -1, "7", "", "GPU", "renderD999", "٣", "9" * 400])
def test_nonsense_names_are_refused_ugly(machine, wish):
    refused(machine, "rocm", [wish])


def test_beginning_of_an_id_names_a_card_good(machine):
    assert pick(machine, gpus=["gpu-6449"]).gpus[0].id == CARD


def test_refusal_speaks_of_the_cards_that_are_there_bad(machine):
    fault = refused(machine, gpus=["GPU-0000000000000000"], supported=ROCM | CUDA)
    assert str(fault) == "device: there is no GPU 'GPU-0000000000000000' for ROCm"


def test_advice_survives_yaml_ugly(tmp_path):
    import yaml

    fault = refused(captured("radeon-780m", tmp_path), "rocm")
    line = fault.advice.partition("named: ")[2]
    assert yaml.safe_load(line) == {"gpus": ["0000:c6:00.0"]}


def test_ambiguous_beginning_is_refused_bad(machine):
    twin = Gpu("amd", 2, "GPU-6449ffffffffffff", "twin")
    both = Machine(gpus=(*machine.gpus, twin))
    assert "several GPUs match 'GPU-6449'" in str(refused(both, gpus=["GPU-6449"]))


def test_the_same_card_twice_is_one_ugly(machine):
    assert pick(machine, gpus=[0, "0", CARD]).env["HIP_VISIBLE_DEVICES"] == "0"


def test_kind_that_the_binary_lacks_is_refused_bad(machine):
    fault = refused(machine, "rocm", supported=CPU)
    assert str(fault) == "device: ROCm was asked for, but this engine's binary can use only: CPU"


def test_named_card_with_a_cpu_binary_is_refused_bad(machine):
    assert "a GPU was asked for" in str(refused(machine, gpus=[0], supported=CPU))


def test_kind_without_any_card_is_refused_bad(machine):
    assert str(refused(machine, "cuda", supported=CUDA)) == (
        "device: CUDA was asked for, but no NVIDIA GPU was found"
    )


@pytest.mark.parametrize("machine", ["permission-denied"], indirect=True)
def test_forbidden_card_says_how_to_be_let_in_bad(machine):
    for fault in (refused(machine, "rocm"), refused(machine, gpus=[0])):
        assert "no permission to open /dev/kfd" in str(fault)
        assert fault.advice == "sudo usermod -aG render,video $USER, then log in again"


@pytest.mark.parametrize("machine", ["radeon-780m"], indirect=True)
def test_asked_kind_with_only_an_integrated_gpu_names_it_bad(machine):
    fault = refused(machine, "rocm")
    assert "only an integrated GPU is there: AMD Radeon 780M Graphics (gfx1103)" in str(fault)
    assert fault.advice == 'an integrated GPU is used when it is named: gpus: ["0000:c6:00.0"]'


def test_engine_that_needs_a_gpu_gets_no_processor_bad(tmp_path):
    fault = refused(captured("nothing", tmp_path), supported=frozenset({"rocm"}))
    assert str(fault) == "device: this engine needs a GPU, but no AMD GPU was found"
    assert "can't run on the CPU" in str(
        refused(captured("nothing", tmp_path / "b"), "cpu", supported=CUDA - CPU)
    )


def test_both_vendors_are_kept_apart_ugly(tmp_path):
    machine = captured("nvidia-laptop", tmp_path)
    assert pick(machine, gpus=[0], supported=ROCM | CUDA).kind == "cuda"
    assert pick(machine, gpus=["0000:65:00.0"], supported=ROCM | CUDA).kind == "rocm"
    refused(machine, gpus=[machine.gpus[0].id, machine.gpus[1].id], supported=ROCM | CUDA)
    assert len(pick(machine, gpus=[1, 0], supported=VULKAN).gpus) == 2
