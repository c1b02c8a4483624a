"""Who uses how much GPU memory, and whether it came back."""

from __future__ import annotations

import pytest

from orchestrator.hardware import GpuMemory, Snapshot, Watch, detect, unreturned
from tests.hardware.captured import Programs, load, unfold, write

MIB = 1 << 20
USED = "sys/devices/pci0000:00/0000:43:00.0/mem_info_vram_used"
IDLE = 27856896  # bytes in use on an idle RX 7900 XTX
LOADED = IDLE + 6149 * MIB  # the source's Qwen2.5-7B


@pytest.fixture
def machine(tmp_path):
    return detect(unfold("two-rx7900xtx", tmp_path))


def say(root, used, **processes):
    """Let the first card of two have `used` bytes in use, `processes` (p17=...) of which by KFD clients."""
    write(root, USED, f"{used}\n")
    for name, size in processes.items():
        write(root, f"sys/class/kfd/kfd/proc/{name[1:]}/vram_33863", f"{size}\n")


def test_memory_in_use_and_its_users_good(machine, tmp_path):
    reader = GpuMemory(tmp_path)
    first, second = machine.gpus
    assert (reader.used(first), reader.used(second)) == (IDLE, 21884428288)
    assert reader.processes(second) == {4242: 21852102656}
    assert reader.processes(second, {4242, 1}) == {4242: 21852102656}
    assert reader.processes(second, {1}) == {}


def test_integrated_gpu_counts_what_it_maps_good(tmp_path):
    (gpu,) = detect(unfold("strix-halo", tmp_path)).gpus
    assert GpuMemory(tmp_path).used(gpu) == 198303744 + 42164224


def test_nvidia_is_read_by_uuid_good(tmp_path):
    tree, programs = unfold("nvidia-laptop", tmp_path), Programs(load("nvidia-laptop"))
    gpu = detect(tree, programs).gpus[1]
    reader = GpuMemory(tree, programs)
    assert reader.used(gpu) == 3218 * MIB
    assert reader.processes(gpu) == {31337: 2906 * MIB}


def test_unreadable_is_none_and_not_zero_bad(machine, tmp_path):
    (tmp_path / USED).unlink()
    reader = GpuMemory(tmp_path)
    assert reader.used(machine.gpus[0]) is None
    watch = Watch(reader, machine.gpus[:1])
    assert watch.look().unread == ("GPU-1fb8a6a50ca222e3",)
    assert watch.look().back


def test_all_memory_back_good(machine, tmp_path):
    watch = Watch(GpuMemory(tmp_path), machine.gpus)
    say(tmp_path, LOADED, p17=6100 * MIB)
    assert not watch.look({17}).back
    (tmp_path / "sys/class/kfd/kfd/proc/17/vram_33863").unlink()
    say(tmp_path, IDLE + 30 * MIB)
    assert watch.look({17}).back


def test_memory_kept_without_a_process_is_named_bad(machine, tmp_path):
    """What a driver that lost a process's memory, or an engine on Vulkan, looks like."""
    watch = Watch(GpuMemory(tmp_path), machine.gpus)
    say(tmp_path, LOADED)
    result = watch.look({17})
    assert result.missing == {"GPU-1fb8a6a50ca222e3": 6149 * MIB}
    assert not result.back


def test_survivor_is_named_bad(machine, tmp_path):
    watch = Watch(GpuMemory(tmp_path), machine.gpus)
    say(tmp_path, LOADED, p17=0, p18=6100 * MIB)
    result = watch.look({17, 18})
    assert result.holders == {18: 6100 * MIB}
    assert result.missing == {"GPU-1fb8a6a50ca222e3": 6149 * MIB}


def test_small_survivor_is_named_too_ugly(machine, tmp_path):
    watch = Watch(GpuMemory(tmp_path), machine.gpus)
    say(tmp_path, IDLE + 100 * MIB, p18=100 * MIB)
    assert not watch.look({18}).back


def test_what_others_took_is_not_ours_good(machine, tmp_path):
    """A second engine that started meanwhile must not make the first one look stuck."""
    watch = Watch(GpuMemory(tmp_path), machine.gpus)
    say(tmp_path, IDLE + 8100 * MIB, p99=8000 * MIB)
    assert watch.look({17}).back


def test_growth_of_others_counts_by_its_difference_good():
    before = Snapshot(1000 * MIB, {5: 800 * MIB})
    assert unreturned(before, Snapshot(1500 * MIB, {5: 1300 * MIB}), {7}) == 0
    assert unreturned(before, Snapshot(1500 * MIB, {5: 800 * MIB}), {7}) == 500 * MIB
    assert unreturned(before, Snapshot(1500 * MIB, {5: 800 * MIB, 7: 500 * MIB}), {7}) == 500 * MIB


def test_less_in_use_than_before_is_back_good():
    assert unreturned(Snapshot(1000 * MIB), Snapshot(10 * MIB)) < 0


def test_odd_process_entries_are_survived_ugly(machine, tmp_path):
    write(tmp_path, "sys/class/kfd/kfd/proc/abc/vram_33863", "1")
    write(tmp_path, "sys/class/kfd/kfd/proc/12/vram_33863", "lots")
    write(tmp_path, "sys/class/kfd/kfd/proc/13", "a file")
    assert GpuMemory(tmp_path).processes(machine.gpus[0]) == {4242: 0}


FDINFO = """\
pos:\t0
drm-driver:\tamdgpu
drm-client-id:\t{client}
drm-pdev:\t{pci}
{lines}
"""


def draw(root, pid, number, client=1, pci="0000:43:00.0", lines="drm-memory-vram:\t2048 KiB"):
    """Let a process hold a descriptor of a DRM device."""
    write(root, f"proc/{pid}/fdinfo/{number}", FDINFO.format(client=client, pci=pci, lines=lines))
    (root / f"proc/{pid}/fd").mkdir(exist_ok=True)
    (root / f"proc/{pid}/fd/{number}").symlink_to("/dev/dri/renderD129")


def test_vulkan_and_graphics_are_users_too_good(machine, tmp_path):
    draw(tmp_path, 50, 7)
    draw(tmp_path, 50, 8)  # the same client through another descriptor
    draw(
        tmp_path,
        50,
        9,
        client=2,
        lines="drm-memory-vram:\t9 KiB\ndrm-resident-vram:\t3 MiB\ndrm-shared-vram: 0",
    )
    draw(tmp_path, 51, 7, pci="0000:09:00.0")
    (tmp_path / "proc/50/fd/10").symlink_to("/home/ada/file")
    first, second = machine.gpus
    assert GpuMemory(tmp_path).processes(first) == {50: 5 * MIB, 4242: 0}
    assert GpuMemory(tmp_path).processes(second) == {51: 2 * MIB, 4242: 21852102656}


def test_what_two_sources_say_is_not_added_up_good(machine, tmp_path):
    draw(tmp_path, 4242, 7, pci="0000:09:00.0")
    assert GpuMemory(tmp_path).processes(machine.gpus[1]) == {4242: 21852102656}


def test_mapped_memory_counts_for_integrated_gpus_only_good(tmp_path):
    lines = "drm-memory-vram:\t1024 KiB\ndrm-memory-gtt: \t5 MiB"
    (gpu,) = detect(unfold("strix-halo", tmp_path / "apu")).gpus
    draw(tmp_path / "apu", 50, 7, pci=gpu.pci, lines=lines)
    assert GpuMemory(tmp_path / "apu").processes(gpu) == {50: 6 * MIB}
    (card,) = detect(unfold("rx7900xtx", tmp_path / "card")).gpus
    draw(tmp_path / "card", 50, 7, pci=card.pci, lines=lines)
    assert GpuMemory(tmp_path / "card").processes(card) == {50: MIB}


def test_an_engine_on_vulkan_that_lives_is_a_holder_bad(machine, tmp_path):
    watch = Watch(GpuMemory(tmp_path), machine.gpus)
    draw(tmp_path, 50, 7, lines="drm-memory-vram:\t6 MiB")
    assert watch.look({50}).holders == {50: 6 * MIB}


@pytest.mark.parametrize(
    "lines", ["drm-memory-vram:\t-1 KiB", "drm-memory-vram: lots", "", "drm-memory-vram: " + "9" * 40]
)
def test_nonsense_about_a_client_counts_nothing_ugly(lines, machine, tmp_path):
    draw(tmp_path, 50, 7, lines=lines)
    assert GpuMemory(tmp_path).processes(machine.gpus[0])[50] == 0
