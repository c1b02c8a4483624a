"""An arm that runs: started if it is ours, asked where it answers, described, stopped.

Servers of others are left as they are, and less is known of them: not their log, memory or restarts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from orchestrator import discovery, hardware
from orchestrator import source as sources
from orchestrator.backend import Backend, Endpoint, Plan, State
from orchestrator.bench import machine, server_view
from orchestrator.bench.arms import Spec
from orchestrator.bench.exchange import body
from orchestrator.bench.prompts import Ask
from orchestrator.bench.values import Arm, Memory
from orchestrator.errors import BackendError
from orchestrator.fetching import fetch
from orchestrator.gguf_header import Header

HIDDEN = "(hidden)"
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
BESIDES = 1 << 30  # bytes kept free when several engines are to be resident together


class Target:
    """One arm; `start` it, measure at its `endpoint`, `stop` it.

    Attributes:
        spec: what it is.
        endpoint: where it answers, while it runs.
        load_s: seconds of every launch until it was ready.

    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.endpoint: Endpoint | None = None
        self.load_s: list[float] = []
        self._server: sources.Server | None = None
        self._engine: Backend | None = None
        self._plan: Plan | None = None
        self._vram: int | None = None
        self._hash: str | None = None
        self._arm: Arm | None = None
        if not spec.is_url:
            profile = spec.profile()
            self._engine = discovery.find(profile.backend)(profile)
            self._plan = self._engine.plan()

    @property
    def slots(self) -> int | None:
        """Requests served at once, as far as known."""
        if self._plan is not None:
            return self._plan.slots
        return self._server.settings.slots if self._server is not None else None

    @property
    def context(self) -> int | None:
        """Tokens per slot, as far as known."""
        if self._plan is not None:
            return self._plan.context
        return self._server.info.context if self._server is not None else None

    @property
    def plan(self) -> Plan | None:
        """What was decided for it; None for a server of others."""
        return self._plan

    async def make(self, tell: Callable[[str], None]) -> None:
        """Make what of the model can be made on this machine; until then the plan does not tell all.

        Raises:
            BackendError: it failed.

        """
        if self._engine is None or self._plan is None or not self._plan.conversions:
            return
        for each in self._plan.conversions:
            tell(f"{self.spec.name}: {each.doing} {each}")
            await fetch([each], lambda *_: None)
        self._plan = await asyncio.to_thread(self._engine.plan)

    def start(self) -> Endpoint:
        """Start it if it is ours, and return where it answers.

        Raises:
            BackendError: it did not start.
            RequestError: nobody answers at the URL.

        """
        if self.endpoint is None:
            if self._engine is not None:
                self.endpoint = self._engine.start()
                if self._plan is not None and self._plan.downloads:
                    self._plan = self._engine.plan()  # what was fetched tells what it is
                loaded = self._engine.status().get("load_s")
                self.load_s += [loaded] if loaded is not None else []
            else:
                self._server = sources.probe(self.spec.subject, self.spec.key)
                self.endpoint = self._server.at
        assert self.endpoint is not None
        return self.endpoint

    def stop(self) -> None:
        """Stop it if it is ours."""
        self.endpoint = None
        if self._engine is not None:
            self._engine.stop()

    def restarts(self) -> tuple[int, tuple[int, ...]]:
        """Return what changes when the engine restarts."""
        if self._engine is None:
            return 0, ()
        status = self._engine.status()
        return status["restarts"], tuple(status["engine_pids"][:1])

    def is_up(self) -> bool:
        """Whether it can be asked; one that crashed may be on its way back.

        Raises:
            OrchestratorError: it is gone for good; what ended it.

        """
        if self._engine is None:
            return True
        try:
            self.endpoint = self._engine.endpoint(self._engine.profile.timeouts.start or None)
        except BackendError:
            if self._engine.state is State.FAILED:
                raise  # nobody tries any more: another round would find the same
            return False
        return True

    def cpu_s(self) -> float | None:
        """Return the seconds of CPU that its processes have used; None when they are not ours to see."""
        return machine.cpu_s(self._engine.status()["engine_pids"]) if self._engine is not None else None

    def log_mark(self) -> int:
        """Return the log's present size, to be given to `log_since`."""
        path = self._log()
        return path.stat().st_size if path is not None else 0

    def log_since(self, mark: int) -> list[str]:
        """Return what was logged since a mark; all of it when the log was rotated meanwhile."""
        path = self._log()
        if path is None:
            return []
        with path.open("rb") as file:
            file.seek(mark if path.stat().st_size >= mark else 0)
            return file.read().decode("utf-8", "replace").splitlines()

    def _log(self) -> Path | None:
        named = self._engine.status().get("log") if self._engine is not None else None
        return Path(named) if named and Path(named).is_file() else None

    def memory(self) -> Memory | None:
        """Return the peak of its process tree so far: the kernel's of RSS, the most that was seen of VRAM."""
        if self._engine is None or self._plan is None:
            return None
        status = self._engine.status()
        self._vram = machine.peak_vram(self._vram, status.get("gpus", ()))
        return Memory(rss=machine.peak_rss(status["engine_pids"]), vram=self._vram)

    # -- what is told of it -------------------------------------------------------------------------
    def describe(self) -> Arm:
        """Return everything about it that may matter; ask while it runs, later the last answer is kept."""
        if self.endpoint is None:
            assert self._arm is not None
            return msgspec.structs.replace(self._arm, load_s=tuple(self.load_s))
        endpoint = self.endpoint
        sampling = body(endpoint, Ask("", 1))
        for name in ("prompt", "model", "stream", "stream_options", "max_tokens"):
            sampling.pop(name, None)
        common: dict[str, Any] = {
            "name": self.spec.name,
            "url": endpoint.url,
            "version": _version(endpoint),
            "model": endpoint.model,
            "overrides": self.spec.overrides,
            "sampling": sampling,
            "load_s": tuple(self.load_s),
        }
        self._arm = Arm(**common, **(self._ours(endpoint) if self._plan is not None else self._theirs()))
        return self._arm

    def _theirs(self) -> dict[str, Any]:
        assert self._server is not None
        return {
            "backend": self._server.at.dialect.name,
            "quantisation": self._server.info.quantisation,
            "context": self._server.info.context,
            "slots": self._server.settings.slots,
        }

    def _ours(self, endpoint: Endpoint) -> dict[str, Any]:
        plan = cast(Plan, self._plan)
        assert self._engine is not None
        command = self._engine.prepared(plan, urlsplit(endpoint.url).port or 0)
        if self._hash is None:
            self._hash = machine.model_hash(plan.model_path)
        return {
            "profile": str(Path(self.spec.subject).absolute()),
            "backend": plan.backend,
            "model_path": str(plan.model_path),
            "model_hash": self._hash,
            "quantisation": getattr(plan.header, "quantisation", None),
            "context": plan.context,
            "slots": plan.slots,
            "device": plan.device.kind,
            "argv": command.argv,
            "environment": {
                name: HIDDEN if SECRET.search(name) else value for name, value in command.env.items()
            },
            "removed": command.unset,
        }


def _version(endpoint: Endpoint) -> str | None:
    for path, name in (("/props", "build_info"), ("/version", "version")):
        answer = server_view.ask(endpoint, path)
        if answer is not None:
            try:
                known = answer.json().get(name)
            except (ValueError, AttributeError):
                continue
            if isinstance(known, str):
                return known
    return None


def fit_together(plans: Sequence[Plan]) -> bool:
    """Say whether engines with these plans can all be resident at once, with room to spare."""
    found = hardware.detect()
    host = device = 0
    cards: dict[str, int] = {}
    for plan in plans:
        if plan.device.gpus and not isinstance(plan.header, Header):
            return False  # such engines take what is free
        if plan.memory is None:
            host += 2 * _size(plan.model_path) + BESIDES
            continue
        estimated = plan.memory.estimate
        host += estimated.host.total
        device += estimated.device.total
        cards |= {gpu.id: gpu.free for gpu in plan.device.gpus}
    room = found.memory_available or found.memory_total
    return host + BESIDES <= room and (not device or device + BESIDES <= sum(cards.values()))


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
