"""What is read off captured machines, and off machines that make no sense."""

from __future__ import annotations

import pytest

from orchestrator.hardware import Machine, Ran, Tree, detect
from tests.hardware.captured import NAMES, NODES, Programs, load, unfold, write


def seen(name: str, root) -> Machine:
    return detect(unfold(name, root), Programs(load(name)))


@pytest.mark.parametrize("name", NAMES)
def test_captured_machine_is_read_as_expected_good(name, tmp_path):
    machine = seen(name, tmp_path)
    found = [
        {"id": gpu.id, "gfx": gpu.gfx, "integrated": gpu.integrated, "name": gpu.name} for gpu in machine.gpus
    ]
    assert found == load(name)["expect"]["gpus"]
    assert machine.memory_total == load(name)["meminfo"]["MemTotal"] * 1024
    assert machine.cpu == load(name)["cpu"]["model"]
    assert machine.cpu_count > 0
    hidden = [node for node in load(name).get("kfd", {}).values() if node.get("hidden")]
    assert len(machine.problems) == bool(hidden)


def test_detection_needs_no_more_than_a_root_good(tmp_path):
    unfold("rx7900xtx", tmp_path)
    (gpu,) = detect(tmp_path).gpus
    assert (gpu.id, gpu.render_node, gpu.kfd_node, gpu.kfd_gpu_id) == (
        "GPU-1fb8a6a50ca222e3", "renderD128", 1, 4672,
    )  # fmt: skip
    assert (gpu.memory_total, gpu.memory_used, gpu.free) == (25753026560, 27856896, 25753026560 - 27856896)
    assert gpu.pci == "0000:03:00.0"
    assert gpu.driver == "amdgpu"
    assert gpu.blocked == {}


def test_integrated_memory_is_what_it_may_map_good(tmp_path):
    (small,) = seen("strix-halo", tmp_path / "a").gpus
    (large,) = seen("strix-halo-96g-carved", tmp_path / "b").gpus
    assert small.total == 103079215104
    assert small.free == 103079215104 - 42164224
    assert large.total == 103079215104
    assert large.free == 103079215104 - 1073741824
    assert "gfx1151" in small.why


def test_nodes_are_ordered_by_number_good(tmp_path):
    """Node 10 comes after node 4, which it would not as text."""
    machine = seen("mi300x-two-of-eight", tmp_path)
    assert [gpu.kfd_node for gpu in machine.gpus] == [4, 10, None]
    assert machine.kfd.hidden_nodes == 6
    assert machine.problems == ("kfd: 6 of 8 nodes are not readable by this process",)


def test_a_card_of_another_container_is_blocked_good(tmp_path):
    other = seen("mi300x-two-of-eight", tmp_path).gpus[2]
    assert other.blocked == {
        "rocm": "the kernel's compute driver (KFD) does not offer it",
        "vulkan": "/dev/dri/renderD128 is missing",
    }


def test_permission_is_told_from_absence_good(tmp_path):
    denied = seen("permission-denied", tmp_path / "a")
    absent = seen("container-without-kfd", tmp_path / "b")
    assert (denied.kfd.present, denied.kfd.permitted) == (True, False)
    assert (absent.kfd.present, absent.kfd.permitted) == (False, False)
    assert denied.gpus[0].blocked["rocm"] == "no permission to open /dev/kfd"
    assert absent.gpus[0].blocked["rocm"] == "/dev/kfd is missing"
    assert absent.container


def test_old_nvidia_driver_is_asked_again_without_the_field_good(tmp_path):
    programs = Programs(load("two-quadro-rtx4000"))
    machine = detect(unfold("two-quadro-rtx4000", tmp_path), programs)
    assert len(programs.calls) == 2
    assert [gpu.compute_capability for gpu in machine.gpus] == [None, None]
    assert [gpu.memory_total for gpu in machine.gpus] == [8192 << 20] * 2
    assert machine.problems == ()


def test_nvidia_smi_is_not_started_without_the_driver_good(tmp_path):
    programs = Programs(load("nothing"))
    detect(unfold("nothing", tmp_path), programs)
    assert programs.calls == []


@pytest.mark.parametrize(
    ("ran", "problem"),
    [
        (Ran(None, err="no answer within 10 s"), "nvidia-smi: no answer within 10 s"),
        (Ran(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"),
         "nvidia-smi: nvidia-smi has failed because it couldn't communicate with the nvidia driver"),
        (Ran(1), "nvidia-smi: failed"),
    ],
)  # fmt: skip
def test_nvidia_smi_that_fails_is_a_problem_bad(ran, problem, tmp_path):
    write(tmp_path, "proc/driver/nvidia/version", "x")
    machine = detect(tmp_path, lambda argv, timeout: ran)
    assert machine.gpus == ()
    assert machine.problems == (problem,)


def test_wsl_with_another_vendors_gpu_is_no_problem_good(tmp_path):
    write(tmp_path, "dev/dxg", "")
    machine = detect(tmp_path, lambda argv, timeout: Ran(None, err="no such file or directory"))
    assert (machine.gpus, machine.problems) == ((), ())


def test_nvidia_unified_memory_has_no_figures_ugly(tmp_path):
    write(tmp_path, "proc/driver/nvidia/version", "x")
    line = "GPU-aa, NVIDIA GB10, 0000000F:01:00.0, [N/A], [N/A], 580.95.05, 12.1\ngarbage\n"
    (gpu,) = detect(tmp_path, lambda argv, timeout: Ran(0, line)).gpus
    assert (gpu.memory_total, gpu.free, gpu.pci, gpu.compute_capability) == (0, 0, "000f:01:00.0", "12.1")


def test_memory_is_bounded_by_the_cgroup_good(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "102400000\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "2400000\n")
    machine = detect(tmp_path)
    assert (machine.memory_total, machine.memory_available) == (102400000, 100000000)


def test_unlimited_cgroup_changes_nothing_good(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    assert detect(tmp_path).memory_available == 900000 * 1024


def test_parts_of_one_card_get_ids_of_their_own_ugly(tmp_path):
    unfold("two-rx7900xtx", tmp_path)
    for node in (1, 2):
        path = tmp_path / NODES / str(node) / "properties"
        path.write_text(path.read_text().replace("4146196244090611202", "2285760038702293731"))
    ids = [gpu.id for gpu in detect(tmp_path).gpus]
    assert ids == ["0000:43:00.0-0", "0000:09:00.0-1"]


def test_partition_without_a_pci_device_is_found_by_its_place_ugly(tmp_path):
    """The render node of an MI300X partition leads to a platform device; the node's location is used."""
    unfold("rx7900xtx", tmp_path)
    path = tmp_path / NODES / "1/properties"
    path.write_text(path.read_text().replace("drm_render_minor 128", "drm_render_minor 131"))
    (gpu,) = detect(tmp_path).gpus
    assert (gpu.pci, gpu.kfd_node, gpu.memory_total) == ("0000:03:00.0", 1, 25753026560)


def test_node_without_drm_keeps_kfds_figures_ugly(tmp_path):
    unfold("rx7900xtx", tmp_path)
    for link in (tmp_path / "sys/class/drm").glob("*/device"):
        link.unlink()
    machine = detect(tmp_path)
    (gpu,) = machine.gpus
    assert (gpu.gfx, gpu.memory_total, gpu.render_node) == ("gfx1100", 25753026560, "renderD128")
    assert gpu.pci == "0000:03:00.0"
    assert gpu.id == "GPU-1fb8a6a50ca222e3"
    assert "kfd: node 1 has no DRM device (render minor 128)" in machine.problems


def test_unreadable_properties_are_a_problem_bad(tmp_path):
    tree = unfold("rx7900xtx", tmp_path)
    tree.denied.add(f"{NODES}/1/properties")
    machine = detect(tree)
    assert machine.kfd.hidden_nodes == 1
    assert machine.gpus[0].kfd_node is None
    assert machine.gpus[0].gfx == "gfx1100"  # from the core's version


def test_more_memory_in_use_than_there_is_ugly(tmp_path):
    unfold("rx7900xtx", tmp_path)
    write(tmp_path, "sys/devices/pci0000:00/0000:03:00.0/mem_info_vram_used", "99999999999999")
    machine = detect(tmp_path)
    assert machine.gpus[0].free == 0
    assert machine.problems == ("amd: 0000:03:00.0: more memory in use than there is",)


def test_this_machine_is_read_without_raising_good():
    machine = detect()
    assert machine.memory_total > 0
    assert Tree().here
