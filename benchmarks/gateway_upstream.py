"""A bare gateway in front of one server that runs already, to be measured on its own.

python benchmarks/gateway_upstream.py --port 8080 --upstream http://127.0.0.1:9000 [--model fake]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import uvloop

from orchestrator.backend import Dialect, Endpoint, Event, State
from orchestrator.gateway import Gateway


@dataclass(frozen=True)
class Name:
    name: str


class Fixed:
    """An engine that is always ready, because someone else runs it."""

    state = State.READY

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.profile = Name(name)
        self._endpoint = endpoint

    def endpoint(self, timeout: float | None = None) -> Endpoint:  # noqa: ARG002
        return self._endpoint

    def request(self, endpoint: Endpoint) -> AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None

    def status(self) -> dict[str, Any]:
        return {"name": self.profile.name, "state": self.state, "url": self._endpoint.url}


async def serve(args: argparse.Namespace) -> None:
    endpoint = Endpoint(args.upstream.rstrip("/"), None, args.engine_model or args.model, Dialect("any", {}))
    gateway = Gateway({args.model: Fixed(args.model, endpoint)}, port=args.port)
    await gateway.start()
    print(f"ready {args.model} {gateway.url}", flush=True)
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    await asked_to_stop.wait()
    await gateway.stop(drain_s=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="base URL without /v1")
    parser.add_argument("--model", default="fake", help="the name that clients use")
    parser.add_argument("--engine-model", help="the name that the upstream uses, if it is another")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
