"""``orchestrator switch``: another engine behind the same address."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import completion

if TYPE_CHECKING:
    from orchestrator.cli.services import Service


def switch(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="What is served; default: the only one.", autocompletion=completion.served
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Another engine for the same profile.",
            autocompletion=completion.backends,
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="FILE", help="Another profile, under the same name.")
    ] = None,
    drain: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="How long answers under way may take; default: 30."),
    ] = None,
    beside: Annotated[
        bool | None,
        typer.Option(help="Start the new one while the old one runs; default: when both fit."),
    ] = None,
) -> int:
    """Put another engine behind a running address, and wait until the old one is gone.

    Clients need not know: new requests wait or go to the new engine, answers under way are finished by the
    old one. When the new engine does not come up, the old one serves on.
    """
    from orchestrator import profile as profiles
    from orchestrator.cli import console, faults, services
    from orchestrator.cli.faults import UsageError

    if (backend is None) == (profile is None):
        raise UsageError("switch: give either --backend or --profile", advice="orchestrator switch --help")
    if profile is not None:
        profiles.load(profile)  # its faults are shown here
    service, name = _find(services.running(), name)
    console.err(f"switching {name} to {backend or profile}")
    said = service.ask(
        {
            "do": "switch",
            "name": name,
            "backend": backend,
            "profile": profile and str(Path(profile).absolute()),
            "drain_s": drain,
            "beside": beside,
        },
        timeout=None,
    )
    if "error" in said:
        console.err(faults.render(said["error"]))
        return int(said["error"]["exit_code"])
    console.err(_figures(said))
    console.out(f"switched {name} {said['backend']}")
    return 0


def _find(found: list[Service], name: str | None) -> tuple[Service, str]:
    """Return the service that has the name, or the only name there is."""
    from orchestrator.cli.faults import UsageError

    served = [(service, str(status["name"])) for service in found for status in service.backends]
    fitting = [entry for entry in served if name in {None, entry[1]}]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(sorted(entry[1] for entry in served))
    if name is not None:
        raise UsageError(f"switch: {name} does not run", advice="start it with `orchestrator up`")
    if not served:
        raise UsageError("switch: nothing runs", advice="start something with `orchestrator up`")
    raise UsageError("switch: several run, name one", advice=f"there are {names}")


def _figures(done: dict[str, Any]) -> str:
    how = "beside" if done["beside"] else "after"
    ended = f", {done['cut']} answers ended at the drain time" if done["cut"] else ""
    return (
        f"{done['backend']} serves since {done['ready_s']:.1f} s, started {how} {done['before']}, "
        f"which was gone after {done['total_s']:.1f} s{ended}"
    )
