"""What an `orchestrator up` process is: engines, the gateway in front of them, and the control socket.

Life: own the folder -> listen (requests wait while engines load) -> start every engine -> serve -> stop all.
It ends when it is asked to, when a start fails, or when nothing is left that could serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from orchestrator import profile as profiles
from orchestrator.backend import Event, State
from orchestrator.cli import control, faults
from orchestrator.cli.progress import Progress, of_event
from orchestrator.errors import OrchestratorError, SwitchRefused
from orchestrator.gateway import Gateway
from orchestrator.home import RunFolder
from orchestrator.switching import Switchable
from orchestrator.switching_parts import DRAIN_S

DRAIN = 5.0  # seconds for answers under way to end by themselves before their engines are stopped
HURRY = 0.0  # seconds between TERM and KILL once somebody has asked twice
OVER = (State.STOPPED, State.FAILED, State.STUCK)


def threads(engines: int) -> int:
    """Return how many threads may wait for engines: starts and switches take minutes, stops need some too."""
    return 4 * engines + 4


class Service:
    """Everything behind one address, from the first engine's start to the last one's end."""

    def __init__(
        self,
        backends: Sequence[Switchable],
        gateway: Gateway,
        folder: RunFolder,
        progress: Progress,
        *,
        api_key_env: str | None = None,
    ) -> None:
        """Prepare; nothing starts.

        Args:
            backends: engines that have not been started, each with a name of its own.
            gateway: in front of them, not yet listening.
            folder: this process's own, acquired.
            progress: hears what happens.
            api_key_env: the variable that holds the gateway's key, told to those who ask for the address.

        """
        self._backends = {backend.profile.name: backend for backend in backends}
        self._gateway = gateway
        self._folder = folder
        self._progress = progress
        self._api_key_env = api_key_env
        self._served: set[str] = set()  # those that were ready once: their failures are told here
        self._failed: set[str] = set()
        self._downed: set[str] = set()  # stopped by `down`

    async def run(self) -> int:
        """Serve until the end; returns the exit code."""
        gc.freeze()  # what the imports made stays: no collection has to walk through it while answers stream
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(threads(len(self._backends))))
        self._wish = asyncio.Event()  # somebody wants the end
        self._changed = asyncio.Event()
        self._claim()
        with self._signals(), contextlib.ExitStack() as followed:
            server = control.Server(self._folder.path, self._answer)
            await server.start()
            try:
                await self._gateway.start()
                for backend in self._backends.values():
                    followed.callback(backend.subscribe(self._hear))
                return await self._serve()
            finally:
                try:
                    await self._drain()
                    await self._stop(list(self._backends), None)
                finally:
                    await self._gateway.stop(0)
                    await server.stop()

    def _claim(self) -> None:
        """Write down which names are ours: a switch may change the run folder, not the name."""
        names = [name for name in self._backends if name not in self._downed]
        self._folder.write({"names": names, "pid": os.getpid()})

    # -- life -------------------------------------------------------------------------------------------
    async def _serve(self) -> int:
        starts = [asyncio.create_task(self._start(name)) for name in self._backends]
        ended = asyncio.create_task(self._wish.wait())
        try:
            waiting: set[asyncio.Task[Any]] = {*starts, ended}
            while len(waiting) > 1 and not ended.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            while not self._wish.is_set() and self._living():
                await self._changed.wait()
                self._changed.clear()
        finally:
            ended.cancel()
            if not all(task.done() for task in starts):
                await self._stop(list(self._backends), None)
            await asyncio.gather(*starts, return_exceptions=True)
        return 3 if self._failed and not self._wish.is_set() else 0

    async def _start(self, name: str) -> None:
        try:
            await asyncio.to_thread(self._backends[name].start)
        except OrchestratorError:
            if self._wish.is_set() or name in self._downed:
                return  # called off while it loaded
            raise
        self._served.add(name)
        gateway = self._gateway
        self._progress.hear(
            {"say": "ready", "name": name, "url": gateway.url, "outside": gateway.outside_url}
        )

    async def _drain(self) -> None:
        """Accept nothing new and let answers under way end, where an engine is there to end them."""
        if any(backend.state is State.READY for backend in self._backends.values()):
            await self._gateway.stop(DRAIN)

    def _living(self) -> bool:
        return any(backend.state not in OVER for backend in self._backends.values())

    async def _stop(self, names: Sequence[str], grace: float | None) -> None:
        """Stop engines side by side; raises the first fault once all have been tried."""
        stops = [asyncio.to_thread(self._backends[name].stop, grace) for name in names]
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    # -- what is heard ----------------------------------------------------------------------------------
    def _hear(self, event: Event) -> None:
        """Take an event, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: Event) -> None:
        self._progress.hear(of_event(event))
        if event.name != "state":
            return
        if event.state is State.FAILED and event.profile in self._served:
            try:
                self._backends[event.profile].endpoint(0)
            except OrchestratorError as error:
                self._failed.add(event.profile)
                self._progress.hear({"say": "error", "error": faults.describe(error)})
        self._changed.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take the signals that ask for the end; nohup means what it says."""
        taken = [signal.SIGINT, signal.SIGTERM]
        taken += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
        for number in taken:
            self._loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in taken:
                self._loop.remove_signal_handler(number)
                if number != signal.SIGINT:  # all is over but for tidying up, which they would cut short
                    signal.signal(number, signal.SIG_IGN)

    def _signalled(self) -> None:
        again = self._wish.is_set()
        self._wish.set()
        self._changed.set()
        if again:
            self._in_background(self._stop(list(self._backends), HURRY))

    def _in_background(self, work: Any) -> None:
        task = self._loop.create_task(work)
        # those who wait for the stop are told
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    # -- the control socket -----------------------------------------------------------------------------
    async def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        answers: dict[Any, Callable[[Mapping[str, Any]], Any]] = {
            "status": self._answer_status,
            "stop": self._answer_stop,
            "switch": self._answer_switch,
            "dialect": self._answer_dialect,
        }
        answer = answers.get(question.get("do"))
        if answer is None:
            raise OrchestratorError(f"control: there is no {question.get('do')!r}")
        return dict(await answer(question))

    async def _answer_status(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        states = await asyncio.gather(
            *(asyncio.to_thread(backend.status) for backend in self._backends.values())
        )
        for status in states:
            status["url"] = self._gateway.url
        return {
            "pid": os.getpid(),
            "url": self._gateway.url,
            "api_key_env": self._api_key_env,
            "backends": states,
        }

    async def _answer_stop(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = question.get("names")
        names = [name for name in self._backends if wanted is None or name in wanted]
        if len(names) == len(self._backends):
            self._wish.set()  # nothing is to be started any more, and the end is no failure
            if question.get("grace") is None:
                await self._drain()
        self._downed.update(names)
        await self._stop(names, question.get("grace"))
        self._claim()
        self._changed.set()
        return {"stopped": names}

    async def _answer_switch(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        engine = self._named(question)
        to = question.get("backend")
        if question.get("profile") is not None:
            to = await asyncio.to_thread(profiles.load, str(question["profile"]), backend=to)
        if to is None:
            raise SwitchRefused("switch: neither a backend nor a profile is named")
        drain = question.get("drain_s")
        done = await asyncio.to_thread(
            engine.switch,
            to,
            drain_s=DRAIN_S if drain is None else float(drain),
            beside=question.get("beside"),
        )
        return asdict(done)

    async def _answer_dialect(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Say how the engine that serves wants its options: its plan decides too, not its kind alone."""
        engine = self._named(question)
        found = await asyncio.to_thread(engine.endpoint)
        return {"backend": engine.profile.backend, "dialect": asdict(found.dialect)}

    def _named(self, question: Mapping[str, Any]) -> Switchable:
        engine = self._backends.get(str(question.get("name")))
        if engine is None:
            raise SwitchRefused(f"control: {question.get('name')} is not served here")
        return engine
