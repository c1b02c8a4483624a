"""`TextModel` and `AsyncTextModel`: one model that answers, wherever it runs.

Both are thin: bodies are made by `request`, bytes are understood by `wire`, deadlines and errors live in
`transport`, and a `Source` says at each request where the server is, so that a model survives the restart or
the change of the engine behind it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from orchestrator import classify
from orchestrator import source as sources
from orchestrator.clients import AsyncClients, closed, reaching, sync_client, tokenise_request, tokenised
from orchestrator.errors import BackendError, RequestError, SwitchRefused
from orchestrator.generation import AsyncGeneration, Generation
from orchestrator.request import CHAT, COMPLETIONS, Options, Prompt, chat_body, check_names, completion_body
from orchestrator.switching_parts import DRAIN_S, CanSwitch, Switched
from orchestrator.tokens import Classification, Message, Metrics, ModelInfo, Result
from orchestrator.transport import Call

if TYPE_CHECKING:
    import httpx

    from orchestrator.backend import Endpoint
    from orchestrator.profile import Profile
    from orchestrator.source import Source

Messages = Sequence[Message | Mapping[str, Any]]
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class _Model:
    """What both shells share: the source, its settings, and what is kept of the last call."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._settings = sources.settings(source)
        self._lock = threading.Lock()
        self._live: weakref.WeakSet[Call] = weakref.WeakSet()
        self._last: Call | None = None
        self._last_error: Exception | None = None
        self._owner = os.getpid()

    @property
    def slots(self) -> int:
        """Requests that the server answers at once; `batch_generate` sends as many."""
        return self._settings.slots

    @property
    def info(self) -> ModelInfo:
        """What is known of the model.

        Raises:
            ModelError: its file can't be read.

        """
        return sources.info(self._source)

    @property
    def metrics(self) -> Metrics:
        """What the call that ended last has cost."""
        return self._last.metrics(sources.memory(self._source)) if self._last else Metrics()

    @property
    def last_error(self) -> Exception | None:
        """The error that a call has raised most recently; None when none ever did."""
        return self._last_error

    def _completion(
        self, prompt: Prompt, options: Options, sampling: Mapping[str, Any] | None = None
    ) -> Call:
        options = self._merged(options, sampling)
        return self._call(COMPLETIONS, lambda endpoint: completion_body(endpoint, prompt, options))

    def _conversation(self, messages: Messages, options: Options) -> Call:
        options = self._merged(options, None)
        return self._call(CHAT, lambda endpoint: chat_body(endpoint, messages, options))

    def _merged(self, options: Options, sampling: Mapping[str, Any] | None) -> Options:
        check_names(options)
        given = {name: value for name, value in options.items() if value is not None}
        return cast(Options, {**(self._settings.sampling if sampling is None else sampling), **given})

    def _call(self, path: str, body: Callable[[Endpoint], dict[str, Any]]) -> Call:
        call = Call(path, body, self._settings, self._ended)
        with self._lock:
            self._live.add(call)
        return call

    def _ended(self, call: Call) -> None:
        self._last = call
        if call.error is not None:
            self._last_error = call.error

    def _switch(self, to: str | Profile, drain_s: float = DRAIN_S, beside: bool | None = None) -> Switched:
        if not isinstance(self._source, CanSwitch):
            raise SwitchRefused(
                "switch: the server is not ours to change",
                advice="ask the gateway in front of it: orchestrator switch, or POST /api/switch",
            )
        done = self._source.switch(to, drain_s=drain_s, beside=beside)
        self._settings = sources.settings(self._source)
        return done

    def _end_calls(self) -> None:
        with self._lock:
            live = list(self._live)
        for call in live:
            call.stop("model")

    @property
    def _inherited(self) -> bool:
        """Whether we are a fork of the owner: nothing is ours to end, and locks may be held for ever."""
        return os.getpid() != self._owner


class TextModel(_Model):
    """A model that answers. Safe to use from several threads at once."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._http: httpx.Client | None = None
        self._closed = False

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Continue a text, or a list of token ids. Options: see `orchestrator.request.Options`.

        Raises:
            RequestError: an option's name is unknown; everything else is raised while iterating.

        """
        return Generation(self._source, self._completion(prompt, options), self._client)

    def chat(self, messages: Messages, **options: Unpack[Options]) -> Generation:
        """Answer a conversation. Options: see `orchestrator.request.Options`.

        Raises:
            RequestError: an option's name is unknown; everything else is raised while iterating.

        """
        return Generation(self._source, self._conversation(messages, options), self._client)

    def batch_generate(self, prompts: Iterable[Prompt], **options: Unpack[Options]) -> list[Result]:
        """Continue several texts, as many at once as there are slots.

        Returns:
            One result for each prompt, in order; a failed one carries its error.

        """
        running = [self.generate(prompt, **options) for prompt in prompts]

        def drain(generation: Generation) -> Result:
            try:
                generation.text()
            except (RequestError, BackendError) as error:
                return generation.result(error)
            return generation.result()

        return self._at_once(drain, running, running)

    def classify(self, prompts: Iterable[str], labels: Sequence[str]) -> list[Classification]:
        """Find the label that continues each prompt best; one forward pass each for labels of one token.

        Labels are exact continuations: after ``"Answer:"`` give ``" yes"`` with its space. They may begin
        alike and may have several tokens; see `orchestrator.classify`.

        Raises:
            ValueError: the labels can't be told apart.
            RequestError: a request failed, or the server can't tokenise or tell probabilities.

        """
        classify.check_labels(labels)
        running: list[Generation] = []

        def ask(prompt: classify.Ids, options: Options) -> Generation:
            running.append(Generation(self._source, self._completion(prompt, options, {}), self._client))
            return running[-1]

        def one(prompt: str) -> Classification:
            walk = classify.walk(labels, [self._tokenise(prompt + label) for label in labels])
            try:
                query = next(walk)
                while True:
                    known: dict[int, float] = {}
                    for _ in range(2):  # the likeliest tokens first, then those that were not among them
                        for options in classify.questions(query, known):
                            known |= classify.found(list(ask(query.prompt, options)))
                    query = walk.send(known)
            except StopIteration as done:
                return cast(Classification, done.value)

        return self._at_once(one, list(prompts), running)

    def switch(self, to: str | Profile, *, drain_s: float = DRAIN_S, beside: bool | None = None) -> Switched:
        """Put another engine behind this model; when it does not come up, the old one is back.

        Args:
            to: a backend for the same profile, or another profile.
            drain_s: seconds for answers under way on the old engine; then they end with an error.
            beside: whether both run for a while; default: when the new one fits beside the old one.

        Raises:
            SwitchRefused, SwitchFailed, StopFailed: see `orchestrator.switching.Switchable.switch`.
            ProfileError, ModelError, BackendError: the new engine can't be planned; nothing was touched.

        """
        return self._switch(to, drain_s, beside)

    def close(self) -> None:
        """Cancel what runs (its readers get `StreamInterrupted`) and stop the engine, if it is ours.

        In a fork of the process that made the model it does nothing.
        """
        if self._inherited:
            return
        self._end_calls()
        try:
            self._source.stop()
        finally:
            with self._lock:
                self._closed = True
            if self._http is not None:
                self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _client(self, url: str) -> httpx.Client:
        with self._lock:
            if self._closed:
                raise closed()
            if self._http is None:
                self._http = sync_client(url)
            return self._http

    def _tokenise(self, text: str) -> list[int]:
        endpoint = self._source.endpoint(self._settings.start)
        http = self._client(endpoint.url)
        with reaching("tokenize"):
            return tokenised(http.send(tokenise_request(http, endpoint, text)))

    def _at_once(
        self, work: Callable[[Item], Answer], items: Sequence[Item], running: Sequence[Generation]
    ) -> list[Answer]:
        pool = ThreadPoolExecutor(max_workers=self.slots, thread_name_prefix="orchestrator")
        try:
            return list(pool.map(work, items))
        except BaseException:  # KeyboardInterrupt too: cancel on the server what other threads wait for
            pool.shutdown(wait=False, cancel_futures=True)
            for generation in list(running):
                generation.close()
            raise
        finally:
            pool.shutdown()


class AsyncTextModel(_Model):
    """`TextModel` for asyncio: the same methods, with ``await`` where they wait. Any event loop will do."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._clients = AsyncClients()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGeneration:
        """Continue a text; see `TextModel.generate`."""
        return AsyncGeneration(self._source, self._completion(prompt, options), self._clients.here)

    def chat(self, messages: Messages, **options: Unpack[Options]) -> AsyncGeneration:
        """Answer a conversation; see `TextModel.chat`."""
        return AsyncGeneration(self._source, self._conversation(messages, options), self._clients.here)

    async def batch_generate(self, prompts: Iterable[Prompt], **options: Unpack[Options]) -> list[Result]:
        """Continue several texts; see `TextModel.batch_generate`."""

        async def drain(generation: AsyncGeneration) -> Result:
            try:
                await generation.text()
            except (RequestError, BackendError) as error:
                return generation.result(error)
            return generation.result()

        return await self._at_once(drain, [self.generate(prompt, **options) for prompt in prompts])

    async def classify(self, prompts: Iterable[str], labels: Sequence[str]) -> list[Classification]:
        """Find the label that continues each prompt best; see `TextModel.classify`."""
        classify.check_labels(labels)

        def ask(prompt: classify.Ids, options: Options) -> AsyncGeneration:
            return AsyncGeneration(self._source, self._completion(prompt, options, {}), self._clients.here)

        async def one(prompt: str) -> Classification:
            walk = classify.walk(labels, [await self._tokenise(prompt + label) for label in labels])
            try:
                query = next(walk)
                while True:
                    known: dict[int, float] = {}
                    for _ in range(2):  # the likeliest tokens first, then those that were not among them
                        for options in classify.questions(query, known):
                            known |= classify.found([token async for token in ask(query.prompt, options)])
                    query = walk.send(known)
            except StopIteration as done:
                return cast(Classification, done.value)

        return await self._at_once(one, list(prompts))

    async def switch(
        self, to: str | Profile, *, drain_s: float = DRAIN_S, beside: bool | None = None
    ) -> Switched:
        """Put another engine behind this model; see `TextModel.switch`. It goes on when called off."""
        return await asyncio.to_thread(self._switch, to, drain_s, beside)

    async def close(self) -> None:
        """Cancel what runs, on whatever loop, and stop the engine; see `TextModel.close`."""
        if self._inherited:
            return
        self._end_calls()
        try:
            await asyncio.to_thread(self._source.stop)
        finally:
            await self._clients.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _tokenise(self, text: str) -> list[int]:
        endpoint = await asyncio.to_thread(self._source.endpoint, self._settings.start)
        http = self._clients.here(endpoint.url)
        with reaching("tokenize"):
            return tokenised(await http.send(tokenise_request(http, endpoint, text)))

    async def _at_once(
        self, work: Callable[[Item], Awaitable[Answer]], items: Sequence[Item]
    ) -> list[Answer]:
        free = asyncio.Semaphore(self.slots)

        async def turn(item: Item) -> Answer:
            async with free:
                return await work(item)

        tasks = [asyncio.ensure_future(turn(item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
