"""Where a model's requests go: a backend of ours, or a server that someone else runs.

`Source` is what `TextModel` needs of either; `orchestrator.backend.Backend` fulfils it, and `connect` makes
one for a URL, finding out what kind of engine answers there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator import discovery
from orchestrator.backend import Ask, Dialect, Endpoint, Recognised
from orchestrator.chunks import bad_status, json_or_text
from orchestrator.errors import OrchestratorError, ProtocolError, UnknownBackend, Unreachable
from orchestrator.log import get_logger
from orchestrator.tokens import ModelInfo

if TYPE_CHECKING:
    import httpx

log = get_logger("orchestrator.connect")

PROBE_TIMEOUT = 10.0
UNKNOWN_SLOTS = 8  # requests at once to a server that does not say how many it takes

OPENAI = Dialect(
    name="this server",
    fields={
        **{
            name: name
            for name in (
                "max_tokens",
                "temperature",
                "top_p",
                "seed",
                "stop",
                "presence_penalty",
                "frequency_penalty",
                "logprobs",
                "logit_bias",
                "tools",
            )
        },
        "json_schema": "response_format.json_schema.schema",
    },
    # completions of the OpenAI API know no response format, so servers may ignore it there without a word
    chat_only=("reasoning", "tools", "json_schema"),
)


class Source(Protocol):
    """What `TextModel` needs of whoever runs the server."""

    def endpoint(self, timeout: float | None = None) -> Endpoint:
        """Wait until the server is ready and return where it is; asked before each request."""

    def request(self, endpoint: Endpoint) -> AbstractContextManager[None]:
        """Count a request to `endpoint` as in flight while the context is open.

        Raises:
            EngineReplaced: the engine there takes none any more; ask for the endpoint anew.

        """

    def stop(self) -> None:
        """End what the source started."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a source knows about how requests are to be made.

    Attributes:
        sampling: options sent unless the call says otherwise.
        stall: seconds without progress until a request fails; 0 = none.
        request: seconds for a whole request; 0 = none.
        start: seconds to wait for a server that is starting or restarting.
        slots: requests served at once.

    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    stall: float = 120.0
    request: float = 0.0
    start: float = 600.0
    slots: int = UNKNOWN_SLOTS


def settings(source: Source) -> Settings:
    """Return the settings in a backend's profile, or those of a connected server."""
    profile = getattr(source, "profile", None)
    if profile is None:
        found = getattr(source, "settings", None)
        return found if isinstance(found, Settings) else Settings()
    times = profile.timeouts
    return Settings(profile.sampling, times.stall, times.request, times.start, profile.slots)


def info(source: Source) -> ModelInfo:
    """Return what the model's header, or the server, tells about it.

    Raises:
        ModelError: the model can't be read.
        BackendError: the engine is missing.

    """
    if isinstance(source, Server):
        return source.info
    plan = source.plan()  # type: ignore[attr-defined]
    header = plan.header
    if header is None:
        return ModelInfo(name=plan.model_id, context=plan.context)
    return ModelInfo(
        name=header.name or plan.model_id,
        architecture=header.architecture,
        layers=header.layers,
        vocabulary=header.vocabulary,
        quantisation=header.quantisation,
        parameters=header.parameters,
        context=plan.context,
        native_context=header.context,
    )


def memory(source: Source) -> Any:
    """Return the engine's memory as its backend reports it, or None."""
    status = getattr(source, "status", None)
    return status().get("memory") if status is not None else None


@dataclass(frozen=True, slots=True)
class Server:
    """A server that someone else runs.

    Attributes:
        at: where it is and what it speaks.
        settings: how to make requests.
        info: what it tells of its model.

    """

    at: Endpoint
    settings: Settings = field(default_factory=Settings)
    info: ModelInfo = field(default_factory=lambda: ModelInfo(name=""))

    def endpoint(self, timeout: float | None = None) -> Endpoint:  # noqa: ARG002 - it does not move
        """Return where the server is."""
        return self.at

    def request(self, endpoint: Endpoint) -> AbstractContextManager[None]:  # noqa: ARG002
        """Count nothing: the server is not ours to supervise."""
        return contextlib.nullcontext()

    def stop(self) -> None:
        """Leave the server running: it is not ours."""


def base_url(url: str) -> str:
    """Return a server's address without ``/v1`` and trailing slashes."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def probe(url: str, key: str | None = None, model: str | None = None) -> Server:
    """Ask a server what it is and which model it serves.

    Args:
        url: its address, with or without ``/v1``.
        key: its API key.
        model: the model's id; default: the first that the server lists.

    Raises:
        Unreachable: nobody answers there.
        BadStatus: it refuses, for instance the key.
        ProtocolError: it does not speak the OpenAI API.

    """
    import httpx

    from orchestrator.clients import sync_client

    base = base_url(url)
    with contextlib.ExitStack() as stack:
        with _explained(base):
            client = stack.enter_context(sync_client(base))
            client.base_url, client.timeout = httpx.URL(base), httpx.Timeout(PROBE_TIMEOUT)
            client.headers.update({"Authorization": f"Bearer {key}"} if key else {})
            listed = _json(client.get("/v1/models"))
        served = _served(base, listed, model)

        @functools.cache
        def ask(path: str) -> dict[str, Any]:
            with _explained(base):
                response = client.get(path)
                return _mapping(json_or_text(response.content) if response.status_code == 200 else None)

        dialect, told = _recognised(ask, served)
    endpoint = Endpoint(url=base, key=key, model=model or served["id"], dialect=dialect)
    meta = _mapping(served.get("meta"))
    return Server(
        endpoint,
        Settings(slots=_count(told.slots) or UNKNOWN_SLOTS),
        ModelInfo(
            name=endpoint.model,
            vocabulary=_count(meta.get("n_vocab")),
            quantisation=told.quantisation if isinstance(told.quantisation, str) else None,
            parameters=_count(meta.get("n_params")),
            context=_count(told.context) or _count(served.get("max_model_len")),
            native_context=_count(meta.get("n_ctx_train")),
        ),
    )


@contextlib.contextmanager
def _explained(base: str) -> Iterator[None]:
    """Make `Unreachable` of what goes wrong on the way to a server."""
    import httpx

    try:
        yield
    except httpx.RequestError as error:  # on the way, or of an answer that can't be decoded
        raise Unreachable(
            f"connect: {base}: {error or type(error).__name__}",
            advice="check the address, and that the server runs",
        ) from error
    except (httpx.InvalidURL, ValueError) as error:
        raise Unreachable(
            f"connect: {base}: {error}", advice="give an address such as http://127.0.0.1:8080"
        ) from error


def _recognised(ask: Ask, served: Mapping[str, Any]) -> tuple[Dialect, Recognised]:
    """Return how the server spells its options, and what it tells: by the first engine that knows it."""
    for name in discovery.installed():
        try:
            engine = discovery.find(name)
            told = engine.recognise(ask, served)
        except UnknownBackend:
            continue
        except OrchestratorError:
            raise  # of asking the server
        except Exception as error:  # an engine of a stranger's package, which spoils no server of another
            log.warning("connect: an engine failed to tell what runs there", engine=name, error=repr(error))
            continue
        if told is not None:
            return engine.dialect, told
    return OPENAI, Recognised()


def _served(base: str, listed: Any, model: str | None) -> dict[str, Any]:
    """Return what a server's list says of the model, or of its first one."""
    models = _mapping(listed).get("data")
    if not isinstance(models, list) or not all(isinstance(_mapping(each).get("id"), str) for each in models):
        raise ProtocolError(f"connect: {base}/v1/models does not list models: {str(listed)[:200]}")
    if not models and model is None:
        raise ProtocolError(f"connect: {base} serves no model")
    return next((entry for entry in models if entry["id"] == model), models[0] if model is None else {})


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _json(response: httpx.Response) -> Any:
    body = json_or_text(response.content)
    if response.status_code != 200:
        raise bad_status(response.status_code, body)
    return body
