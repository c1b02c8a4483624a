"""What stands between this machine and a running engine: findings as data, each with what mends it.

`examine` looks, decides and returns; the command line prints. Nothing here changes anything.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backend import Binary
from orchestrator.hardware import (
    MASKS,
    NO_ANSWER,
    Gpu,
    GpuMemory,
    LlamaDevice,
    Machine,
    Runner,
    Tree,
    built_for,
    detect,
    overridden,
    parse_llama_devices,
    run_program,
    runs_on,
    supported_kinds,
)
from orchestrator.hardware.checks import Finding, Level, graphics, human

LOW_MEMORY = 2 << 30  # bytes; less is not enough for a small model and its cache
LOW_DISK = 10 << 30  # bytes; a common model in four bits is about half of that
NO_DISK = 1 << 30  # bytes
FEW_FILES = 4096  # descriptors; the gateway alone holds two for each stream
FEW_PROCESSES = 1024
PROBE_TIMEOUT = 20.0  # seconds; the first start of a ROCm binary loads several GB of libraries


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's program, looked at.

    Attributes:
        name: the engine's name.
        path: the program, or None when there is none.
        source: where it was found, in words.
        version: what it says of itself, or None.
        kinds: device kinds that it can drive.
        devices: what it lists, in its order; None when it can't list devices.
        targets: AMD targets it carries code for; empty when unknown.
        problem: why it can't be used, or None.
        advice: what to do about that, or None.
        variable: names another program, or None.

    """

    name: str
    path: str | None = None
    source: str = ""
    version: str | None = None
    kinds: frozenset[str] = frozenset({"cpu"})
    devices: tuple[LlamaDevice, ...] | None = None
    targets: frozenset[str] = frozenset()
    problem: str | None = None
    advice: str | None = None
    variable: str | None = None


def look_at(name: str, binary: Binary, run: Runner = run_program) -> Engine:
    """Ask a llama.cpp program for its version and its devices."""
    path = shutil.which(binary.argv[0]) or binary.argv[0]
    version = run([*binary.argv, "--version"], PROBE_TIMEOUT)
    if version.code != 0:
        last = (version.err or version.out).strip().splitlines() or [f"exit code {version.code}"]
        if version.code is None and last[-1].startswith(NO_ANSWER):
            advice = f"is the machine busy? try again, or see for yourself: {path} --version"
            return Engine(name, path, binary.source, problem=f"it gave {last[-1]}", advice=advice)
        return Engine(name, path, binary.source, problem=f"it does not run: {last[-1]}")
    said = f"{version.out}\n{version.err}".splitlines()
    number = next((line.partition(":")[2].strip() for line in said if line.startswith("version:")), None)
    listed = run([*binary.argv, "--list-devices"], PROBE_TIMEOUT)
    return Engine(
        name,
        path,
        binary.source,
        version=number,
        kinds=supported_kinds(f"{listed.err}\n{listed.out}"),
        devices=tuple(parse_llama_devices(listed.out)),
        targets=built_for(Path(path)),
    )


def examine(
    root: Path | Tree = Path("/"),
    run: Runner | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    binaries: Sequence[Engine] | None = None,
    folders: Mapping[str, Path] | None = None,
    ports: Mapping[int, str | None] | None = None,
    machine: Machine | None = None,
    limits: Mapping[str, int] | None = None,
    disk_free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    port_free: Callable[[int], bool] | None = None,
) -> list[Finding]:
    """Look at everything that has to be right, worst matters first within each subject.

    `binaries` are the engines' programs that the caller looked for (None leaves them out), `folders` where
    state and models go, `ports` those that shall be listened on, with what of ours does so already. `limits`
    are soft resource limits by name (``nofile``, ``nproc``, ``as``), -1 for none; by default this process's
    own.
    """
    tree = root if isinstance(root, Tree) else Tree(root)
    environ = os.environ if environ is None else environ
    machine = machine or detect(tree, run)
    return [
        *graphics(machine, tree, environ),
        *(() if binaries is None else _engines(machine, binaries, environ)),
        *_memory(machine, tree, run),
        *_limits(_own_limits() if limits is None else limits),
        *_folders(folders or {}, disk_free),
        *_ports(ports or {}, port_free or _can_bind),
        *(Finding("info", "reading", problem) for problem in machine.problems),
    ]


def blocked(findings: Iterable[Finding]) -> bool:
    """Say whether something has to be mended first."""
    return any(finding.level == "blocker" for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return what the command should exit with: 1 when something blocks, else 0."""
    return int(blocked(findings))


def _engines(machine: Machine, engines: Sequence[Engine], environ: Mapping[str, str]) -> Iterator[Finding]:
    works = any(engine.problem is None for engine in engines)
    if not engines:
        yield Finding(
            "blocker",
            "engines",
            "no engine is registered",
            "pip install --force-reinstall inference-orchestrator",
        )
    for engine in engines:
        if engine.problem is not None:
            level: Level = "warning" if works else "blocker"
            yield Finding(level, engine.name, engine.problem, engine.advice)
            continue
        place = f" ({engine.source})" if engine.source else ""
        devices = ", ".join(f"{device.name} {device.description}" for device in engine.devices or ())
        version = f"version {engine.version}, " if engine.version else ""
        yield Finding(
            "ok", engine.name, f"{version}{engine.path or 'found'}{place}; devices: {devices or 'CPU'}"
        )
        if engine.devices is not None:  # else it is one build, for what its name says
            yield from _cards(engine, engine.devices, machine, environ)


def _cards(
    engine: Engine, devices: Sequence[LlamaDevice], machine: Machine, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Hold a llama.cpp program, which is built for some kinds of device, against the cards that are there."""
    for gpu in _usable(machine):
        able = [kind for kind in gpu.kinds if kind in engine.kinds and kind not in gpu.blocked]
        if not able:
            yield Finding(
                "warning",
                engine.name,
                f"it was built without {gpu.kinds[0]}, so {gpu.label} stays idle",
                f"install a build for {gpu.kinds[0]} and "
                + (f"name it in {engine.variable}" if engine.variable else "put it on PATH"),
            )
        elif not any(device.kind == able[0] for device in devices):
            masked = any(environ.get(mask) is not None for mask in MASKS)
            yield Finding(
                "warning" if masked else "blocker",
                engine.name,
                f"it lists no {able[0]} device although {gpu.label} is there"
                + ("; masks are set in this shell" if masked else ""),
                f"{engine.path} --list-devices",
            )
        target = overridden(environ.get("HSA_OVERRIDE_GFX_VERSION", "")) or gpu.gfx
        if able[:1] == ["rocm"] and target and engine.targets and not runs_on(engine.targets, target):
            yield Finding(
                "blocker",
                engine.name,
                f"it was built for {', '.join(sorted(engine.targets))}, and the GPU is {target}",
                f"build llama.cpp with -DGGML_HIP=ON -DGPU_TARGETS={target}",
            )


def _usable(machine: Machine) -> list[Gpu]:
    return [gpu for gpu in machine.gpus if not gpu.integrated and gpu.kinds[0] not in gpu.blocked]


def _memory(machine: Machine, tree: Tree, run: Runner | None) -> Iterator[Finding]:
    what = f"{human(machine.memory_available)} of {human(machine.memory_total)} available"
    low = machine.memory_available < LOW_MEMORY
    if machine.memory_total:
        yield Finding(
            "warning" if low else "ok", "memory", what, "ps aux --sort=-rss | head" if low else None
        )
    reader = GpuMemory(tree, run)
    for gpu in _usable(machine):
        if gpu.used * 2 > gpu.total:
            users = [
                f"{pid} ({tree.text(f'proc/{pid}/comm') or '?'}, {human(size)})"
                for pid, size in sorted(reader.processes(gpu).items(), key=lambda item: -item[1])
                if size
            ]
            yield Finding(
                "warning",
                "GPU memory",
                f"{gpu.id}: {human(gpu.used)} of {human(gpu.total)} in use"
                + (f" by {', '.join(users)}" if users else ""),
                "orchestrator ps shows our engines; end the others",
            )


def _own_limits() -> dict[str, int]:
    names = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "as": resource.RLIMIT_AS}
    return {name: resource.getrlimit(number)[0] for name, number in names.items()}


def _limits(limits: Mapping[str, int]) -> Iterator[Finding]:
    wanted = {
        "nofile": (FEW_FILES, "open files", "ulimit -n 65536"),
        "nproc": (FEW_PROCESSES, "processes", "ulimit -u 4096"),
    }
    fine = True
    for name, (least, what, command) in wanted.items():
        if 0 <= limits.get(name, -1) < least:
            fine = False
            yield Finding("warning", "limits", f"only {limits[name]} {what} are allowed", command)
    if limits.get("as", -1) >= 0:
        fine = False
        message = f"address space is limited to {human(limits['as'])}, and models are mapped into it"
        yield Finding("warning", "limits", message, "ulimit -v unlimited")
    if fine:
        yield Finding("ok", "limits", "open files, processes and address space suffice")


def _folders(folders: Mapping[str, Path], disk_free: Callable[[Path], int]) -> Iterator[Finding]:
    for name, folder in folders.items():
        # not Path's: they raise where access is denied
        there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))  # noqa: PTH110
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            problem = "is not a folder" if not there.is_dir() else "can't be written to"
            yield Finding("blocker", f"disk {name}", f"{there} {problem}", f"ls -ld {there}")
            continue
        try:
            free = disk_free(there)
        except OSError as error:
            yield Finding("warning", f"disk {name}", f"{there}: {(error.strerror or str(error)).lower()}")
            continue
        level: Level = "blocker" if free < NO_DISK else "warning" if free < LOW_DISK else "ok"
        command = None if level == "ok" else f"df -h {there}"
        yield Finding(level, f"disk {name}", f"{human(free)} free in {there}", command)


def _ports(ports: Mapping[int, str | None], port_free: Callable[[int], bool]) -> Iterator[Finding]:
    for port, ours in ports.items():
        if ours is not None:
            yield Finding("ok", f"port {port}", f"serves {ours}")
        elif port_free(port):
            yield Finding("ok", f"port {port}", "free")
        else:
            yield Finding(
                "warning", f"port {port}", "another program listens there", f"ss -ltnp 'sport = :{port}'"
            )


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True
