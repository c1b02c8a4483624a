"""``orchestrator down``: stop what `up` started."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def down(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Default: all.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Kill at once instead of asking first.")] = False,
) -> int:
    """Stop engines that `up` started, and wait until nothing is left of them.

    A second Ctrl-C is not needed to be sure: what is reported as stopped was seen to be gone.
    """
    from orchestrator.cli import console, services
    from orchestrator.home import home, run_folders
    from orchestrator.profile_faults import did_you_mean

    root = home()
    for line in services.sweep(root):
        console.err(line)
    found = services.running(root)
    wanted = None if not names else set(names)
    code, stopped = 0, 0
    for service in found:
        here = [status["name"] for status in service.backends if wanted is None or status["name"] in wanted]
        if here:
            stopped += len(here)
            code = max(code, _stop(service, here, now))
    running = {status["name"] for service in found for status in service.backends}
    others = {row["name"]: row["pid"] for row in services.foreign(root, {service.pid for service in found})}
    ran = {folder.name.partition("~")[0] for folder in run_folders(root)}
    for name in names or ():
        if name in running:
            continue
        if name in others:
            console.err(f"{name}: belongs to another program, pid {others[name]}: it ends with that")
            code = 3
        elif name in ran:
            console.err(f"{name}: does not run")
        else:
            hint = did_you_mean(name, {*running, *others, *ran})
            console.err(f"{name}: nothing of that name has run{hint}")
            code = max(code, 2)
    if not names and not stopped:
        console.err("nothing runs")
    return code


def _stop(service: Any, names: list[str], now: bool) -> int:
    """Stop some engines of one service; with the last of them it ends as well."""
    from orchestrator.cli import console, control, faults, services

    whole = len(names) == len(service.backends)
    try:
        said = service.ask({"do": "stop", "names": names, "grace": 0 if now else None}, timeout=None)
    except control.NotThere:
        if not service.folder.held:
            said = {"stopped": names}  # it was ending already
        else:
            raise
    if "error" in said:
        console.err(faults.render(said["error"]))
        return int(said["error"]["exit_code"])
    if whole and not services.wait_gone(service.pid, ENDING):
        console.err(f"{', '.join(names)}: stopped, but pid {service.pid} has not ended")
        return 3
    for name in said["stopped"]:
        console.out(f"stopped {name}")
    return 0


ENDING = 15.0  # seconds for a service to end once its engines are gone
