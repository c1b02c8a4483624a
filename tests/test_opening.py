"""From a profile to a model: what is started, taken over, and stopped again."""

import asyncio
import contextlib
import queue
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import orchestrator
from orchestrator import errors, switching_served
from orchestrator.backend import Dialect, Endpoint, State
from orchestrator.errors import ExitedEarly, ProfileError, StartCancelled, StartTimeout
from orchestrator.model import AsyncTextModel, TextModel
from tests.fakes.scripted import END, HEAD, Scripted, chunked, text

DIALECT = Dialect("fake", {"temperature": "temperature", "max_tokens": "max_tokens"})


class FakeBackend:
    """What `load` needs of a backend; `done` tells what was done to it."""

    url = ""
    fails = None

    def __init__(self, profile, instance=None):
        self.profile = profile
        self.done = []
        FakeBackend.last = self

    state = State.READY

    def start(self, timeout=None):
        self.done.append("start")
        if self.fails:
            raise self.fails
        return self.endpoint()

    def endpoint(self, timeout=None):
        return Endpoint(self.url, None, "m", DIALECT)

    @contextlib.contextmanager
    def request(self, endpoint):
        self.done.append("request")
        yield

    def subscribe(self, callback):
        return lambda: None

    def stop(self, grace=None):
        self.done.append("stop")

    def status(self):
        return {"state": "ready", "memory": {"rss": 123}}

    def plan(self):
        header = SimpleNamespace(
            name="Gemma",
            architecture="gemma3",
            layers=18,
            vocabulary=262144,
            quantisation="Q4_K_M",
            parameters=268_098_176,
            context=32768,
        )
        return SimpleNamespace(header=header, model_id="m", context=4096)


class Loading(FakeBackend):
    """One that loads until it is stopped; a start takes until `gate` is open."""

    state = State.STARTING

    def __init__(self, profile, instance=None):
        super().__init__(profile, instance)
        self.gate, self.begins, self.waited_for, self.ended = (threading.Event() for _ in range(4))
        self.gate.set()
        Loading.made(self)

    def start(self, timeout=None):
        self.begins.set()
        self.gate.wait()
        self.done.append("start")
        return self.endpoint(timeout)

    def endpoint(self, timeout=None):
        if timeout == 0:
            raise StartTimeout("engine: still loading")
        self.waited_for.set()
        self.ended.wait()
        raise StartCancelled("engine: is stopped")

    def stop(self, grace=None):
        self.done.append("stop")
        self.ended.set()


@pytest.fixture
def loading(profile, monkeypatch):
    """A profile whose engine loads for ever, and what is told of the engine as soon as there is one."""
    made = queue.SimpleQueue()
    monkeypatch.setattr(switching_served.discovery, "find", lambda name: Loading)
    monkeypatch.setattr(Loading, "made", made.put, raising=False)
    yield profile, made
    FakeBackend.last.gate.set()  # so that a failing test ends
    FakeBackend.last.ended.set()


@pytest.fixture
def server():
    server = Scripted([HEAD, chunked(text("ok")), END])
    yield server
    server.close()


@pytest.fixture
def profile(tmp_path, monkeypatch, server):
    monkeypatch.setattr(switching_served.discovery, "find", lambda name: FakeBackend)
    monkeypatch.setattr(FakeBackend, "url", server.url)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    path = tmp_path / "p.yaml"
    path.write_text(
        f"model: {model}\nbackend: llama-server\nslots: 3\nsampling: {{temperature: 0}}\n"
        "timeouts: {stall: 7, request: 9, start: 11}\n"
    )
    return path


def test_load_starts_and_close_stops_good(profile, server):
    with orchestrator.load(profile) as model:
        assert isinstance(model, TextModel)
        assert model.slots == 3
        assert model.generate("x").text() == "ok"
        assert model.metrics.memory == {"rss": 123}
        info = model.info
    assert (info.architecture, info.layers, info.vocabulary) == ("gemma3", 18, 262144)
    assert (info.quantisation, info.context, info.native_context) == ("Q4_K_M", 4096, 32768)
    assert FakeBackend.last.done == ["start", "request", "stop"]
    assert server.requests[0][1]["temperature"] == 0


def test_profile_brings_the_deadlines_and_overrides_count_good(profile):
    with orchestrator.load(profile, overrides=["timeouts.stall=5", "slots=2"]) as model:
        settings = model._settings
    assert (settings.stall, settings.request, settings.start, settings.slots) == (5, 9, 11, 2)


def test_aload_does_the_same_good(profile):
    async def main():
        async with await orchestrator.aload(profile) as model:
            assert isinstance(model, AsyncTextModel)
            return await model.generate("x").text()

    assert asyncio.run(main()) == "ok"
    assert FakeBackend.last.done == ["start", "request", "stop"]


async def once(event, made):
    engine = await asyncio.to_thread(made.get, timeout=10)
    assert await asyncio.to_thread(getattr(engine, event).wait, 10)
    return engine


@pytest.mark.parametrize("times", [1, 2])
def test_aload_called_off_while_it_loads_stops_the_engine_ugly(loading, times):
    profile, made = loading

    async def main():
        task = asyncio.create_task(orchestrator.aload(profile))
        engine = await once("waited_for", made)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.done == ["start", "stop"]

    asyncio.run(main())


def test_aload_called_off_while_it_begins_stops_what_comes_of_it_ugly(loading, monkeypatch):
    profile, made = loading
    monkeypatch.setattr(Loading, "made", lambda engine: (engine.gate.clear(), made.put(engine)))

    async def main():
        task = asyncio.create_task(orchestrator.aload(profile))
        engine = await once("begins", made)
        task.cancel()
        await asyncio.sleep(0)
        engine.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.done == ["start", "stop"]

    asyncio.run(main())


def test_aload_that_takes_too_long_for_its_caller_stops_the_engine_ugly(loading):
    profile, made = loading

    async def expire(deadline):
        await once("waited_for", made)
        deadline.reschedule(asyncio.get_running_loop().time())

    async def main():
        async with asyncio.timeout(None) as deadline:
            await asyncio.gather(orchestrator.aload(profile), expire(deadline))

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert FakeBackend.last.done == ["start", "stop"]


def test_interrupted_load_stops_the_engine_ugly(loading, monkeypatch):
    profile, _ = loading

    def interrupt(engine):
        engine.waited_for.wait(10)
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)  # the kernel may give a process's signal to any thread

    monkeypatch.setattr(
        Loading, "made", lambda engine: threading.Thread(target=interrupt, args=(engine,)).start()
    )
    with pytest.raises(KeyboardInterrupt):
        orchestrator.load(profile)
    assert FakeBackend.last.done == ["start", "stop"]


@pytest.mark.parametrize("opened", [orchestrator.load, lambda path: asyncio.run(orchestrator.aload(path))])
def test_engine_that_does_not_start_is_stopped_again_bad(profile, monkeypatch, opened):
    monkeypatch.setattr(FakeBackend, "fails", ExitedEarly("engine: exit code 1", code=1, signal=None))
    with pytest.raises(ExitedEarly):
        opened(profile)
    assert FakeBackend.last.done == ["start", "stop"]


def test_faulty_profile_bad(profile):
    with pytest.raises(ProfileError, match="slots"):
        orchestrator.load(profile, overrides=["slots=0"])


def test_every_error_can_be_named_after_a_plain_import_good():
    code = (
        "import orchestrator as orc, sys; assert 'orchestrator.errors' not in sys.modules\n"
        "assert issubclass(orc.BackendError, orc.OrchestratorError)\n"
        "print(all(getattr(orc, n) is getattr(orc.errors, n) for n in sys.argv[1:]))"
    )
    names = [
        name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__
    ]
    public = [name for name in names if isinstance(getattr(errors, name), type) and name[0] != "_"]
    assert set(public) <= {*orchestrator.__all__}
    assert len(public) > 20
    done = subprocess.run([sys.executable, "-c", code, *public], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
