"""One run of rounds: prompts for its arms, one round with everything that is watched around it, warm-ups.

What is slow or blocks (counters, logs, parsing) happens between the rounds, never within one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from orchestrator import clients
from orchestrator.bench import gate, machine, rounds, samples, server_view
from orchestrator.bench.prompts import TEXT, Ask, Entry, Material, asks, read_prompts
from orchestrator.bench.target import Target
from orchestrator.bench.values import Client, Round, Sample, SelfTest, Workload
from orchestrator.bench.workload import WorkloadError
from orchestrator.errors import Incomparable, RequestError, Unreachable

WARM_UPS = 2  # tries: what fails twice in a row is no accident
GONE = 10.0  # seconds in which whoever runs a server of others may start it again
LOOK = 0.1  # seconds between two looks whether it is
ENDS = (signal.SIGTERM, signal.SIGHUP)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Step:
    """How far a run is.

    Attributes:
        done: rounds that count.
        total: rounds wanted; 0 while that is not known.
        text: what is done now.
        left_s: seconds that are probably left; None before the first round.

    """

    done: int
    total: int
    text: str
    left_s: float | None


Progress = Callable[[Step], None]


class Session:
    """Rounds of one run.

    Attributes:
        context: what a refusal begins with: the command that measures.
        seed: of all that is random.
        self_test: what the client can do.
        total: rounds wanted.
        done: rounds that count so far.

    """

    def __init__(
        self,
        seed: int,
        self_test: SelfTest,
        total: int,
        progress: Progress | None,
        limits: gate.Limits | None = None,
        context: str = "compare",
    ) -> None:
        self.context = context
        self.seed = seed
        self.self_test = self_test
        self.total = total
        self.done = 0
        self._limits = limits or gate.Limits()
        self._progress = progress or (lambda _: None)
        self._spent: list[float] = []
        self._number = 0
        self._refused: dict[str, str] = {}  # arm -> why the last round found no connection

    def tell(self, text: str, at: float | None = None) -> None:
        """Tell how far it is; `at` is when the last round's work began."""
        if at is not None:
            self._spent.append(time.monotonic() - at)
        recent = self._spent[-8:]
        left = sum(recent) / len(recent) * (self.total - self.done) if recent else None
        self._progress(Step(self.done, self.total, text, left))

    async def round(
        self,
        target: Target,
        workload: Workload,
        material: Material,
        key: str,
        *,
        pair: int = 0,
        position: int = 0,
        attempt: int = 0,
    ) -> Round:
        """Run one round and judge it.

        Raises:
            OrchestratorError: the engine is gone for good.

        """
        wanted = asks(workload, material, self.seed, key)
        _check_context(target, workload, wanted)
        await self._until_it_is_back(target)
        if not await asyncio.to_thread(target.is_up):
            return self._lost(target, pair, position, attempt, "the engine is gone")
        endpoint = target.start()
        before = await asyncio.to_thread(server_view.read_counters, endpoint)
        alive, mark, heat = target.restarts(), target.log_mark(), machine.throttled()
        started_at = time.time()
        idle = _Others(target)
        done = await rounds.run(endpoint, workload, wanted, hash((self.seed, pair)) & 0xFFFF)
        others = idle.share()
        if target.spec.is_url and all(each.connection is None for each in done.exchanges):
            self._refused[target.spec.name] = str(done.exchanges[0].error)
        found = tuple(samples.sample(each, done.began_ns) for each in done.exchanges)
        client = samples.client(done, found)
        reasons = gate.sample_faults(found, wanted, workload)
        reasons += gate.log_faults(target.log_since(mark))
        reasons += gate.client_faults(client, self.self_test.ceiling_events_s, self._limits)
        if target.restarts() != alive:
            reasons.append("the engine was restarted")
        if machine.throttled() != heat:
            reasons.append("the processor was throttled")
        after = await asyncio.to_thread(server_view.read_counters, endpoint)
        self._number += 1
        return Round(
            number=self._number,
            arm=target.spec.name,
            pair=pair,
            position=position,
            attempt=attempt,
            started_at=started_at,
            duration_s=(done.ended_ns - done.began_ns) / 1e9,
            metrics=samples.metrics(found),
            samples=found,
            client=client,
            server=server_view.views(found, before, after),
            memory=target.memory(),
            others=others,
            void=tuple(reasons),
        )

    async def warm_up(
        self, target: Target, workload: Workload, material: Material, key: str
    ) -> tuple[Sample, ...]:
        """Run the workload's shape with other prompts, and see that it is answered as it should be.

        Raises:
            Incomparable: it is not, twice in a row.

        """
        for attempt in range(WARM_UPS):
            found = await self.round(target, workload, material, f"warm-up/{attempt}/{key}")
            wanted = asks(workload, material, self.seed, f"warm-up/{attempt}/{key}")
            reasons = gate.sample_faults(found.samples, wanted, workload)
            if found.samples and not reasons:
                return found.samples
        name = target.spec.name
        raise Incomparable(
            [f"{name}: {reason}" for reason in reasons or found.void],
            context=self.context,
            advice="the engine must obey max_tokens and ignore_eos, and read each prompt anew",
        )

    async def _until_it_is_back(self, target: Target) -> None:
        """Wait for a server of others to which the last round found no connection; ours have a supervisor.

        Raises:
            Unreachable: it is gone.

        """
        name = target.spec.name
        refused = self._refused.pop(name, None)
        if refused is None:
            return
        at = urlsplit(target.start().url)
        port = at.port or (443 if at.scheme == "https" else 80)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE):  # a machine that is off refuses nothing: it lets one wait
                while True:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(at.hostname, port)
                        writer.close()
                        return
                    await asyncio.sleep(LOOK)
        raise Unreachable(
            f"{self.context}: {name}: the server is gone: {refused}",
            advice="see in its own log why it ended; start it again, and measure anew",
        )

    def _lost(self, target: Target, pair: int, position: int, attempt: int, why: str) -> Round:
        self._number += 1
        return Round(
            number=self._number,
            arm=target.spec.name,
            pair=pair,
            position=position,
            attempt=attempt,
            started_at=time.time(),
            duration_s=0.0,
            metrics={},
            samples=(),
            client=Client(cpu=0, lag_p50_s=0, lag_p99_s=0, lag_max_s=0, events_s=0),
            server=(),
            memory=None,
            others=None,
            void=(why,),
        )


class _Others:
    """What programs other than the engine and ourselves use of the processors from now on."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._began = time.perf_counter()
        self._before = self._look()

    def _look(self) -> float | None:
        engine = self._target.cpu_s()
        return None if engine is None else machine.busy_s() - engine - time.process_time()

    def share(self) -> float | None:
        """Return it as a share of all processors."""
        after = self._look()
        wall = (time.perf_counter() - self._began) * machine.processors()
        return None if after is None or self._before is None else (after - self._before) / wall


def _check_context(target: Target, workload: Workload, wanted: Sequence[Ask]) -> None:
    context = target.context
    lengths = (len(ask.prompt) + ask.output_tokens for ask in wanted if isinstance(ask.prompt, list))
    longest = max(lengths, default=0)  # of a text only the server knows
    if context is not None and longest > context:
        raise WorkloadError(
            f"workload: {workload.name}: a request of {longest} tokens exceeds the context of {context}",
            advice="raise `context` in the profile, or ask for shorter prompts and outputs",
        )


# -- prompts ----------------------------------------------------------------------------------------


def tokenise(target: Target, text: str) -> tuple[int, ...] | None:
    """Return a text's tokens without leading special ones; None when the server has no tokeniser."""
    endpoint = target.start()
    try:
        with clients.sync_client(endpoint.url) as http, clients.reaching("tokenize"):
            given = clients.tokenised(http.send(clients.tokenise_request(http, endpoint, text)))
            empty = clients.tokenised(http.send(clients.tokenise_request(http, endpoint, "")))
    except RequestError:
        return None
    return tuple(given[len(empty) :] if given[: len(empty)] == empty else given) or None


def material(targets: Sequence[Target], workload: Workload) -> Material:
    """Return what prompts are made of, the same for all arms.

    Raises:
        WorkloadError: the workload's file can't be used.
        Incomparable: the arms tokenise differently.

    """
    first, *others = [tokenise(target, TEXT) for target in targets]
    names = [target.spec.name for target in targets]
    for name, ids in zip(names[1:], others, strict=True):
        if ids is not None and first is not None and ids != first:
            raise Incomparable(
                [f"{names[0]} and {name} turn the same text into different tokens: not the same model"],
                advice="compare engines that serve the same model",
            )
    if any(ids is None for ids in others):
        first = None
    entries: list[Entry] = []
    for entry in read_prompts(Path(workload.prompts)) if workload.prompts else ():
        ids = tokenise(targets[0], entry.text) if first is not None else None
        entries.append(Entry(entry.text, entry.output_tokens, ids))
    if workload.prefix_tokens and first is None:
        raise WorkloadError(
            "workload: a shared prefix of exact length needs a server with /tokenize",
            advice="leave prefix_tokens out",
        )
    return Material(first, tuple(entries))


# -- running ----------------------------------------------------------------------------------------


def run(main: Coroutine[Any, Any, Answer]) -> Answer:
    """Run to the end on a uvloop of its own; from within a running loop (a notebook) in a thread.

    Ctrl-C cancels `main`, as with `asyncio.run`, and so do SIGTERM and SIGHUP where nobody else heeds them.

    Raises:
        KeyboardInterrupt: `main` was cancelled by one of them, and has nothing to return.

    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    box: list[Answer] = []
    faults: list[BaseException] = []

    def work() -> None:
        try:
            box.append(_run(main))
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=work, name="bench")
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return box[0]


def _run(main: Coroutine[Any, Any, Answer]) -> Answer:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(0.001)  # supervisors' threads give way to the loop that stamps
        try:
            return runner.run(_heeding(main))
        finally:
            sys.setswitchinterval(interval)


async def _heeding(main: Coroutine[Any, Any, Answer]) -> Answer:
    """Let the signals that ask for the end do what Ctrl-C does; nohup means what it says.

    Only the first one does anything: `timeout` sends it twice, and the second must not cut short the first's
    way out. Whoever can't wait has SIGKILL.
    """
    task, loop, asked = asyncio.current_task(), asyncio.get_running_loop(), False
    assert task is not None

    def end() -> None:
        nonlocal asked
        if not asked:
            asked = True
            task.cancel()

    main_thread = threading.current_thread() is threading.main_thread()
    taken = [each for each in ENDS if main_thread and signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        loop.add_signal_handler(each, end)
    try:
        return await main
    except asyncio.CancelledError:
        if asked:
            raise KeyboardInterrupt from None
        raise
    finally:
        for each in taken:
            loop.remove_signal_handler(each)
