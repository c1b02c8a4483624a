"""What an engine holds of its cards: read at most once a second, and never in anybody's way."""

from __future__ import annotations

import threading

import pytest

from orchestrator.hardware import CardUse, Gpu, GpuMemory, Live, detect
from tests.hardware.captured import CapturedTree, Programs, load, unfold, write

MIB = 1 << 20
CARD = Gpu(vendor="amd", index=0, id="GPU-1", name="RX 7800 XT", memory_total=16 << 30)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Reader:
    """A card of which 3 GiB are in use, 2 of them by process 7."""

    def __init__(self):
        self.looks = 0
        self.used_ = 3 << 30
        self.users = {7: 2 << 30, 8: 1 << 30}
        self.gate = threading.Event()
        self.gate.set()

    def used(self, gpu):
        self.looks += 1
        self.gate.wait(30)
        if isinstance(self.used_, Exception):
            raise self.used_
        return self.used_

    def processes(self, gpu, among):
        if isinstance(self.users, Exception):
            raise self.users
        return {pid: size for pid, size in self.users.items() if pid in among}


def test_what_all_and_what_the_engine_hold_good():
    (card,) = Live(Reader(), [CARD]).of({7, 9}, patience=30)
    assert card == CardUse("GPU-1", "RX 7800 XT", 16 << 30, 3 << 30, 2 << 30)


def test_without_a_card_nothing_is_read_good():
    reader = Reader()
    assert Live(reader, []).of({7}) == ()
    assert reader.looks == 0


def test_it_looks_once_a_second_good():
    reader, clock = Reader(), Clock()
    live = Live(reader, [CARD], clock=clock)
    for _ in range(5):
        live.of({7}, patience=30)
        clock.now += 0.19
    assert reader.looks == 1
    clock.now += 0.1
    reader.users = {7: 5 << 30}
    assert live.of({7}, patience=30)[0].memory_engine == 5 << 30
    assert reader.looks == 2


@pytest.mark.parametrize(
    "fault", [PermissionError(13, "no"), ValueError("?"), RuntimeError("NVML"), KeyError("x")]
)
def test_a_reader_that_fails_leaves_gaps_bad(fault):
    reader = Reader()
    reader.used_ = fault
    assert Live(reader, [CARD]).of({7}, patience=30) == (
        CardUse("GPU-1", "RX 7800 XT", 16 << 30, None, 2 << 30),
    )
    reader = Reader()
    reader.users = fault
    assert Live(reader, [CARD]).of({7}, patience=30)[0].memory_engine is None


def test_a_driver_that_hangs_holds_nobody_up_ugly():
    reader, clock = Reader(), Clock()
    live = Live(reader, [CARD], clock=clock)
    live.of({7}, patience=30)
    clock.now += 2
    reader.gate.clear()
    try:
        assert live.of({7}, patience=0)[0].memory_used == 3 << 30  # what was seen before
        clock.now += 5
        assert live.of({7}, patience=1)[0].memory_used == 3 << 30
        assert reader.looks == 2  # nobody piles up behind it
        clock.now += 20
        assert live.of({7}, patience=1)[0].memory_used is None  # too old to be told
    finally:
        reader.gate.set()


def test_a_size_that_nobody_tells_is_not_zero_ugly():
    reader = Reader()
    reader.users = {7: 0}  # nvidia-smi's [N/A], as on WSL2
    assert Live(reader, [CARD]).of({7}, patience=30)[0].memory_engine is None
    unified = Gpu(vendor="nvidia", index=0, id="GPU-2", name="GB10")
    assert Live(Reader(), [unified]).of({7}, patience=30)[0] == CardUse("GPU-2", "GB10", None, None, 2 << 30)


# -- captured machines ------------------------------------------------------------------------------


def test_amd_cards_by_what_kfd_says_good(tmp_path):
    gpus = detect(unfold("two-rx7900xtx", tmp_path)).gpus
    write(tmp_path, f"sys/class/kfd/kfd/proc/17/vram_{gpus[0].kfd_gpu_id}", f"{6149 * MIB}\n")
    first, second = Live(GpuMemory(tmp_path), gpus).of({17, 4242}, patience=30)
    assert (first.memory_engine, first.memory_used) == (6149 * MIB, 27856896)
    assert (second.memory_engine, second.memory_used) == (21852102656, 21884428288)
    assert {first.memory_total, second.memory_total} == {gpus[0].total}


def test_nvidia_cards_by_what_the_driver_says_good(tmp_path):
    tree, programs = unfold("nvidia-laptop", tmp_path), Programs(load("nvidia-laptop"))
    gpus = [gpu for gpu in detect(tree, programs).gpus if gpu.vendor == "nvidia"]
    (card,) = Live(GpuMemory(tree, programs), gpus).of({31337}, patience=30)
    assert (card.memory_used, card.memory_engine) == (3218 * MIB, 2906 * MIB)


def test_what_may_not_be_read_is_a_gap_bad(tmp_path):
    tree = unfold("two-rx7900xtx", tmp_path)
    gpus = detect(tree).gpus
    assert isinstance(tree, CapturedTree)
    folder = f"sys/class/drm/{gpus[0].render_node}/device"
    tree.denied |= {f"{folder}/mem_info_vram_used", f"sys/class/kfd/kfd/proc/4242/vram_{gpus[1].kfd_gpu_id}"}
    first, second = Live(GpuMemory(tree), gpus).of({4242}, patience=30)
    assert first.memory_used is None
    assert second.memory_engine is None
    assert second.memory_used == 21884428288
