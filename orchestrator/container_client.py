"""Asks a container client (docker, podman, nerdctl) about containers by label, and ends them.

Only words that the three share are used, and no output that they print differently. A container is known by
its labels alone: names are the user's to choose, and ids are known too late.

Run as a program (``python -I -S container_client.py LAUNCH SECONDS CLIENT...``) it removes what a launch
left; the guardian runs it, so the standard library has to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIENTS = ("docker", "podman", "nerdctl")
LAUNCH = "orchestrator.launch"  # label: the launch that a container belongs to
HOME = "orchestrator.home"  # label: the state folder of the orchestrator that started it
NO_ANSWER = "(its client does not answer)"
ASK_SECONDS = 10.0
PAUSE = 0.1  # seconds between two looks
# where the client finds its daemon; none of them is a secret
VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINER_HOST", "XDG_RUNTIME_DIR")


@dataclass(frozen=True, slots=True)
class Said:
    """What a client said.

    Attributes:
        well: whether it did what it was told.
        text: its output, or its complaint.

    """

    well: bool
    text: str


@dataclass(frozen=True, slots=True)
class Client:
    """A container client.

    Attributes:
        argv: its program and the words before ``run``, such as ``docker --context far``.
        environ: the environment in which it finds its daemon.

    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]

    def tell(self, *words: str) -> Said:
        """Run one command of the client's, with a deadline."""
        try:
            done = subprocess.run(
                (*self.argv, *words),
                env=dict(self.environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Said(False, f"no answer in {ASK_SECONDS:g} s")
        except OSError as error:
            return Said(False, error.strerror or str(error))
        well = done.returncode == 0
        return Said(well, (done.stdout if well else done.stderr).decode("utf-8", "replace").strip())

    def find(self, label: str, value: str) -> Said:
        """Return the ids of all containers with a label, those that have ended too, one a line."""
        return self.tell("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}={value}")

    def end(self, launch: str, patience: float) -> tuple[str, ...]:
        """Remove the containers of a launch by force; returns those still there after `patience` seconds."""
        deadline, tried = time.monotonic() + patience, False
        while True:
            said = self.find(LAUNCH, launch)
            left = tuple(said.text.split()) if said.well else (NO_ANSWER,)
            if not left:
                return ()
            if tried and time.monotonic() > deadline:
                return left
            if tried:
                time.sleep(PAUSE)
            if said.well:
                self.tell("rm", "--force", *left)
            tried = True

    def end_others(self, home: str, alive: Sequence[str]) -> Said:
        """Remove the containers of a state folder that no living launch has; returns the last answer."""
        said = self.find(HOME, home)
        dead = set(said.text.split()) if said.well else set()
        for launch in alive if dead else ():
            theirs = self.find(LAUNCH, launch)
            if not theirs.well:
                return theirs
            dead -= set(theirs.text.split())
        return self.tell("rm", "--force", *sorted(dead)) if dead else said

    def record(self, launch: str) -> dict[str, Any]:
        """Return what a later process needs to find the containers of a launch."""
        environ = {name: self.environ[name] for name in VARIABLES if name in self.environ}
        return {"client": list(self.argv), "environ": environ, "launch": launch}


def recorded(told: object, environ: Mapping[str, str]) -> tuple[Client, str] | None:
    """Return the client and the launch of a record, None when it makes no sense."""
    try:
        words = tuple(map(str, told["client"]))  # type: ignore[index]
        found = {str(name): str(value) for name, value in told["environ"].items()}  # type: ignore[index]
        launch = told["launch"]  # type: ignore[index]
    except (KeyError, TypeError, AttributeError):
        return None
    if not words or Path(words[0]).name not in CLIENTS or not isinstance(launch, str) or not launch:
        return None
    return Client(words, {**environ, **found}), launch


def main() -> int:
    """Remove the containers of a launch; returns the exit code."""
    launch, patience, *argv = sys.argv[1:]
    left = Client(tuple(argv), os.environ).end(launch, float(patience))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
