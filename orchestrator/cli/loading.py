"""Profiles from the command line's words, with the faults of all files in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.errors import Problem, ProfileError

if TYPE_CHECKING:
    from orchestrator.backend import Backend
    from orchestrator.profile import Profile


def load_all(paths: Sequence[str], overrides: Sequence[str] | None, backend: str | None) -> list[Profile]:
    """Load every profile.

    Raises:
        ProfileError: with every fault of every file, names that occur twice included.

    """
    from orchestrator import profile as profiles

    found: list[Profile] = []
    faults: list[Problem] = []
    advice = None
    for path in paths:
        try:
            found.append(profiles.load(path, overrides=tuple(overrides or ()), backend=backend))
        except ProfileError as error:
            faults += error.problems
            advice = advice or error.advice
    first: dict[str, Profile] = {}
    for profile in found:
        other = first.setdefault(profile.name, profile)
        if other is not profile:
            message = f"{profile.name} is the name of {other.source} too"
            faults.append(Problem(str(profile.source), 0, 0, "name", message))
    if faults:
        raise ProfileError(list(dict.fromkeys(faults)), advice=advice)
    return found


def make_backend(profile: Profile, *, instance: str | None = None) -> Backend:
    """Return the engine that a profile wants, not started.

    Args:
        profile: what to serve.
        instance: the run folder's name; None for one of this process alone.

    Raises:
        UnknownBackend: no installed package offers it.

    """
    from orchestrator.discovery import find

    return find(profile.backend)(profile, instance=instance)
