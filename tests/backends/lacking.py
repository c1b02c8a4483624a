"""Getting or making what a plan lacks, as who starts it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import NotFetched


def got(find: Callable[[], Path]) -> Path:
    """Find a part of a model, making it when it is lacking."""
    try:
        return find()
    except NotFetched as missing:
        missing.download.fetch()
        return find()


def kept(folder: Path) -> list[str]:
    """Return the names of what is in a cache, locks aside."""
    return sorted(each.name for each in folder.iterdir() if not each.name.endswith(".lock"))
