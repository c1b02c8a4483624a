"""TextModel and AsyncTextModel against a scripted server: every case runs on both, with one outcome."""

import asyncio
import contextlib
import gc
import inspect
import signal
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
import uvloop

import orchestrator
from orchestrator.backend import Dialect, Endpoint
from orchestrator.errors import (
    BackendError,
    BadStatus,
    ProtocolError,
    RequestError,
    Stalled,
    StartTimeout,
    StopFailed,
    StreamInterrupted,
    Unreachable,
)
from orchestrator.model import AsyncTextModel, TextModel
from orchestrator.source import Server, Settings
from orchestrator.tokens import Message
from tests.fakes.scripted import END, HEAD, HoldUntilClosed, Reset, Scripted, chunked, event, reply, text

DIALECT = Dialect(
    "scripted", {"max_tokens": "max_tokens", "temperature": "temperature", "logprobs": "logprobs"}
)
WORD = event(choices=[{"index": 0, "text": "A"}])


class Source(Server):
    """A server of which the tests count the requests in flight."""

    def __init__(self, url, **settings):
        super().__init__(Endpoint(url, "sesame", "m", DIALECT), Settings(**settings))
        object.__setattr__(self, "in_flight", [0])

    __slots__ = ("in_flight",)

    @contextlib.contextmanager
    def request(self, endpoint):
        self.in_flight[0] += 1
        try:
            yield
        finally:
            self.in_flight[0] -= 1


class Sync:
    """Drives a TextModel."""

    name = "sync"

    def run(self, source, work):
        with TextModel(source) as model:
            return work(_SyncDriver(model))


class _SyncDriver:
    def __init__(self, model):
        self.model = model

    def tokens(self, generation):
        return list(generation)

    def text(self, generation):
        return generation.text()

    def take(self, generation):
        return next(generation)

    def close(self, generation):
        generation.close()

    def close_model(self):
        self.model.close()

    def batch(self, *args, **options):
        return self.model.batch_generate(*args, **options)

    def classify(self, *args):
        return self.model.classify(*args)

    def settle(self):
        gc.collect()


class Async:
    """Drives an AsyncTextModel, one call after another on one loop."""

    def __init__(self, name, loop_factory):
        self.name = name
        self.loop_factory = loop_factory

    def run(self, source, work):
        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            model = AsyncTextModel(source)
            try:
                return work(_AsyncDriver(model, runner))
            finally:
                runner.run(model.close())


class _AsyncDriver:
    def __init__(self, model, runner):
        self.model = model
        self.runner = runner

    def tokens(self, generation):
        async def drain():
            return [token async for token in generation]

        return self.runner.run(drain())

    def text(self, generation):
        return self.runner.run(generation.text())

    def take(self, generation):
        async def one():
            return await anext(generation)

        return self.runner.run(one())

    def close(self, generation):
        self.runner.run(generation.close())

    def close_model(self):
        self.runner.run(self.model.close())

    def batch(self, *args, **options):
        return self.runner.run(self.model.batch_generate(*args, **options))

    def classify(self, *args):
        return self.runner.run(self.model.classify(*args))

    def settle(self):
        gc.collect()
        self.runner.run(asyncio.sleep(0.01))


@pytest.fixture(
    params=[Sync(), Async("asyncio", None), Async("uvloop", uvloop.new_event_loop)],
    ids=lambda shell: shell.name,
)
def shell(request):
    return request.param


@pytest.fixture
def serve():
    servers = []

    def start(*script):
        servers.append(Scripted(script[0] if inspect.isfunction(script[0]) else script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def fails(shell, source, kind, match):
    """Generate, expect this failure, and return it with the text that had arrived."""

    def work(drive):
        generation = drive.model.generate("x")
        with pytest.raises(kind, match=match) as caught:
            drive.text(generation)
        assert drive.model.last_error is caught.value
        assert source.in_flight == [0]
        return caught.value, generation.partial

    return shell.run(source, work)


# -- success ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 7], ids=["one-chunk", "byte-by-byte", "sevens"])
def test_answer_arrives_however_it_is_framed_good(shell, serve, size):
    server = serve(HEAD, chunked(text(" Pa", "ris é", " 🎉"), size), END)

    def work(drive):
        generation = drive.model.generate("x", max_tokens=3)
        tokens = drive.tokens(generation)
        assert [token.text for token in tokens] == [" Pa", "ris é", " 🎉"]
        assert [token.index for token in tokens] == [0, 1, 2]
        assert 0 < tokens[0].at_ns <= tokens[-1].at_ns <= time.perf_counter_ns()
        assert generation.finish_reason == "stop"
        assert generation.usage.completion_tokens == 3
        metrics = drive.model.metrics
        assert metrics == generation.metrics
        assert (metrics.prompt_tokens, metrics.completion_tokens) == (3, 3)
        assert 0 < metrics.ttft_s <= metrics.total_s
        assert drive.model.last_error is None

    shell.run(Source(server.url), work)
    head, body = server.requests[0]
    assert head.startswith("POST /v1/completions ")
    assert "authorization: bearer sesame" in head.lower()
    assert "accept-encoding: identity" in head.lower()
    assert (body["model"], body["prompt"], body["stream"], body["max_tokens"]) == ("m", "x", True, 3)


def test_chat_goes_to_its_endpoint_good(shell, serve):
    server = serve(
        HEAD, chunked(event(choices=[{"delta": {"content": "hey"}, "finish_reason": "stop"}])), END
    )
    answer = shell.run(
        Source(server.url), lambda drive: drive.text(drive.model.chat([Message("user", "hi")]))
    )
    assert answer == "hey"
    head, body = server.requests[0]
    assert head.startswith("POST /v1/chat/completions ")
    assert body["messages"] == [{"role": "user", "content": "hi"}]


def test_body_that_ends_with_the_connection_good(shell, serve):
    server = serve(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + text("ok"))
    assert shell.run(Source(server.url), lambda drive: drive.text(drive.model.generate("x"))) == "ok"


def test_nothing_is_awaited_after_done_good(shell, serve):
    server = serve(HEAD, chunked(text("ok")), HoldUntilClosed)
    assert shell.run(Source(server.url), lambda drive: drive.text(drive.model.generate("x"))) == "ok"
    assert server.gone.wait(10)


def test_profile_sampling_is_sent_unless_the_call_says_otherwise_good(shell, serve):
    server = serve(HEAD, chunked(text("ok")), END)
    source = Source(server.url, sampling={"temperature": 0, "max_tokens": 9})

    def work(drive):
        drive.text(drive.model.generate("x"))
        drive.text(drive.model.generate("x", temperature=0.5, max_tokens=None))

    shell.run(source, work)
    bodies = [body for _, body in server.requests]
    assert [(body["temperature"], body["max_tokens"]) for body in bodies] == [(0, 9), (0.5, 9)]


def test_endpoint_is_asked_for_at_each_request_good(shell, serve):
    first, second = serve(HEAD, chunked(text("one")), END), serve(HEAD, chunked(text("two")), END)
    source = Source(first.url)

    def work(drive):
        before = drive.text(drive.model.generate("x"))
        object.__setattr__(source, "at", Endpoint(second.url, None, "m", DIALECT))
        return before, drive.text(drive.model.generate("x"))

    assert shell.run(source, work) == ("one", "two")
    assert "authorization" not in second.requests[0][0].lower()


def test_drained_generation_stays_drained_ugly(shell, serve):
    server = serve(HEAD, chunked(text("ok")), END)

    def work(drive):
        generation = drive.model.generate("x")
        assert drive.text(generation) == "ok"
        assert drive.tokens(generation) == []
        drive.close(generation)
        drive.close(generation)
        assert drive.text(generation) == "ok"
        assert generation.finish_reason == "stop"

    shell.run(Source(server.url), work)
    assert len(server.requests) == 1


# -- faults of the server ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (
            400,
            {"error": {"message": "exceeds the available context size (512 tokens)", "code": 400}},
            "context",
        ),
        (401, {"error": {"message": "Invalid API Key"}}, "key"),
        (404, {"object": "error", "message": "no such model"}, "model"),
        (429, {"detail": "slow down"}, "limit"),
        (503, {"error": {"message": "Loading model", "code": 503}}, "loading"),
        (500, b"plain text", None),
    ],
)
def test_error_status_says_what_and_what_to_do_bad(shell, serve, status, body, advice):
    error, partial = fails(shell, Source(serve(reply(status, body)).url), BadStatus, f"HTTP {status}")
    assert error.status == status
    assert error.body == (body if isinstance(body, dict) else "plain text")
    assert partial == ""
    assert (advice in error.advice) if advice else error.advice is None
    assert error.exit_code == 4


def test_answer_that_is_no_stream_bad(shell, serve):
    fails(shell, Source(serve(reply(200, {"choices": []})).url), ProtocolError, "expected an event stream")


@pytest.mark.parametrize(
    "tail",
    [(), (Reset,), (b"5\r\nab",), (b"zzz\r\n",)],
    ids=["bare-eof", "reset", "mid-chunk", "bad-framing"],
)
def test_connection_that_breaks_within_the_stream_bad(shell, serve, tail):
    go = threading.Event()
    server = serve(HEAD, chunked(WORD), go, *tail)

    def work(drive):
        generation = drive.model.generate("x")
        assert drive.take(generation).text == "A"
        go.set()
        # aiohttp keeps bad framing to itself: its reader is never woken, and the stall ends the wait.
        unseen = isinstance(drive, _AsyncDriver) and tail == (b"zzz\r\n",)
        with pytest.raises(Stalled if unseen else StreamInterrupted) as caught:
            drive.text(generation)
        assert caught.value.partial == generation.partial == "A"
        assert generation.finish_reason is None

    shell.run(Source(server.url, stall=2), work)
    assert len(server.requests) == 1, "nothing is resent once a token was delivered"


def test_clean_end_without_finish_is_interrupted_bad(shell, serve):
    error, _ = fails(shell, Source(serve(HEAD, chunked(WORD), END).url), StreamInterrupted, "finish reason")
    assert error.partial == "A"


def test_error_in_the_stream_comes_after_the_tokens_before_it_bad(shell, serve):
    body = WORD + event(error={"message": "engine died", "code": 500}) + b"data: [DONE]\n\n"
    error, partial = fails(
        shell, Source(serve(HEAD, chunked(body), END).url), StreamInterrupted, "engine died"
    )
    assert (error.partial, partial) == ("A", "A")


def test_nobody_listens_bad(shell):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    fails(shell, Source(f"http://127.0.0.1:{port}"), Unreachable, "no answer")


def test_connection_dropped_before_any_answer_is_tried_again_good(shell, serve):
    server = serve(lambda head, number: [Reset] if number < 3 else [HEAD, chunked(text("ok")), END])
    assert shell.run(Source(server.url), lambda drive: drive.text(drive.model.generate("x"))) == "ok"
    assert len(server.requests) == 3


def test_connection_always_dropped_before_any_answer_bad(shell, serve):
    server = serve(lambda head, number: [])
    fails(shell, Source(server.url), Unreachable, "no answer")
    assert len(server.requests) == 4


def test_head_without_body_is_not_sent_again_bad(shell, serve):
    server = serve(HEAD, Reset)
    fails(shell, Source(server.url), StreamInterrupted, "connection broke|finish reason")
    assert len(server.requests) == 1


def test_backend_that_is_not_ready_bad(shell, serve):
    class Failed(Source):
        def endpoint(self, timeout=None):
            raise StartTimeout("engine: not ready")

    fails(shell, Failed("http://127.0.0.1:1"), StartTimeout, "not ready")


def test_unknown_option_is_refused_at_the_call_bad(shell):
    def work(drive):
        with pytest.raises(RequestError, match="did you mean max_tokens"):
            drive.model.generate("x", max_token=1)
        with pytest.raises(RequestError, match="scripted does not offer seed"):
            drive.text(drive.model.generate("x", seed=1))

    shell.run(Source("http://127.0.0.1:1"), work)


# -- deadlines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(), (HEAD,), (HEAD, chunked(WORD))], ids=["no-head", "head", "token"])
def test_silence_is_a_stall_bad(shell, serve, before):
    server = serve(*before, HoldUntilClosed)
    error, partial = fails(shell, Source(server.url, stall=0.2), Stalled, "no progress for 0.2 s")
    assert error.partial == partial == ("A" if len(before) == 2 else "")
    assert server.gone.wait(10), "a stalled request is cancelled on the server"


def test_pings_do_not_hide_a_stall_bad(shell, serve):
    pause = threading.Event()

    def pinging(head, number):
        yield HEAD + chunked(WORD)
        for _ in range(200):
            pause.wait(0.02)
            yield chunked(b": ping\n\n")

    fails(shell, Source(serve(pinging).url, stall=0.3), Stalled, "no progress")


def test_news_of_a_prompt_being_read_is_progress_good(shell, serve):
    pause = threading.Event()

    def reading(head, number):
        yield HEAD
        for read in range(12):
            pause.wait(0.05)
            yield chunked(event(choices=[], prompt_progress={"total": 12, "processed": read + 1}))
        yield chunked(text("ok")) + END

    def work(drive):
        generation = drive.model.generate("x")
        assert drive.text(generation) == "ok"
        assert generation.prompt_progress == (12, 12)

    shell.run(Source(serve(reading).url, stall=0.4), work)


def test_slow_caller_is_no_stall_good(shell, serve):
    go = threading.Event()
    server = serve(HEAD, chunked(WORD), go, chunked(text("b")), END)

    def work(drive):
        generation = drive.model.generate("x")
        drive.take(generation)
        if isinstance(drive, _AsyncDriver):
            drive.runner.run(asyncio.sleep(0.5))
        else:
            threading.Event().wait(0.5)
        go.set()
        assert drive.text(generation) == "Ab"

    shell.run(Source(server.url, stall=0.2), work)


@pytest.mark.parametrize("before", [(), (HEAD, chunked(WORD))], ids=["no-head", "token"])
def test_request_that_takes_too_long_in_all_bad(shell, serve, before):
    server = serve(*before, HoldUntilClosed)
    fails(shell, Source(server.url, stall=0, request=0.2), Stalled, "not finished after 0.2 s")
    assert server.gone.wait(10)


def test_tokens_do_not_extend_the_whole_requests_time_bad(shell, serve):
    pause = threading.Event()

    def dripping(head, number):
        yield HEAD
        for _ in range(200):
            pause.wait(0.02)
            yield chunked(WORD)

    error, partial = fails(
        shell, Source(serve(dripping).url, request=0.3), Stalled, "not finished after 0.3 s"
    )
    assert error.partial == partial
    assert partial.startswith("A")


# -- cancelling -------------------------------------------------------------------------------------


def test_close_cancels_on_the_server_and_the_model_lives_on_good(shell, serve):
    server = serve(
        lambda head, number: (
            [HEAD, chunked(WORD), HoldUntilClosed] if number == 1 else [HEAD, chunked(text("ok")), END]
        )
    )
    source = Source(server.url)

    def work(drive):
        generation = drive.model.generate("x")
        assert drive.take(generation).text == "A"
        assert source.in_flight == [1]
        drive.close(generation)
        assert server.gone.wait(10)
        assert drive.tokens(generation) == []
        assert (generation.partial, generation.finish_reason) == ("A", None)
        assert drive.model.last_error is None
        assert drive.text(drive.model.generate("x")) == "ok"

    shell.run(source, work)
    assert source.in_flight == [0]


def test_dropped_generation_is_cancelled_good(shell, serve):
    server = serve(HEAD, chunked(WORD), HoldUntilClosed)

    def work(drive):
        generation = drive.model.generate("x")
        drive.take(generation)
        del generation
        drive.settle()
        assert server.gone.wait(10)

    shell.run(Source(server.url), work)


def test_generation_that_never_began_sends_nothing_good(shell, serve):
    server = serve(HEAD, chunked(text("ok")), END)

    def work(drive):
        generation = drive.model.generate("x")
        drive.close(generation)
        assert drive.tokens(generation) == []

    shell.run(Source(server.url), work)
    assert server.requests == []


@pytest.mark.parametrize("before", [(), (HEAD, chunked(WORD))], ids=["prompt-being-read", "decoding"])
def test_close_from_another_thread_ends_a_waiting_reader_quietly_good(serve, before):
    server = serve(*before, HoldUntilClosed)
    with TextModel(Source(server.url)) as model:
        generation = model.generate("x")
        texts, first = [], threading.Event()

        def read():
            for token in generation:
                texts.append(token.text)
                first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert (first if before else server.reached).wait(10)
        generation.close()
        reader.join(10)
        assert not reader.is_alive()
        assert texts == (["A"] if before else [])
        assert server.gone.wait(10)


@pytest.mark.parametrize("before", [(), (HEAD, chunked(WORD))], ids=["prompt-being-read", "decoding"])
def test_close_from_another_task_ends_a_waiting_reader_quietly_good(serve, before):
    server = serve(*before, HoldUntilClosed)

    async def main():
        async with AsyncTextModel(Source(server.url)) as model:
            generation = model.generate("x")
            first = threading.Event()

            async def read():
                async for _ in generation:
                    first.set()
                return generation.partial

            reader = asyncio.create_task(read())
            assert await asyncio.to_thread((first if before else server.reached).wait, 10)
            await generation.close()
            assert await asyncio.wait_for(reader, 10) == ("A" if before else "")
            assert await asyncio.to_thread(server.gone.wait, 10)

    asyncio.run(main())


@pytest.mark.parametrize("before", [(), (HEAD, chunked(WORD))], ids=["prompt-being-read", "decoding"])
def test_cancelled_task_cancels_on_the_server_good(serve, before):
    server = serve(*before, HoldUntilClosed)

    async def main():
        async with AsyncTextModel(Source(server.url, stall=60)) as model:
            reader = asyncio.create_task(model.generate("x").text())
            assert await asyncio.to_thread(server.reached.wait, 10)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert await asyncio.to_thread(server.gone.wait, 10)

    asyncio.run(main())


@pytest.mark.parametrize("what", ["generation", "model"])
def test_a_cancellation_is_not_lost_in_a_close_at_the_same_moment_ugly(serve, what):
    server = serve(HEAD, chunked(WORD), HoldUntilClosed)

    async def main():
        async with AsyncTextModel(Source(server.url)) as model:
            generation = model.generate("x")
            first = asyncio.Event()

            async def read():
                with contextlib.suppress(RequestError):
                    async for _ in generation:
                        first.set()

            reader = asyncio.create_task(read())
            await first.wait()
            closing = asyncio.create_task((generation if what == "generation" else model).close())
            await asyncio.sleep(0)  # the wish to close has gone out, the reader has not heard it
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await closing

    asyncio.run(main())


def test_caller_of_an_async_stall_is_not_left_cancelled_ugly(serve):
    server = serve(HEAD, HoldUntilClosed)

    async def main():
        async with AsyncTextModel(Source(server.url, stall=0.1)) as model:
            with pytest.raises(Stalled):
                await model.generate("x").text()
            assert asyncio.current_task().cancelling() == 0
            await asyncio.sleep(0)

    asyncio.run(main())


def test_keyboard_interrupt_in_the_middle_cancels_on_the_server_ugly(serve):
    server = serve(HEAD, chunked(WORD), HoldUntilClosed)

    def interrupted(model):
        for _ in model.generate("x"):
            raise KeyboardInterrupt

    with TextModel(Source(server.url)) as model:
        with pytest.raises(KeyboardInterrupt):
            interrupted(model)
        assert server.gone.wait(10)


@pytest.mark.parametrize("before", [(), (HEAD, chunked(WORD))], ids=["prompt-being-read", "decoding"])
def test_interrupting_signal_while_waiting_cancels_on_the_server_ugly(serve, before):
    server = serve(*before, HoldUntilClosed)

    def kill():
        server.reached.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=kill)
    with TextModel(Source(server.url)) as model:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            model.generate("x").text()
        assert server.gone.wait(10)
    thread.join()


BEFORE = pytest.mark.parametrize("before", [(), (HEAD, chunked(WORD))], ids=["prompt-being-read", "decoding"])


def interrupted(caught, before):
    assert type(caught.value) is StreamInterrupted
    assert caught.value.partial == ("A" if before else "")


@BEFORE
def test_closing_the_model_interrupts_its_readers_bad(serve, before):
    server = serve(*before, HoldUntilClosed)
    model = TextModel(Source(server.url))
    generation = model.generate("x")
    first = threading.Event()

    def read():
        for _ in generation:
            first.set()

    with ThreadPoolExecutor() as pool:
        reader = pool.submit(read)
        assert (first if before else server.reached).wait(10)
        model.close()
        with pytest.raises(StreamInterrupted, match="the model was closed") as caught:
            reader.result(10)
    interrupted(caught, before)
    assert model.last_error is caught.value


@BEFORE
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same-loop", "another-loop"])
def test_closing_the_async_model_interrupts_its_readers_bad(serve, before, elsewhere):
    server = serve(*before, HoldUntilClosed)

    async def main():
        model = AsyncTextModel(Source(server.url))
        generation = model.generate("x")
        first = threading.Event()

        async def read():
            async for _ in generation:
                first.set()

        reader = asyncio.create_task(read())
        assert await asyncio.to_thread((first if before else server.reached).wait, 10)
        if elsewhere:
            await asyncio.to_thread(lambda: asyncio.run(model.close()))
        else:
            await model.close()
        with pytest.raises(StreamInterrupted, match="the model was closed") as caught:
            await asyncio.wait_for(reader, 10)
        interrupted(caught, before)
        assert model.last_error is caught.value

    asyncio.run(main())


def test_closing_the_model_interrupts_what_was_read_in_part_or_not_begun_bad(shell, serve):
    server = serve(HEAD, chunked(WORD), HoldUntilClosed)

    def work(drive):
        begun, waiting, own = (drive.model.generate("x") for _ in range(3))
        drive.take(begun)
        drive.take(own)
        drive.close(own)
        drive.close_model()
        assert drive.tokens(own) == []  # its owner asked for that
        for generation, partial in ((begun, "A"), (waiting, "")):
            with pytest.raises(StreamInterrupted, match="the model was closed") as caught:
                drive.text(generation)
            assert caught.value.partial == partial

    shell.run(Source(server.url), work)
    assert len(server.requests) == 2


def test_closing_the_model_leaves_an_answer_that_had_come_whole_good(shell, serve):
    server = serve(HEAD, chunked(text("ok")), HoldUntilClosed)

    def work(drive):
        generation = drive.model.generate("x")
        drive.take(generation)
        drive.close_model()
        assert drive.text(generation) == "ok"

    shell.run(Source(server.url), work)


def open_sessions():
    found = [one for one in gc.get_objects() if isinstance(one, aiohttp.ClientSession)]
    return sum(not session.closed for session in found)


def test_async_model_on_many_loops_leaves_no_session_open_good(serve):
    server = serve(HEAD, chunked(text("ok")), END)
    model = AsyncTextModel(Source(server.url))

    async def ask():
        return await model.generate("x").text()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: asyncio.run(ask()), range(8))) == ["ok"] * 8
        for _ in range(3):
            assert asyncio.run(ask()) == "ok"
        assert open_sessions() == 1  # those of ended loops go with the next

        async def close_while_another_loop_is_open():
            await ask()
            await asyncio.to_thread(lambda: asyncio.run(model.close()))

        asyncio.run(close_while_another_loop_is_open())
        assert open_sessions() == 0
        gc.collect()
    assert [str(warning.message) for warning in told] == []


# -- many at once -----------------------------------------------------------------------------------


def test_batch_gives_a_result_or_an_error_each_in_order_good(shell, serve):
    def script(head, number):
        prompt = server.requests[number - 1][1]["prompt"]
        if prompt == "bad":
            return [reply(400, {"error": {"message": "no"}})]
        return [HEAD, chunked(text(prompt.upper())), END]

    server = serve(script)
    results = shell.run(
        Source(server.url, slots=1), lambda drive: drive.batch(["a", "bad", "c"], max_tokens=4)
    )
    assert [result.text for result in results] == ["A", "", "C"]
    assert [type(result.error) for result in results] == [type(None), BadStatus, type(None)]
    assert [result.finish_reason for result in results] == ["stop", None, "stop"]
    assert results[0].usage.prompt_tokens == results[0].metrics.prompt_tokens == 3


def test_batch_sends_as_many_at_once_as_there_are_slots_good(shell, serve):
    lock, running, seen, full = threading.Lock(), [0], [], threading.Event()

    def script(head, number):
        with lock:
            running[0] += 1
            seen.append(running[0])
            if running[0] == 3:
                full.set()
        yield full  # nobody is answered before three are there
        threading.Event().wait(0.2)  # and a fourth would have had the time to come
        with lock:
            running[0] -= 1
        yield HEAD + chunked(text("ok")) + END

    results = shell.run(Source(serve(script).url, slots=3), lambda drive: drive.batch(["x"] * 7))
    assert [result.text for result in results] == ["ok"] * 7
    assert max(seen) == 3


CIRCLE = {}
CIRCLE["circle"] = CIRCLE


@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [
        ("\ud800", {}, "half of a surrogate pair"),
        ("a", {"extra": {"x": "\udfff"}}, "half of a surrogate pair"),
        ("a", {"temperature": float("nan")}, "a kind that can't be sent"),
        ("a", {"extra": {"x": object()}}, "a kind that can't be sent"),
        ("a", {"extra": CIRCLE}, "a kind that can't be sent"),
        ("a", {"extra": [1]}, "a kind that can't be sent"),
        ("a", {"logprobs": "many"}, "a kind that can't be sent"),
        (None, {}, "a prompt is one text"),
    ],
    ids=["surrogate", "surrogate-below", "nan", "object", "circle", "no-mapping", "text", "nothing"],
)
def test_what_can_not_be_sent_costs_its_own_request_alone_bad(shell, serve, prompt, options, match):
    server = serve(HEAD, chunked(text("ok")), END)

    def work(drive):
        (result,) = drive.batch([prompt], **options)
        assert drive.text(drive.model.generate("b")) == "ok"
        return result

    result = shell.run(Source(server.url), work)
    assert type(result.error) is RequestError
    assert match in str(result.error)
    assert result.metrics.total_s is None
    assert len(server.requests) == 1


def test_classify_of_what_can_not_be_sent_bad(shell, serve):
    server = serve(reply(200, {"tokens": [1]}))
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        shell.run(Source(server.url), lambda drive: drive.classify(["\ud800"], ["a", "b"]))
    assert server.requests == []


@pytest.mark.parametrize("used", [True, False], ids=["used-before", "never-used"])
def test_a_closed_model_says_so_bad(shell, serve, used):
    server = serve(HEAD, chunked(text("ok")), END)

    def work(drive):
        if used:
            drive.text(drive.model.generate("x"))
        drive.close_model()
        with pytest.raises(RequestError, match="the model is closed"):
            drive.text(drive.model.generate("x"))
        with pytest.raises(RequestError, match="the model is closed"):
            drive.classify(["x"], ["a", "b"])
        assert type(drive.batch(["x"])[0].error) is RequestError

    shell.run(Source(server.url), work)
    assert len(server.requests) == used


def test_a_model_is_closed_though_its_engine_did_not_stop_bad(shell, serve):
    left = [1]

    class Stuck(Source):
        def stop(self):
            if left:
                raise StopFailed("stop: something is left", survivors=[left.pop()])

    server = serve(HEAD, chunked(text("ok")), END)

    def work(drive):
        drive.text(drive.model.generate("x"))
        with pytest.raises(StopFailed):
            drive.close_model()
        with pytest.raises(RequestError, match="the model is closed"):
            drive.text(drive.model.generate("x"))

    shell.run(Stuck(server.url), work)
    assert len(server.requests) == 1


def test_empty_batch_good(shell):
    assert shell.run(Source("http://127.0.0.1:1"), lambda drive: drive.batch([])) == []


def test_several_threads_use_one_model_good(serve):
    server = serve(
        lambda head, number: [HEAD, chunked(text(server.requests[number - 1][1]["prompt"]), 9), END]
    )
    texts = {}
    with TextModel(Source(server.url)) as model:

        def work(name):
            for turn in range(5):
                prompt = f"{name}.{turn}"
                texts[prompt] = model.generate(prompt).text()

        threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(texts) == 30


def test_classify_forces_a_label_that_is_not_among_the_likeliest_good(shell, serve):
    def script(head, number):
        body = server.requests[number - 1][1]
        if "/tokenize" in head:
            return [reply(200, {"tokens": [2, 50, {" yes": 7, " no": 8}[body["content"][1:]]]})]
        chosen = next(iter(body.get("logit_bias", {"7": 0})))
        entry = {"id": int(chosen), "token": "?", "logprob": {"7": -1.0, "8": -2.0}[chosen]}
        entry["top_logprobs"] = [{"id": 7, "token": " yes", "logprob": -1.0}]
        choice = {"text": "?", "logprobs": {"content": [entry]}, "finish_reason": "length"}
        return [HEAD, chunked(event(choices=[choice])), END]

    server = serve(script)
    source = Source(server.url, sampling={"temperature": 9})
    names = ("max_tokens", "temperature", "logprobs", "logit_bias")
    dialect = Dialect("scripted", {name: name for name in names})
    object.__setattr__(source, "at", Endpoint(server.url, None, "m", dialect))
    (result,) = shell.run(source, lambda drive: drive.classify(["q"], [" yes", " no"]))
    assert result.label == " yes"
    assert result.probabilities[" yes"] == pytest.approx(1 / (1 + 2.718281828**-1))
    asked = [body for head, body in server.requests if "/completions" in head]
    assert [body["prompt"] for body in asked] == [[2, 50], [2, 50]]
    assert [body["temperature"] for body in asked] == [0, 0]
    assert asked[1]["logit_bias"] == {"8": 100}


def test_classify_that_fails_says_so_bad(shell, serve):
    source = Source(serve(reply(404, {"detail": "Not Found"})).url)
    with pytest.raises(BadStatus, match="Not Found"):
        shell.run(source, lambda drive: drive.classify(["q"], ["a", "b"]))


# -- connect ----------------------------------------------------------------------------------------


def answers(**paths):
    def script(head, number):
        path = head.split()[1]
        return [paths.get(path.strip("/").replace("/", "_"), reply(404, {"detail": "Not Found"}))]

    return script


def test_connect_to_llama_server_good(serve):
    server = serve(
        answers(
            v1_models=reply(
                200, {"data": [{"id": "gemma", "meta": {"n_vocab": 9, "n_params": 8, "n_ctx_train": 7}}]}
            ),
            props=reply(
                200,
                {
                    "default_generation_settings": {"n_ctx": 6},
                    "total_slots": 5,
                    "model_ftype": "Q4_K - Medium",
                },
            ),
        )
    )
    with orchestrator.connect(server.url + "/v1/", key="sesame") as model:
        assert model.slots == 5
        info = model.info
    assert (info.name, info.vocabulary, info.parameters, info.native_context) == ("gemma", 9, 8, 7)
    assert (info.context, info.quantisation) == (6, "Q4_K - Medium")
    assert all("authorization: bearer sesame" in head.lower() for head, _ in server.requests)


def test_connect_to_vllm_good(serve):
    server = serve(
        answers(
            v1_models=reply(200, {"data": [{"id": "q", "max_model_len": 4096}]}),
            version=reply(200, {"version": "0.32"}),
        )
    )
    with orchestrator.connect(server.url) as model:
        assert model.info.context == 4096


def test_connect_to_any_other_server_speaks_plain_openai_good(serve):
    def script(head, number):
        if "/v1/models" in head:
            return [reply(200, {"data": [{"id": "a"}, {"id": "b"}]})]
        return [HEAD, chunked(text("ok")), END] if "/v1/completions" in head else [reply(404, {})]

    server = serve(script)
    with orchestrator.connect(server.url, model="b") as model:
        assert model.generate("x", temperature=0, seed=1).text() == "ok"
        with pytest.raises(RequestError, match="does not offer min_p"):
            model.generate("x", min_p=0.1).text()
    assert server.requests[-1][1]["model"] == "b"


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (reply(401, {"error": {"message": "Invalid API Key"}}), BadStatus, "Invalid API Key"),
        (reply(200, {"data": []}), ProtocolError, "serves no model"),
        (reply(200, {"data": [{"id": 5}]}), ProtocolError, "does not list models"),
        (reply(200, b"<html>", "text/html"), ProtocolError, "does not list models"),
    ],
)
def test_connect_to_what_is_no_model_server_bad(serve, body, kind, match):
    with pytest.raises(kind, match=match):
        orchestrator.connect(serve(answers(v1_models=body)).url)


@pytest.mark.parametrize("wrong", [None, [], {}, "x", -1, 0, 1.5, True, [[]], {"n_ctx": "x"}])
def test_connect_takes_what_makes_no_sense_for_silence_ugly(serve, wrong):
    props = {"default_generation_settings": wrong, "total_slots": wrong, "model_ftype": wrong}
    models = {"data": [{"id": "gemma", "meta": wrong}, {"id": "b", "meta": {"n_vocab": wrong}}]}
    server = serve(answers(v1_models=reply(200, models), props=reply(200, props)))
    for name in ("gemma", "b"):
        with orchestrator.connect(server.url, model=name) as model:
            assert (model.slots, model.info.context, model.info.vocabulary) == (8, None, None)
            assert model.info.quantisation == (wrong if wrong == "x" else None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1", "nonsense"])
def test_connect_to_nobody_bad(url):
    with pytest.raises(Unreachable):
        orchestrator.connect(url)


def test_aconnect_gives_the_async_model_good(serve):
    server = serve(answers(v1_models=reply(200, {"data": [{"id": "a"}]})))

    async def main():
        async with await orchestrator.aconnect(server.url) as model:
            return type(model)

    assert asyncio.run(main()) is AsyncTextModel


# -- the package ------------------------------------------------------------------------------------


def test_every_public_name_can_be_imported_and_no_other_good():
    for name in orchestrator.__all__:
        assert getattr(orchestrator, name) is not None
    assert set(orchestrator.__all__) <= set(dir(orchestrator))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = orchestrator.nonsense


def test_importing_the_package_imports_no_heavy_library_good():
    import subprocess
    import sys

    code = (
        "import orchestrator, sys; print(*{'httpx','aiohttp','pydantic','msgspec','gguf'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == ""
    )


def test_errors_of_a_missing_backend_stay_what_they_are_bad():
    assert issubclass(StartTimeout, BackendError)
