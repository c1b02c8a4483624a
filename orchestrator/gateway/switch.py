"""``POST /api/switch``: put another engine behind a name, and answer when that is done.

The body names an installed backend. A profile can't be given: one holds commands, and whoever may send
requests may not for that reason start programs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from orchestrator.errors import BackendError, OrchestratorError, SwitchFailed, SwitchRefused
from orchestrator.gateway import api
from orchestrator.gateway.wire import Failure, RequestMessage
from orchestrator.switching_parts import DRAIN_S

if TYPE_CHECKING:
    from orchestrator.gateway.client import Client
    from orchestrator.switching_parts import CanSwitch

MOST_DRAIN_S = 3600


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    """The body: which name (needed where several are served), which backend, and how."""

    backend: str
    model: str | None = None
    drain_s: float = DRAIN_S
    beside: bool | None = None


def read(message: RequestMessage, body: bytes) -> Ask | Failure:
    """Read the request, or say what is wrong with it."""
    kind = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # one that a page can't send here without asking first
        return Failure(
            415, "gateway: api/switch: Content-Type has to be application/json", code="content_type"
        )
    try:
        ask = msgspec.json.decode(body, type=Ask)
    except msgspec.DecodeError as error:
        return Failure(
            400, f"gateway: api/switch: {str(error)[:1].lower()}{str(error)[1:]}", code="invalid_json"
        )
    if not 0 <= ask.drain_s <= MOST_DRAIN_S:
        what = f"gateway: api/switch: drain_s: must be from 0 to {MOST_DRAIN_S}"
        return Failure(400, what, code="invalid_value", param="drain_s")
    return ask


class Switch:
    """Carries one switch out; a client that leaves does not call it off."""

    def __init__(self, client: Client, engine: CanSwitch, ask: Ask) -> None:
        self._client: Client | None = client
        client.run(self._answer(engine, ask))

    async def _answer(self, engine: CanSwitch, ask: Ask) -> None:
        failure: Failure | None = None
        try:
            done = await asyncio.to_thread(engine.switch, ask.backend, drain_s=ask.drain_s, beside=ask.beside)
        except OrchestratorError as error:
            failure = _failure(error)
        client, self._client = self._client, None
        if client is None:
            return
        if failure is not None:
            client.fail(failure)
        else:
            client.answer(200, api.JSON, api.encode(done))

    def client_gone(self) -> None:
        """Answer nobody."""
        self._client = None

    def pause(self) -> None:
        """Nothing is written before the answer is whole."""

    def resume(self) -> None:
        """Nothing waits."""

    def shut(self) -> None:
        """Answer that there will be none."""
        client, self._client = self._client, None
        if client is not None:
            client.fail(Failure(503, "gateway: it is stopping", "server_error", "stopping"))


def _failure(error: OrchestratorError) -> Failure:
    what = f"gateway: {error.message}"
    if isinstance(error, SwitchRefused):
        return Failure(409, what, code="switch_refused", advice=error.advice)
    if isinstance(error, SwitchFailed):
        return Failure(502, what, "server_error", "switch_failed", advice=error.advice)
    code = "engine_error" if isinstance(error, BackendError) else "profile_error"
    return Failure(400, what, code=code, param="backend", advice=error.advice)  # nothing was touched
