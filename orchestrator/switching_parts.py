"""What a switch is made of: an engine with its requests, the question whether two fit, and the outcome."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from orchestrator.backend import Backend, Endpoint, State, made_plan
from orchestrator.errors import DoesNotFit, SwitchRefused

if TYPE_CHECKING:
    from orchestrator.profile import Profile

DRAIN_S = 30.0
Make = Callable[["Profile", str | None], Backend]


def together(*engines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the cards that several engines use, as a status has them, each once with what all hold of it."""
    cards: dict[str, dict[str, Any]] = {}
    for card in itertools.chain.from_iterable(engines):
        before = cards.get(card["id"], {}).get("memory_engine")
        held = [size for size in (before, card["memory_engine"]) if size is not None]
        cards[card["id"]] = {**card, "memory_engine": sum(held) if held else None}
    return list(cards.values())


@dataclass(frozen=True, slots=True)
class Switched:
    """A switch that has succeeded.

    Attributes:
        name: the profile's name.
        before: the backend that was replaced.
        backend: the backend that serves now.
        beside: whether it was started while the old one went on serving.
        ready_s: seconds from the beginning until the new engine got requests.
        total_s: seconds until the old one was gone as well.
        cut: answers that outlasted the drain time and were ended.

    """

    name: str
    before: str
    backend: str
    beside: bool
    ready_s: float
    total_s: float
    cut: int


@runtime_checkable
class CanSwitch(Protocol):
    """Whatever can change the engine behind it."""

    def switch(self, to: str | Profile, *, drain_s: float = DRAIN_S, beside: bool | None = None) -> Switched:
        """See `Switchable.switch`."""


class Engine:
    """One engine of the name.

    Attributes:
        instance: its run folder's name, None for one that it chooses itself.
        in_flight: requests sent to it and not yet over.
        handed: the endpoint that was handed out last.
        open: whether it takes requests.
        heard: the state that it told last.
        told: why it is in that state.

    """

    def __init__(self, profile: Profile, instance: str | None, make: Make) -> None:
        self.backend = make(profile, instance)
        self.instance = instance
        self.in_flight = 0
        self.handed: Endpoint | None = None
        self.open = True
        self.heard = State.STOPPED
        self.told: dict[str, Any] = {}
        self.unsubscribe: Callable[[], None] = lambda: None


def fits_beside(engine: Backend, progress: Callable[[int, int], None] | None = None) -> bool:
    """Plan an engine, and say whether it fits into what is free now, while another one runs.

    What of its model has to be made first is, with `progress`; see `made_plan`.

    Unknown is a no on a GPU. On the processor what can't fit was refused by the plan itself. Values that the
    profile leaves to be settled by the free memory are to be settled when the other one has gone.

    Raises:
        SwitchRefused: its model has to be downloaded first.
        OrchestratorError: it can't be planned, for another reason than memory.

    """
    try:
        plan = made_plan(engine, progress)
    except DoesNotFit:
        return False  # it may, once the other one is gone
    if plan.downloads:
        raise SwitchRefused(
            f"switch: {plan.profile.name}: its model is not on this machine yet",
            profile=plan.profile.name,
            advice="get it first: orchestrator pull",
        )
    if plan.profile.context == "auto" or (plan.device.gpus and plan.profile.gpu_layers == "auto"):
        return False
    if plan.memory is None:
        return not plan.device.gpus
    return plan.memory.verdict.answer == "fits"
