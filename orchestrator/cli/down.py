"""``orchestrator down``: stop what `up` started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import completion

if TYPE_CHECKING:
    from orchestrator.cli.services import Silent


def down(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Default: all.", autocompletion=completion.served),
    ] = None,
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
    found, silent = services.look(root)
    wanted = None if not names else set(names)
    code, stopped = 0, 0
    for service in found:
        here = [status["name"] for status in service.backends if wanted is None or status["name"] in wanted]
        if here:
            stopped += len(here)
            code = max(code, _stop(service, here, now))
    running = {status["name"] for service in found for status in service.backends}
    for quiet in silent:
        here = [name for name in quiet.names if wanted is None or name in wanted]
        if here or wanted is None:
            stopped += 1
            code = max(code, _stop_silent(quiet, here))
        running.update(quiet.names)
    known = {service.pid for service in found} | {quiet.pid for quiet in silent}
    others = {row["name"]: row["pid"] for row in services.foreign(root, known)}
    ran = {folder.title for folder in run_folders(root)}
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
    if whole and not services.wait_gone(service.pid, services.ENDING):
        console.err(f"{', '.join(names)}: stopped, but pid {service.pid} has not ended")
        return 3
    for name in said["stopped"]:
        console.out(f"stopped {name}")
    return 0


def _stop_silent(service: Silent, names: list[str]) -> int:
    """Call a service off that still prepares, wait for one that ends, say what to do about one that hangs."""
    from orchestrator.cli import console, services

    called = ", ".join(names) or "a service"
    if service.state == "hangs":
        console.err(
            f"{called}: pid {service.pid} does not answer\n"
            f"advice: end it with `kill -KILL {service.pid}`: its guardians end the engines"
        )
        return 3
    if service.state == "preparing" and len(names) < len(service.names):
        console.err(
            f"{called}: pid {service.pid} prepares it together with others\n"
            "advice: try again once it serves, or name them all"
        )
        return 3
    ended = (
        services.wait_gone(service.pid, services.ENDING)
        if service.state == "ending"
        else services.call_off(service)
    )
    if not ended:
        console.err(f"{called}: pid {service.pid} has not ended")
        return 3
    for name in names:
        console.out(f"stopped {name}")
    return 0
