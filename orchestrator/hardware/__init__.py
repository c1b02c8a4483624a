"""GPUs, memory and which of them an engine gets. Reads the machine, starts no engine, prints nothing."""

from orchestrator.hardware.detect import detect
from orchestrator.hardware.devices import KINDS, MASKS, DeviceChoice, choose
from orchestrator.hardware.gpu import Gpu, Kfd, Machine, PciCard
from orchestrator.hardware.listing import LlamaDevice, parse_llama_devices, supported_kinds
from orchestrator.hardware.live import CardUse, Live
from orchestrator.hardware.memory import GpuMemory, Returned, Snapshot, Watch, unreturned
from orchestrator.hardware.probe import NO_ANSWER, Ran, Runner, Tree, run_program
from orchestrator.hardware.targets import built_for, overridden, runs_on

__all__ = [
    "KINDS",
    "MASKS",
    "NO_ANSWER",
    "CardUse",
    "DeviceChoice",
    "Gpu",
    "GpuMemory",
    "Kfd",
    "Live",
    "LlamaDevice",
    "Machine",
    "PciCard",
    "Ran",
    "Returned",
    "Runner",
    "Snapshot",
    "Tree",
    "Watch",
    "built_for",
    "choose",
    "detect",
    "overridden",
    "parse_llama_devices",
    "run_program",
    "runs_on",
    "supported_kinds",
    "unreturned",
]
