"""What is known of a GPU and of the machine around it: frozen values, no reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gpu:
    """One graphics processor. Sizes are bytes; 0 means that the size could not be read.

    Attributes:
        vendor: ``amd`` or ``nvidia``.
        index: its place in the order of the vendor's runtime; for AMD HIP's order, which is that of the
            KFD nodes, with cards that KFD doesn't know after the others.
        id: a name that survives a reboot: ``GPU-<unique id, 16 hex digits>`` for AMD when the card has
            one, NVIDIA's UUID, else the PCI address.
        name: marketing name, or the PCI ids.
        pci: PCI address (``0000:03:00.0``), empty when unknown.
        integrated: whether it lives inside the processor and shares the system's memory.
        why: the evidence for `integrated`.
        gfx: LLVM target (``gfx1101``) of an AMD GPU, as the kernel reports it.
        compute_capability: of an NVIDIA GPU (``8.9``).
        memory_total: its own memory; an integrated GPU's is what the firmware carved out.
        memory_used: how much of that is in use, by anyone.
        gtt_total: system memory that it may map (AMD).
        gtt_used: how much of that is mapped.
        render_node: ``renderD128``, or None.
        kfd_node: number of its node in the KFD topology, or None.
        kfd_gpu_id: KFD's own id of it, which names per-process files, or None.
        driver: kernel driver, with its version where known.
        blocked: device kind -> why that kind can't drive it now.

    """

    vendor: str
    index: int
    id: str
    name: str
    pci: str = ""
    integrated: bool = False
    why: str = ""
    gfx: str | None = None
    compute_capability: str | None = None
    memory_total: int = 0
    memory_used: int = 0
    gtt_total: int = 0
    gtt_used: int = 0
    render_node: str | None = None
    kfd_node: int | None = None
    kfd_gpu_id: int | None = None
    driver: str | None = None
    blocked: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The device kinds that drive cards of this vendor, best first."""
        return ("rocm", "vulkan") if self.vendor == "amd" else ("cuda", "vulkan")

    @property
    def shares_memory(self) -> bool:
        """Whether an engine's memory comes out of the GTT pool rather than the card's own.

        amdgpu does so for integrated GPUs whose carve-out is smaller than the GTT (``apu_prefer_gtt``,
        Linux 6.10).
        """
        return self.integrated and self.gtt_total > self.memory_total

    @property
    def total(self) -> int:
        """Bytes that an engine can use at most."""
        return self.gtt_total if self.shares_memory else self.memory_total

    @property
    def used(self) -> int:
        """Bytes in use in the pool that `total` counts."""
        return self.gtt_used if self.shares_memory else self.memory_used

    @property
    def free(self) -> int:
        """Bytes free in that pool, 0 when unknown."""
        return max(0, self.total - self.used)

    @property
    def label(self) -> str:
        """Name and target, for people."""
        target = self.gfx or (f"compute {self.compute_capability}" if self.compute_capability else "")
        return f"{self.name} ({target})" if target else self.name


@dataclass(frozen=True, slots=True)
class Kfd:
    """AMD's compute interface of the kernel.

    Attributes:
        present: ``/dev/kfd`` is there.
        permitted: this process may open it.
        topology: the kernel publishes GPU nodes, readable or not.
        hidden_nodes: nodes that this process may not read; in a container, other people's GPUs.

    """

    present: bool = False
    permitted: bool = False
    topology: bool = False
    hidden_nodes: int = 0


@dataclass(frozen=True, slots=True)
class PciCard:
    """A display or compute device on the PCI bus, whether or not a driver serves it."""

    pci: str
    vendor: int
    device: int
    driver: str | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to run engines on. Sizes are bytes.

    Attributes:
        gpus: AMD's first, each vendor's in the order of its runtime.
        kfd: state of AMD's compute interface.
        problems: what could not be read or made no sense, one sentence each.
        memory_total: system memory.
        memory_available: of which a new process may have this much, a cgroup's limit included.
        cpu: processor name.
        cpu_count: processors online.
        kernel: kernel release.
        amdgpu: version of the amdgpu module, ``in-tree`` when it has none, None when not loaded.
        rocm: version of the ROCm installation under /opt, or None.
        container: whether this looks like the inside of a container.
        cards: every AMD and NVIDIA display or compute device on the PCI bus.

    """

    gpus: tuple[Gpu, ...] = ()
    kfd: Kfd = Kfd()
    problems: tuple[str, ...] = ()
    memory_total: int = 0
    memory_available: int = 0
    cpu: str = ""
    cpu_count: int = 0
    kernel: str = ""
    amdgpu: str | None = None
    rocm: str | None = None
    container: bool = False
    cards: tuple[PciCard, ...] = ()
