"""The sides of a measurement in words: profiles with overrides, and URLs, to `Spec`s. Nothing runs here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from orchestrator.bench.workload import WorkloadError

if TYPE_CHECKING:
    from orchestrator.profile import Profile


@dataclass(frozen=True, slots=True)
class Spec:
    """One side, not started.

    Attributes:
        name: how it is called in the result; unique.
        subject: a profile's path, or a server's URL.
        backend: the engine instead of the profile's.
        overrides: ``KEY=VALUE`` each.
        key: the key of a server that is not ours.

    """

    name: str
    subject: str
    backend: str | None = None
    overrides: tuple[str, ...] = ()
    key: str | None = None

    @property
    def is_url(self) -> bool:
        """Whether it is a server that someone else runs."""
        return is_url(self.subject)

    def profile(self) -> Profile:
        """Load its profile.

        Raises:
            ProfileError: the profile is at fault.

        """
        from orchestrator import profile as profiles

        return profiles.load(self.subject, overrides=self.overrides, backend=self.backend)


def is_url(subject: str) -> bool:
    """Say whether a word is a server's URL rather than a profile's path."""
    return subject.startswith(("http://", "https://"))


def specs(
    subjects: Sequence[str],
    *,
    backends: Sequence[str] = (),
    vary: Sequence[str] = (),
    sets: Sequence[str] = (),
    control: bool = False,
    key: str | None = None,
) -> list[Spec]:
    """Return the arms that a command line names.

    Args:
        subjects: profiles or URLs.
        backends: engines, each of which runs each profile.
        vary: ``KEY=a,b`` each; every combination is an arm.
        sets: ``KEY=VALUE``, the same for all arms.
        control: compare the first subject with itself.
        key: of servers that are not ours.

    Raises:
        WorkloadError: the words don't make two arms.

    """
    options = [_variations(text) for text in vary]
    if any(map(is_url, subjects)) and (backends or vary or sets):
        raise WorkloadError("compare: a server that runs already can't be given another engine or setting")
    found = [
        Spec("", subject, engine, (*sets, *combination), key)
        for subject in subjects
        for engine in (backends or (None,))
        for combination in itertools.product(*options)
    ]
    if control:
        found = [found[0], found[0]]
    if len(found) < 2:
        raise WorkloadError(
            "compare: one arm is not enough",
            advice="name two profiles or URLs, or use --backends, --vary or --aa",
        )
    names = [_name(spec, subjects, bool(backends), len(sets)) for spec in found]
    twice = {name for name in names if names.count(name) > 1}
    counters = {name: itertools.count(1) for name in twice}
    unique = [f"{name}#{next(counters[name])}" if name in twice else name for name in names]
    return [replace(spec, name=name) for name, spec in zip(unique, found, strict=True)]


def _variations(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not key.strip() or len(found) < 2:
        raise WorkloadError(f"compare: --vary {text}: must be KEY=VALUE,VALUE with two values or more")
    return [f"{key.strip()}={value}" for value in found]


def own_name(subject: str) -> str:
    """Return what a subject is called: a profile's stem, a server's host and port."""
    return urlsplit(subject).netloc if is_url(subject) else Path(subject).stem


def _name(spec: Spec, subjects: Sequence[str], by_engine: bool, common: int) -> str:
    own = own_name(spec.subject)
    parts = [own] if len(set(subjects)) > 1 else []
    parts += [spec.backend] if by_engine and spec.backend else []
    parts += spec.overrides[common:]
    return " ".join(parts) or own
