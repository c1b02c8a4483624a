"""From a profile to a plan: program, model, context and device, decided before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from backends import containers
from orchestrator import gguf_header, hardware, model_files, templates
from orchestrator.backend import Lacking, Plan
from orchestrator.errors import DoesNotFit, NotFetched, Problem, ProfileError
from orchestrator.profile import Profile

if TYPE_CHECKING:
    from backends.base import SubprocessBackend
    from backends.lifecycle import Lifecycle

T = TypeVar("T")
MACHINE = "ORCHESTRATOR_MACHINE"  # the root of a captured machine, to plan for one that is elsewhere


def make_plan(engine: SubprocessBackend, profile: Profile, environ: Mapping[str, str]) -> Plan:
    """Decide everything for one engine.

    Raises:
        ProfileError: the profile's `args` or `command` take away what we have to set.
        BinaryMissing: the program is nowhere, or isn't this engine's.
        ModelError: the model can't be read or served.
        DeviceMissing: a GPU was asked for and none can be used.

    """
    _refuse_reserved(engine, profile)
    containers.check(profile)
    command = containers.command_of(profile)
    binary = engine.locate(environ, command)
    supported = engine.drives(binary, environ, named_by_user=command is not None)
    machine = hardware.detect(Path(environ.get(MACHINE) or "/"))
    device = hardware.choose(machine, profile.device, profile.gpus, supported=supported, environ=environ)
    missing = _Missing()
    path, header = missing.or_here(lambda: engine.find_model(profile, environ), lambda path: (path, None))
    mmproj = missing.or_here(
        lambda: model_files.projector(profile.model, directory=profile.directory, environ=environ),
        lambda path: path,
    )
    if missing.downloads:
        header = None  # of a part alone nothing follows
    cap = None if profile.context == "auto" else profile.context
    context, source = gguf_header.effective_context(header.context if header else None, cap)
    shortened = (
        (f"context: {cap} asked for, {context} given: {source}",) if _is_reduced(profile, context) else ()
    )
    plan = Plan(
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
        mmproj_path=mmproj,
        lora_paths=engine.find_adapters(profile, environ),
        chat_template_path=_template(profile),
        host=containers.host(command or ()),
        notes=(*device.notes, *missing.notes, *shortened),
        downloads=tuple(missing.downloads),
    )
    return engine.settle(plan, machine)


def _template(profile: Profile) -> Path | None:
    """Return the file of a chat template, None where the engine has to know its name."""
    if not profile.chat_template:
        return None
    path = templates.shipped(profile.chat_template) or profile.directory / profile.chat_template
    return path if path.is_file() else None


def tell_reduced(life: Lifecycle, plan: Plan) -> None:
    """Tell that requests get less context than the profile asks for."""
    if _is_reduced(plan.profile, plan.context):
        with life.changed:
            life.tell(
                "context_reduced", asked=plan.profile.context, given=plan.context, why=plan.context_source
            )


def _is_reduced(profile: Profile, context: int) -> bool:
    """Say whether a context is less than what the profile asks for; its default asks for nothing."""
    asked = profile.context if "context" in profile.model_fields_set else "auto"
    return asked != "auto" and context < asked


class _Missing:
    """What this machine has not, but can get or make: planned with, and done by who starts the plan."""

    def __init__(self) -> None:
        self.downloads: list[Lacking] = []
        self.notes: list[str] = []

    def or_here(self, find: Callable[[], T], otherwise: Callable[[Path], T]) -> T:
        """Return what is found, or what stands for it where it will be."""
        try:
            return find()
        except NotFetched as fault:
            self.downloads.append(fault.download)
            self.notes.append(fault.message)
            return otherwise(fault.path)


def refuse_what_does_not_fit(plan: Plan) -> None:
    """Turn a plan away that can't have enough memory, before gigabytes are loaded for nothing.

    What the runtime takes besides is an estimate and turns nobody away.

    Raises:
        DoesNotFit: its weights, cache and compute buffer alone are more than is free.

    """
    budget = plan.memory
    if budget is None or budget.verdict.answer != "no" or not plan.profile.check_memory:
        return
    for place, part, free in (
        ("the GPU", budget.estimate.device, budget.free.device),
        ("system memory", budget.estimate.host, budget.free.host),
    ):
        needed = part.total - part.overhead
        if free is not None and needed > free:
            ways = "; or ".join(budget.advice) or "take a smaller model"
            raise DoesNotFit(
                f"{plan.backend}: {plan.profile.name}: needs {needed >> 20} MiB of {place}, "
                f"{free >> 20} MiB are free (by {budget.estimate.source})",
                profile=plan.profile.name,
                advice=f"change the profile: {ways}; check_memory: false starts it all the same",
            )


def _refuse_reserved(engine: SubprocessBackend, profile: Profile) -> None:
    taken = [arg for arg in profile.args if _flag(arg) in engine.reserved]
    if taken:
        where = str(profile.source or profile.name)
        raise ProfileError(
            [Problem(where, 0, 0, "args", f"{_flag(arg)} is set by the orchestrator") for arg in taken],
            advice="use the profile's own key for it (context, slots, name, model)",
        )


def _flag(arg: str) -> str:
    """Return an argument's flag: engines may read ``--max_model_len`` as ``--max-model-len``."""
    return arg.partition("=")[0].replace("_", "-")
