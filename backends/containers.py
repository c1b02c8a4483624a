"""An engine in a container: from a plan to the client's ``run`` command, and the container's end.

The client (docker, podman, nerdctl) is the engine's first process as far as supervision goes. The container
is another's child, so it has a name to stop it by and a label to find it by. The guardian removes it whatever
ended the client, and the client's own list shows that it is gone.

A profile's own ``command: [docker, run, ...]`` gets name, labels, the variables and, unless it says another
thing, the port on loopback; its short form ``container`` gets the devices, groups and mounts as well. Secrets
travel by name: the client takes their values from its environment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from backends import container_options
from backends.failures import Failure, diagnose, known
from orchestrator import container_client, home
from orchestrator.backend import Command, Plan
from orchestrator.container_client import CLIENTS, HOME, LAUNCH, Client
from orchestrator.errors import Problem, ProfileError, StartError
from orchestrator.profile import Profile

PATIENCE = 15.0  # seconds in which a client has to remove what was stopped; the guardian gives it more
LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - within the container's own network, published on loopback only
REMOVE = (sys.executable, "-I", "-S", container_client.__file__)
UNPUBLISHED = ("host", "none", "container:", "ns:")  # networks in which nothing can be published

PORT_TAKEN = re.compile(r"port is already allocated|address already in use", re.IGNORECASE)
NAME_TAKEN = known(
    "container-name",
    r"name \S+ is already (in use|used)",
    "another container has that name: remove it, or leave `--name` out, then each launch has its own",
)
CONTAINER_FAILURES: tuple[Failure, ...] = (
    known(
        "container-permission",
        r"permission denied while trying to connect to the Docker daemon",
        "you may not use the daemon: join its group (`sudo usermod -aG docker $USER`) and log in again, "
        "or take podman, which needs none",
    ),
    known(
        "container-daemon",
        r"cannot connect to the Docker daemon|(cannot|unable to) connect to Podman",
        "its daemon does not run, or not where the client looks: `docker ps` (or podman's) has to work; "
        "on most systems `sudo systemctl start docker` starts it",
    ),
    NAME_TAKEN,
    known(
        "container-image",
        r"pull access denied|manifest (for \S+ not found|unknown)|failed to resolve reference"
        r"|short-name .* did not resolve|initializing source docker://.*(denied|unauthorized|unknown)",
        "there is no such image, or it needs a login: check its name, pull it by hand",
    ),
    known(
        "container-device",
        r"error gathering device information|could not select device driver|unresolvable CDI devices"
        r"|stat /dev/\S+: no such file or directory",
        "the device can't be given to a container: see `orchestrator doctor`; NVIDIA's cards need the "
        "NVIDIA container toolkit",
    ),
    known(
        "container-group",
        r"unable to find group",
        "the image has no group of that name: give its number, as `getent group render` tells",
    ),
    known(
        "container-mount",
        r"bind source path does not exist|statfs .*: no such file or directory",
        "a path that is mounted is not there for the container's daemon; when that is on another machine, or "
        "in a virtual one, it must be shared with it",
    ),
)


# -- which command it is ----------------------------------------------------------------------------


def command_of(profile: Profile) -> tuple[str, ...] | None:
    """Return what replaces the engine's program: the profile's own command, or the short form's."""
    if profile.container is None:
        return profile.command
    return (profile.container.runtime, "run", *profile.container.args, profile.container.image)


def run_at(words: Sequence[str]) -> int | None:
    """Return where a client's ``run`` stands in a command, None when it runs no container."""
    if not words or Path(words[0]).name not in CLIENTS or "run" not in words or "compose" in words:
        return None
    return words.index("run")


def check(profile: Profile) -> None:
    """Refuse a container that its client would not stay with.

    Raises:
        ProfileError: it would be started in the background.

    """
    words = profile.command or ()
    at = run_at(words)
    background = [] if at is None else [word for word in words[at:] if word in ("-d", "--detach")]
    if background:
        message = f"{background[0]} starts the container in the background; leave it out"
        raise ProfileError([Problem(str(profile.source or profile.name), 0, 0, "command", message)])


def host(words: Sequence[str]) -> str:
    """Return the address on which an engine must listen so that we reach it through the container's port."""
    return LOOPBACK if run_at(words) is None or _option(words, "--network", "--net") == "host" else EVERYWHERE


def _option(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option that was given, as ``--name VALUE`` or ``--name=VALUE``."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        flag, equals, value = word.partition("=")
        if flag in names:
            return value if equals else following
    return None


# -- one launch -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Container:
    """The container of one launch.

    Attributes:
        client: the client that runs it.
        name: what it is called.
        named: whether the profile chose that name, so that it may be somebody else's.
        launch: what its label says.
        home: the state folder whose orchestrator started it.
        published: whether its port is published; if not, it is in the host's own network.

    """

    client: Client
    name: str
    named: bool
    launch: str
    home: str
    published: bool

    def clear(self, root: Path) -> None:
        """Remove what dead launches of the same state folder left behind.

        Raises:
            StartError: the client can't do its work.

        """
        records = (folder.read() for folder in home.run_folders(root) if folder.held)
        told = [(record or {}).get("container") for record in records]
        alive = [str(each["launch"]) for each in told if isinstance(each, dict) and "launch" in each]
        said = self.client.end_others(self.home, alive)
        if not said.well:
            program, known_one = Path(self.client.argv[0]).name, diagnose(CONTAINER_FAILURES, said.text)
            raise StartError(
                f"{program}: {said.text.splitlines()[-1] if said.text else 'failed'}",
                advice=known_one.advice if known_one else f"see to it that `{program} ps` works",
            )
        if self.named and self.client.tell("inspect", "--type", "container", self.name).well:
            raise StartError(f"a container named {self.name} is there already", advice=NAME_TAKEN.advice)

    def owns(self, port: int) -> bool:
        """Say whether the container runs, and has the port published if it has one of its own."""
        wanted = ("--filter", f"label={LAUNCH}={self.launch}", "--filter", "status=running")
        said = self.client.tell("ps", *wanted, "--format", "{{.ID}} {{.Ports}}")
        return said.well and bool(said.text) and (not self.published or f":{port}->" in said.text)

    def init(self, proc: Path = Path("/proc")) -> int | None:
        """Return the pid that its first process has here; None when it isn't up, or runs elsewhere."""
        ids = self.client.find(LAUNCH, self.launch)
        if not ids.well or not ids.text:
            return None
        which = ids.text.split()[0]
        said = self.client.tell("inspect", "--type", "container", "--format", "{{.State.Pid}}", which)
        try:
            # a daemon in a virtual machine counts its own processes: only the kernel's word is taken
            ours = which in (proc / str(int(said.text)) / "cgroup").read_text()
        except (OSError, ValueError):
            return None
        return int(said.text) if ours else None

    def end(self, patience: float | None = None) -> tuple[str, ...]:
        """Make sure that it is gone; returns what is still there."""
        return self.client.end(self.launch, PATIENCE if patience is None else patience)

    def record(self) -> dict[str, object]:
        """Return what a later process needs to find it."""
        return self.client.record(self.launch)


def of(plan: Plan, launch: str, environ: Mapping[str, str]) -> Container | None:
    """Return the container that a launch of this plan will have, None when it has none."""
    words = plan.binary.argv
    at = run_at(words)
    if at is None:
        return None
    own = f"orchestrator-{plan.profile.name}-{launch[:12]}"
    given = _option(words[at:], "--name")
    network = _option(words[at:], "--network", "--net") or ""
    return Container(
        client=Client(words[: at - 1 if words[at - 1] == "container" else at], environ),
        name=given.replace("{name}", own) if given else own,
        named=bool(given) and "{name}" not in (given or ""),
        launch=launch,
        home=str(home.home(environ)),
        published=not network.startswith(UNPUBLISHED),
    )


def prepared(command: Command, plan: Plan, port: int, container: Container | None, key: str) -> Command:
    """Return the command with all that the profile's own words and its container need.

    Reads where the model's links lead.

    Args:
        command: the engine's.
        plan: what is started.
        port: on which it is reached.
        container: what it runs in, None for no container.
        key: the variable with the API key.

    """
    command = _filled_in(command, plan, port, container.name if container else plan.profile.name)
    if container is None:
        return command
    at = (run_at(command.argv) or 0) + 1
    words, short = command.argv, plan.profile.container
    if short:
        command = replace(command, env={**command.env, **container_options.renumbered(plan)})
    given = words[at : len(plan.binary.argv)]
    options: list[str] = []
    if _option(given, "--name") is None:
        options += ["--name", container.name]
    options += ["--label", f"{LAUNCH}={container.launch}", "--label", f"{HOME}={container.home}"]
    if container.published and _option(given, "-p", "--publish") is None:
        options += ["--publish", f"{LOOPBACK}:{port}:{port}"]
    if short:
        options += container_options.options(plan, short)
    for name in sorted({*command.env, key} - {"PATH"}):
        options += ["--env", name]
    return replace(
        command,
        argv=(*words[:at], *options, *words[at:]),
        stop=command.stop or _stop(plan, container),
        # by its label: the name may be somebody else's, which is why it did not start
        clean=(*REMOVE, container.launch, str(PATIENCE), *container.client.argv),
    )


def _filled_in(command: Command, plan: Plan, port: int, name: str) -> Command:
    """Return a command with the placeholders in the profile's own words filled in, and its way to stop."""
    profile = plan.profile
    own = len(plan.binary.argv) if profile.command or profile.container else 0
    values = {"{port}": str(port), "{host}": plan.host, "{model}": str(plan.model_path), "{name}": name}

    def fill(word: str) -> str:
        for placeholder, value in values.items():
            word = word.replace(placeholder, value)
        return word

    return replace(
        command,
        argv=(*map(fill, command.argv[:own]), *command.argv[own:]),
        stop=tuple(map(fill, profile.stop_command or ())),
    )


def _stop(plan: Plan, container: Container) -> tuple[str, ...]:
    # `-t` is short for `--time` and, in newer clients, for `--timeout`
    return (*container.client.argv, "stop", "-t", str(ceil(plan.profile.timeouts.stop)), container.name)
