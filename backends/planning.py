"""From a profile to a plan: program, model, context and device, decided before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from backends import programs
from orchestrator import gguf_header, hardware, model_files
from orchestrator.backend import Plan
from orchestrator.errors import BinaryMissing, Problem, ProfileError
from orchestrator.profile import Profile

if TYPE_CHECKING:
    from backends.base import SubprocessBackend

CONTAINER_CLIENTS = ("docker", "podman", "nerdctl")


def make_plan(engine: SubprocessBackend, profile: Profile, environ: Mapping[str, str]) -> Plan:
    """Decide everything for one engine.

    Raises:
        ProfileError: the profile's `args` take away what we have to set.
        BinaryMissing: the program is nowhere, or isn't this engine's.
        ModelError: the model can't be read or served.
        DeviceMissing: a GPU was asked for and none can be used.

    """
    _refuse_reserved(engine, profile)
    binary = programs.find(engine.program, profile.command, environ)
    supported = _supported(engine, binary.argv, environ, named_by_user=bool(profile.command))
    device = hardware.choose(
        hardware.detect(), profile.device, profile.gpus, supported=supported, environ=environ
    )
    path = model_files.resolve(profile.model, directory=profile.directory, environ=environ)
    header = gguf_header.read(path)
    context, source = gguf_header.effective_context(header.context, profile.context)
    return Plan(
        profile=profile,
        backend=engine.name,
        binary=binary,
        model_path=path,
        model_id=profile.name,
        header=header,
        context=context,
        context_source=source,
        slots=profile.slots,
        device=device,
        notes=device.notes,
    )


def _refuse_reserved(engine: SubprocessBackend, profile: Profile) -> None:
    taken = [arg for arg in profile.args if arg.partition("=")[0] in engine.reserved]
    if taken:
        where = str(profile.source or profile.name)
        raise ProfileError(
            [
                Problem(where, 0, 0, "args", f"{arg.partition('=')[0]} is set by the orchestrator")
                for arg in taken
            ],
            advice="use the profile's own key for it (context, slots, name, model)",
        )


def _supported(
    engine: SubprocessBackend, argv: tuple[str, ...], environ: Mapping[str, str], *, named_by_user: bool
) -> frozenset[str]:
    """Return the device kinds that the program drives."""
    anything = frozenset({"rocm", "cuda", "vulkan", "cpu"})
    if Path(argv[0]).name in CONTAINER_CLIENTS:
        return anything
    answer = programs.ask((*argv, "--list-devices"), environ)
    kinds = engine.devices_of(answer)
    if kinds is not None:
        return kinds
    if named_by_user:  # a wrapper need not answer questions
        return anything
    said = (answer.text.strip().splitlines() or ["nothing"])[0]
    raise BinaryMissing(
        f"{argv[0]}: is not a {engine.name}: --list-devices answered {said[:200]!r}",
        advice=engine.program.install,
    )
