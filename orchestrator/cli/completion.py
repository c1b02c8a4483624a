"""What a shell may offer at the Tab key: engines, and the names of what runs or ran.

Read from records alone, as nobody waits at the Tab key; where that fails, nothing is offered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable


def backends(incomplete: str) -> list[str]:
    """Return the installed engines that begin so."""
    from orchestrator.discovery import installed

    return _beginning(incomplete, installed())


def served(incomplete: str) -> list[str]:
    """Return the names that begin so and belong to a living `orchestrator up`."""
    from orchestrator.cli.services import served_names
    from orchestrator.errors import OrchestratorError
    from orchestrator.home import home

    with contextlib.suppress(OrchestratorError):
        return _beginning(incomplete, served_names(home()))
    return []


def logged(incomplete: str) -> list[str]:
    """Return the names that begin so and have a log, of what has ended too."""
    from orchestrator.errors import OrchestratorError
    from orchestrator.home import home, run_folders

    with contextlib.suppress(OrchestratorError):
        return _beginning(incomplete, {folder.title for folder in run_folders(home()) if folder.log.exists()})
    return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
