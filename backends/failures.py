"""Known failure messages of engines, and what to do about each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """One known way to fail.

    Attributes:
        pattern: a regular expression searched in the log's last lines.
        advice: what to do, one line.
        permanent: no retry mends it.

    """

    pattern: re.Pattern[str]
    advice: str
    permanent: bool = True


def known(pattern: str, advice: str, *, permanent: bool = True) -> Failure:
    """Build a `Failure`; the pattern is searched without regard to case."""
    return Failure(re.compile(pattern, re.IGNORECASE), advice, permanent)


def diagnose(failures: Iterable[Failure], log: str) -> Failure | None:
    """Return the first known failure that the log shows."""
    return next((failure for failure in failures if failure.pattern.search(log)), None)
