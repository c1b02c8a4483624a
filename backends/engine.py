"""`Engine`: what an engine says of itself, as data and hooks; a file of an engine fills in what differs.

No hook needs `super()`: each has here what suits most engines, and is replaced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from backends import programs
from backends.failures import Failure
from orchestrator import gguf_header, hardware, model_files
from orchestrator.backend import Ask, Binary, Command, Dialect, Plan, Recognised
from orchestrator.container_client import CLIENTS
from orchestrator.discovery import family
from orchestrator.engines import Recipe
from orchestrator.errors import BinaryMissing
from orchestrator.hardware import GpuMemory, Machine

if TYPE_CHECKING:
    from orchestrator.gguf_header import Header
    from orchestrator.hf_model import HfModel
    from orchestrator.profile import Profile


class Engine:
    """What differs between engines.

    Attributes:
        name: of the backend.
        dialect: how it spells the options of a request.
        Options: what its section of a profile may hold.
        formats: of models that it serves as they are: ``gguf``, ``safetensors``.
        program: where its program may be.
        recipe: how it gets an environment of its own, None when it can't be installed from here.
        key_variable: the variable from which it takes its API key.
        unset: inherited variables that would steer it; a trailing ``*`` is every name with that prefix.
        reserved: flags that a profile's `args` may not hold, since they are set from other keys.
        health_path: 200 once it serves.
        props_path: what it says of itself for `confirm`, or None.
        progress_path: where its counters are, in Prometheus' text form.
        progress: finds the counters that move with work done only.
        takes_memory_fraction: whether it minds a profile's ``memory_fraction``, which is refused otherwise.
        lists_devices: whether its program has llama.cpp's ``--list-devices``.
        gpu_memory: reads what processes hold of a GPU.
        port_taken: what its log says when somebody else has the port.
        failures: its known messages.
        stages: finds the log lines that tell how far a load has come.
        noise_on_cpu: finds log lines that mean nothing where no GPU is wanted; they are not shown.

    """

    name: ClassVar[str]
    dialect: ClassVar[Dialect]
    Options: ClassVar[type[BaseModel]]
    formats: ClassVar[tuple[str, ...]] = ("gguf",)
    program: ClassVar[programs.Program]
    recipe: ClassVar[Recipe | None] = None
    key_variable: ClassVar[str]
    unset: ClassVar[tuple[str, ...]] = ()
    reserved: ClassVar[tuple[str, ...]] = ()
    health_path: ClassVar[str] = "/health"
    props_path: ClassVar[str | None] = None
    progress_path: ClassVar[str] = "/metrics"
    progress: ClassVar[re.Pattern[str]]
    takes_memory_fraction: ClassVar[bool] = False
    lists_devices: ClassVar[bool] = True
    gpu_memory: ClassVar[GpuMemory] = GpuMemory()
    port_taken: ClassVar[re.Pattern[str]]
    failures: ClassVar[tuple[Failure, ...]] = ()
    stages: ClassVar[re.Pattern[str]] = re.compile("")
    noise_on_cpu: ClassVar[re.Pattern[str] | None] = None

    @classmethod
    def section(cls, profile: Profile) -> dict[str, Any]:
        """Return what the profile says in the engine's section, laid over what it says in its `family`'s."""
        given = profile.options
        return {**given.get(family(cls.name), {}), **given.get(cls.name, {})}

    @classmethod
    def locate(cls, environ: Mapping[str, str], command: Sequence[str] | None = None) -> Binary:
        """Find the engine's program; `command` is the profile's own. See `programs.find`."""
        return programs.find(cls.program, command, environ)

    @classmethod
    def drives(
        cls, binary: Binary, environ: Mapping[str, str], *, named_by_user: bool = False
    ) -> frozenset[str]:
        """Return the device kinds that a program drives; `named_by_user`: it is the profile's `command`."""
        return ask_devices(cls, binary, environ, named_by_user=named_by_user)

    @classmethod
    def version_of(cls, binary: Binary, environ: Mapping[str, str]) -> str | None:
        """Return the version that a program tells, None when it doesn't."""
        found = re.search(r"version:? (.+)", programs.ask((*binary.argv, "--version"), environ).text)
        return found[1].strip() if found else None

    @classmethod
    def recognise(cls, ask: Ask, model: Mapping[str, Any]) -> Recognised | None:
        """Say whether a server that someone else runs is this engine, and what it tells; pure but for `ask`.

        Args:
            ask: gives what the server answers at a path.
            model: what ``/v1/models`` says of the model.

        """
        del ask, model
        return None

    @classmethod
    def devices_of(cls, answer: programs.Answer) -> frozenset[str] | None:
        """Return the device kinds that the program drives; None when it isn't this engine's program."""
        raise NotImplementedError

    def find_model(
        self, profile: Profile, environ: Mapping[str, str]
    ) -> tuple[Path, Header | HfModel | None]:
        """Find the model in the form that the engine reads, and what it says of itself: here a GGUF file.

        Raises:
            NotFetched: it is on the hub and not here; tells what gets it.
            ModelError: it is missing, broken, or nothing that the engine reads.

        """
        path = model_files.resolve(
            profile.model, directory=profile.directory, environ=environ, progress=self.assembling
        )
        return path, gguf_header.read(path)

    def assembling(self, done: int, total: int) -> None:
        """Hear how much of a packaged model, in bytes, has been put together."""

    def find_adapters(self, profile: Profile, environ: Mapping[str, str]) -> tuple[Path, ...]:
        """Find the model's adapters in the form that the engine reads: here GGUF files."""
        return model_files.adapters(profile.model, directory=profile.directory, environ=environ)

    def settle(self, plan: Plan, machine: Machine) -> Plan:
        """Refuse what the engine can't do, with what to do instead; or return the plan, with notes added.

        Raises:
            ProfileError: the profile asks for something that the engine has not.
            UnsupportedModel: the engine can't serve the model in this way.

        """
        del machine
        return plan

    def dialect_for(self, plan: Plan) -> Dialect:
        """Return how the engine spells options when it serves this plan."""
        del plan
        return self.dialect

    def command(self, plan: Plan, port: int) -> Command:
        """Return argv and environment; pure."""
        raise NotImplementedError

    def confirm(self, props: Any, plan: Plan) -> str | None:
        """Compare what the ready engine says of itself with the plan; returns what differs, in words."""
        del props, plan
        return None


def ask_devices(
    engine: type[Engine], binary: Binary, environ: Mapping[str, str], *, named_by_user: bool
) -> frozenset[str]:
    """Return the device kinds that a program drives, as it says itself.

    Raises:
        BinaryMissing: it is not this engine's program, or did not answer in time.

    """
    anything = frozenset(hardware.KINDS)
    if Path(binary.argv[0]).name in CLIENTS:
        return anything
    answer = programs.ask((*binary.argv, "--list-devices"), environ)
    kinds = engine.devices_of(answer)
    if kinds is not None:
        return kinds
    if named_by_user:  # a wrapper need not answer questions
        return anything
    answer.refuse_silence(binary.argv[0])
    said = (answer.text.strip().splitlines() or ["nothing"])[0]
    raise BinaryMissing(
        f"{binary.argv[0]}: is not a {engine.name}: --list-devices answered {said[:200]!r}",
        advice=engine.program.install,
    )
