"""Waiting for what has to come to its end, even when whoever waits is called off."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` until it ends; a caller who is called off waits all the same, and then is."""
    task = asyncio.ensure_future(work)
    called_off: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            called_off = error
    result = task.result()
    if called_off is not None:
        raise called_off
    return result
