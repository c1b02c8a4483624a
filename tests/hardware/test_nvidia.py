"""NVIDIA's own library, by a stand-in with the same functions as nvidia-ml-py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orchestrator.hardware import GpuMemory, Tree, nvidia
from orchestrator.hardware.nvidia import from_nvml


class Nvml:
    """Two cards, of which the second has unified memory and can't tell how much."""

    class NVMLError(Exception):
        pass

    open = 0

    def __init__(self, text=str):
        self._text = text

    def nvmlInit(self):  # noqa: N802
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return self._text("580.95.05")

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self._text(f"GPU-{handle}")

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self._text(["NVIDIA H200", "NVIDIA GB10"][handle])

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(busId=self._text(f"00000000:0{handle}:00.0"))

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        if handle:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=150754820096, used=681574400, free=0)

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return [(9, 0), (12, 1)][handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=77, usedGpuMemory=None if handle else 4096)]


@pytest.mark.parametrize("text", [str, str.encode])
def test_cards_are_read_from_the_library_good(text):
    nvml = Nvml(text)
    first, second = from_nvml(nvml)
    assert (first.id, first.name, first.pci, first.compute_capability) == (
        "GPU-0", "NVIDIA H200", "0000:00:00.0", "9.0",
    )  # fmt: skip
    assert (first.memory_total, first.memory_used, first.driver) == (
        150754820096,
        681574400,
        "nvidia 580.95.05",
    )
    assert (second.memory_total, second.free) == (0, 0)
    assert nvml.open == 0


def test_processes_are_read_from_the_library_good(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(nvidia, "library", lambda: nvml)
    monkeypatch.setattr(nvidia, "driver_loaded", lambda tree: True)
    first, second = from_nvml(nvml)
    reader = GpuMemory(Tree(), lambda argv, timeout: pytest.fail("nvidia-smi is not needed"))
    assert reader.processes(first) == {77: 4096}
    assert reader.processes(second) == {77: 0}
    assert reader.used(first) == 681574400


def test_library_that_fails_leaves_it_to_nvidia_smi_bad(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(Nvml.NVMLError("Driver Not Loaded")))
    monkeypatch.setattr(nvidia, "library", lambda: nvml)
    monkeypatch.setattr(nvidia, "driver_loaded", lambda tree: True)
    problems: list[str] = []
    assert nvidia.find(Tree(), None, problems) == ()
    assert problems == ["nvidia: driver not loaded"]
