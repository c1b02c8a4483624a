"""NVIDIA GPUs through the driver's library (NVML) when its Python binding is there, else nvidia-smi.

Everything is keyed on the UUID: indices move when a card is added, and CUDA's own order differs from
NVML's unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.hardware.gpu import Gpu
from orchestrator.hardware.probe import Runner, Tree

VENDOR = 0x10DE
MIB = 1 << 20
FIELDS = ("uuid", "name", "pci.bus_id", "memory.total", "memory.used", "driver_version", "compute_cap")
TIMEOUT = 10.0  # seconds; a card that has to wake up answers within 3, a hung driver never


def find(tree: Tree, run: Runner | None, problems: list[str]) -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs of a machine; says in `problems` what went wrong."""
    if not driver_loaded(tree):
        return ()
    if tree.here and (nvml := library()) is not None:
        try:
            return tuple(from_nvml(nvml))
        except nvml.NVMLError as error:
            problems.append(f"nvidia: {str(error).lower()}")
    if run is None:
        return ()
    # WSL2's device says only that Windows shares some GPU, maybe another vendor's
    return from_smi(run, problems, sure=not tree.exists("dev/dxg"))


def driver_loaded(tree: Tree) -> bool:
    """Say whether NVIDIA's own driver is there (WSL2's included), so that asking makes sense."""
    return tree.exists("proc/driver/nvidia/version") or tree.exists("dev/nvidiactl") or tree.exists("dev/dxg")


def library() -> Any:
    """Return the nvidia-ml-py module, or None when it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


@contextlib.contextmanager
def opened(nvml: Any) -> Iterator[None]:
    """Keep NVML initialised within the context."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def from_nvml(nvml: Any) -> list[Gpu]:
    """Read every card through NVML.

    Raises:
        nvml.NVMLError: the driver can't be asked.

    """
    with opened(nvml):
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return [
            _from_handle(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index), driver)
            for index in range(nvml.nvmlDeviceGetCount())
        ]


def _from_handle(nvml: Any, index: int, handle: Any, driver: str) -> Gpu:
    total = used = 0
    with contextlib.suppress(nvml.NVMLError):  # unified memory (GB10, Jetson) has no such figure
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
    capability = None
    with contextlib.suppress(nvml.NVMLError):
        capability = ".".join(str(part) for part in nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Gpu(
        vendor="nvidia",
        index=index,
        id=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        pci=_pci(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        why="NVIDIA's driver serves it",
        compute_capability=capability,
        memory_total=total,
        memory_used=used,
        driver=f"nvidia {driver}",
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _pci(address: str) -> str:
    """Spell a bus id as sysfs does: ``00000000:01:00.0`` is ``0000:01:00.0``."""
    domain, colon, rest = address.strip().lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def _mib(text: str) -> int:
    text = text.strip().removesuffix("MiB").strip()
    return int(text) * MIB if text.isascii() and text.isdecimal() and len(text) < 12 else 0


def query(run: Runner, what: str, fields: tuple[str, ...]) -> tuple[list[dict[str, str]], str]:
    """Ask nvidia-smi; return one mapping a line, and what went wrong (empty when nothing did)."""
    ran = run(["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"], TIMEOUT)
    if ran.code != 0:
        return [], (ran.err or ran.out).strip().splitlines()[0] if (ran.err or ran.out).strip() else "failed"
    rows = ([value.strip() for value in line.split(",")] for line in ran.out.splitlines())
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)], ""


def from_smi(run: Runner, problems: list[str], *, sure: bool = True) -> tuple[Gpu, ...]:
    """Read every card through nvidia-smi; unless `sure` that there is one, a failure is no problem."""
    rows, fault = query(run, "gpu", FIELDS)
    if "compute_cap" in fault:  # drivers before 510 don't know the field
        rows, fault = query(run, "gpu", FIELDS[:-1])
    if fault and sure:
        problems.append(f"nvidia-smi: {fault.lower().rstrip('.')}")
    return tuple(_from_row(row, position) for position, row in enumerate(rows))


def _from_row(row: dict[str, str], position: int) -> Gpu:
    capability = row.get("compute_cap", "")
    return Gpu(
        vendor="nvidia",
        index=position,
        id=row["uuid"] if row["uuid"].startswith(("GPU-", "MIG-")) else _pci(row["pci.bus_id"]),
        name=row["name"],
        pci=_pci(row["pci.bus_id"]),
        why="NVIDIA's driver serves it",
        compute_capability=capability if capability.replace(".", "").isdecimal() else None,
        memory_total=_mib(row["memory.total"]),
        memory_used=_mib(row["memory.used"]),
        driver=f"nvidia {row['driver_version']}",
    )


def processes(tree: Tree, run: Runner | None) -> dict[str, dict[int, int]]:
    """Return for each UUID which process ids use how many bytes; unknown sizes count as 0."""
    if not driver_loaded(tree):
        return {}
    if tree.here and (nvml := library()) is not None:
        with contextlib.suppress(nvml.NVMLError):
            return _processes_from_nvml(nvml)
    rows = query(run, "compute-apps", ("gpu_uuid", "pid", "used_memory"))[0] if run is not None else []
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["pid"].isascii() and row["pid"].isdecimal() and len(row["pid"]) < 12:
            users = found.setdefault(row["gpu_uuid"], {})
            users[int(row["pid"])] = users.get(int(row["pid"]), 0) + _mib(row["used_memory"])
    return found


def _processes_from_nvml(nvml: Any) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    with opened(nvml):
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            users = found.setdefault(_text(nvml.nvmlDeviceGetUUID(handle)), {})
            ask: Callable[[Any], Any] = nvml.nvmlDeviceGetComputeRunningProcesses
            for process in ask(handle):
                users[int(process.pid)] = int(process.usedGpuMemory or 0)
    return found
