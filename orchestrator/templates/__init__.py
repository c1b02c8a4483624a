"""The chat templates that come with this package, by name, so that every engine reads the same text."""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path | None:
    """Return the file of a template that is ours, or None for any other name."""
    return {file.stem: file for file in Path(__file__).parent.glob("*.jinja")}.get(name)
