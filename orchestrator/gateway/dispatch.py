"""Which request goes where: the gateway's own paths, and for all else below ``/v1/`` the right engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from orchestrator.backend import Event
from orchestrator.gateway import api, switch
from orchestrator.gateway.client import Client, Handler
from orchestrator.gateway.exchange import Exchange
from orchestrator.gateway.route import Route
from orchestrator.gateway.wire import Failure, RequestMessage
from orchestrator.switching_parts import CanSwitch

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_MODELS = "/v1/models"


class _Ask(msgspec.Struct):
    """The one field of a request that routing needs."""

    model: str | None = None


_ASK = msgspec.json.Decoder(_Ask)


class Dispatcher:
    """Answers requests that were let in.

    Attributes:
        routes: what is served, by name.
        feeds: who listens to events.

    """

    def __init__(self, wait_s: float, about: Callable[[], dict[str, object]]) -> None:
        self.routes: dict[str, Route] = {}
        self.feeds: set[api.Feed] = set()
        self._wait_s, self._about = wait_s, about
        self._created = int(time.time())

    def handle(self, client: Client, message: RequestMessage, body: bytes) -> Handler | None:
        """Answer a request, now or through the handler that is returned."""
        path = message.path.partition("?")[0]
        if path == "/api/switch":
            return self._switch(client, message, body)
        own = path in {"/health", _MODELS, "/api/status", "/api/events"} or path.startswith(f"{_MODELS}/")
        if message.method == "OPTIONS":
            client.answer(204, [(b"Allow", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")], b"")
        elif own and message.method not in {"GET", "HEAD"}:
            client.fail(_not_allowed(b"GET, HEAD, OPTIONS"))
        elif own:
            return self._own(client, message, path)
        elif not path.startswith("/v1/"):
            advice = "the API is below /v1; see also /health, /api/status, /api/events and /api/switch"
            client.fail(Failure(404, f"gateway: there is no {path}", code="not_found", advice=advice))
        elif message.method not in _METHODS:
            client.fail(_not_allowed(b"GET, POST, PUT, PATCH, DELETE, OPTIONS"))
        else:
            return self._pass(client, message, body)
        return None

    def _own(self, client: Client, message: RequestMessage, path: str) -> Handler | None:
        if path == "/api/events" and message.method == "GET":
            now = time.time()
            snapshot = [Event(now, name, "state", route.state) for name, route in self.routes.items()]
            return api.Feed(client, self.feeds, snapshot)
        if path == "/api/events":
            client.answer(200, api.EVENTS, b"")
        elif path == "/api/status":
            return api.Status(client, self.routes, self._about())
        elif path == "/health":
            status, health = api.health(self.routes)
            client.answer(status, api.JSON, api.encode(health))
        elif path == _MODELS:
            entries = [api.model_entry(route, self._created) for route in self.routes.values()]
            client.answer(200, api.JSON, api.encode({"object": "list", "data": entries}))
        else:
            found = self._named(path.removeprefix(f"{_MODELS}/"))
            if isinstance(found, Failure):
                client.fail(found)
            else:
                client.answer(200, api.JSON, api.encode(api.model_entry(found, self._created)))
        return None

    def _switch(self, client: Client, message: RequestMessage, body: bytes) -> Handler | None:
        if message.method == "OPTIONS":
            client.answer(204, [(b"Allow", b"POST, OPTIONS")], b"")
            return None
        if message.method != "POST":
            client.fail(_not_allowed(b"POST, OPTIONS"))
            return None
        ask = switch.read(message, body)
        if isinstance(ask, Failure):
            client.fail(ask)
            return None
        route = self._named(ask.model) if ask.model else self._only()
        if isinstance(route, Failure):
            client.fail(route)
            return None
        if not isinstance(route.upstream, CanSwitch):
            what = f"gateway: {route.name} can't be switched"
            client.fail(Failure(409, what, code="switch_refused"))
            return None
        return switch.Switch(client, route.upstream, ask)

    def _pass(self, client: Client, message: RequestMessage, body: bytes) -> Handler | None:
        asked: str | None = None  # the model id that the body holds; None when it holds no JSON
        if body and not message.headers.get("Content-Type", "").startswith("multipart/"):
            try:
                asked = _ASK.decode(body).model or ""
            except (msgspec.DecodeError, RecursionError) as error:
                what = f"gateway: the body is not a JSON object that may name a model: {error}"
                client.fail(Failure(400, what, code="invalid_json"))
                return None
        route = self._named(asked) if asked else self._only()
        if isinstance(route, Failure):
            client.fail(route)
            return None
        exchange = Exchange(client, route, message, body, asked, self._wait_s)
        exchange.start()
        return exchange

    def _only(self) -> Route | Failure:
        """Return the route of a request that names none: the only one there is."""
        if len(self.routes) == 1:
            return next(iter(self.routes.values()))
        what = "gateway: the request names no model"
        return Failure(400, what, code="model_missing", param="model", advice=self._names())

    def _named(self, name: str) -> Route | Failure:
        """Return the route of a name; a single engine answers to its own model id too."""
        route = self.routes.get(name)
        if route is None and len(self.routes) == 1:
            (only,) = self.routes.values()
            if only.pool is not None and only.pool.endpoint.model == name:
                route = only
        if route is not None:
            return route
        what = f"gateway: no model named {name!r} is served"
        return Failure(404, what, code="model_not_found", param="model", advice=self._names())

    def _names(self) -> str:
        return f"served here: {', '.join(self.routes) or 'nothing yet'}"

    def publish(self, event: Event) -> None:
        """Tell every listener."""
        for feed in list(self.feeds):
            feed.send(event)


def _not_allowed(allow: bytes) -> Failure:
    what = "gateway: this method is not supported here"
    return Failure(405, what, code="method_not_allowed", headers={b"Allow": allow})
