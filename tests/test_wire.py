"""Streams as servers really send them, whole, split at every byte, and as hypothesis makes them up."""

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import BadStatus, ProtocolError, RequestError, StreamInterrupted
from orchestrator.tokens import Alternative, Timings, ToolCall, Usage
from orchestrator.wire import Stream

STREAMS = Path(__file__).parent / "data" / "streams"
GOOD = sorted(path.stem for path in STREAMS.glob("*.sse") if not path.stem.startswith("bad_"))
BAD = sorted(path.stem for path in STREAMS.glob("bad_*.sse"))


def read(name):
    return (STREAMS / f"{name}.sse").read_bytes()


def run(*chunks):
    """Feed a stream and return it with its tokens and its error."""
    stream = Stream()
    tokens = [token for at, chunk in enumerate(chunks, 1) for token in stream.feed(chunk, at * 1_000_000_000)]
    try:
        stream.end()
    except RequestError as error:
        return stream, tokens, error
    return stream, tokens, None


def outcome(*chunks):
    """Everything about a stream that must not depend on how it was cut."""
    stream, tokens, error = run(*chunks)
    return (
        [(t.text, t.id, t.logprob, t.index, t.kind, t.top, t.tool) for t in tokens],
        (
            stream.text,
            stream.reasoning,
            stream.tool_calls,
            stream.finish_reason,
            stream.usage,
            stream.timings,
        ),
        (stream.done, stream.prompt_progress, tuple(stream.warnings)),
        (type(error), str(error), getattr(error, "partial", None)),
    )


@pytest.mark.parametrize("name", GOOD + BAD)
def test_every_byte_split_gives_the_same_outcome_good(name):
    raw = read(name)
    whole = outcome(raw)
    for at in range(len(raw) + 1):
        assert outcome(raw[:at], raw[at:]) == whole, at
    assert outcome(*(raw[at : at + 1] for at in range(len(raw)))) == whole


@pytest.mark.parametrize("name", GOOD)
def test_tokens_join_to_the_text_and_are_numbered_good(name):
    stream, tokens, error = run(read(name))
    assert error is None
    assert "".join(token.text for token in tokens if token.kind == "text") == stream.text
    assert "".join(token.text for token in tokens if token.kind == "reasoning") == stream.reasoning
    assert [token.index for token in tokens] == list(range(len(tokens)))


def test_llama_server_completion_good():
    stream, tokens, _ = run(read("llama_server_completion"))
    assert [token.text for token in tokens] == [" the", " capital", " of", " the"]
    assert stream.finish_reason == "length"
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (6, 4)
    assert stream.timings.predicted_n == 4
    assert stream.timings.predicted_ms > 0
    assert stream.prompt_progress == (6, 6)
    assert stream.warnings == []


def test_llama_server_chat_counts_come_from_usage_not_from_chunks_good():
    stream, tokens, _ = run(read("llama_server_chat"))
    assert read("llama_server_chat").count(b'"delta"') > len(tokens) == 3
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (25, 3)


def test_llama_server_logprobs_carry_ids_good():
    _, tokens, _ = run(read("llama_server_completion_logprobs"))
    assert [token.id for token in tokens] == [506, 5279]
    assert tokens[0].logprob == pytest.approx(-1.5439, abs=1e-3)
    assert [other.text for other in tokens[0].top] == [" the", " a"]
    assert tokens[0].top[0].id == 506


def test_vllm_ids_survive_chunks_of_several_and_of_no_text_good():
    stream, tokens, _ = run(read("vllm_completion"))
    assert [(token.text, token.id) for token in tokens] == [
        (" Paris", 9079),
        (", of", 236764),
        ("", 529),
        ("", 107),
        ("", 1),
    ]
    assert stream.usage == Usage(3, 5, None)


def test_vllm_logprobs_in_parallel_lists_good():
    stream, tokens, _ = run(read("vllm_completion_logprobs"))
    assert [(token.text, token.id, token.logprob) for token in tokens] == [
        (" a", None, -0.5),
        (" b", None, -9999.0),
        (" c", 33, -0.25),
    ]
    assert tokens[1].top == (Alternative(" q", None, -0.1), Alternative(" b", None, -9999.0))
    assert tokens[2].top == (Alternative("", 33, -0.25), Alternative("", 7, -2.0))
    assert stream.usage.cached_tokens == 2


@pytest.mark.parametrize(
    ("name", "reasoning", "text"),
    [
        ("vllm_chat_reasoning", "Let me think.", "Hi there"),
        ("llama_server_reasoning", "Hm\u2028\u0085", "Yes"),
    ],
)
def test_reasoning_is_one_field_whatever_the_engine_calls_it_good(name, reasoning, text):
    stream, tokens, _ = run(read(name))
    assert (stream.reasoning, stream.text) == (reasoning, text)
    assert {token.kind for token in tokens} == {"reasoning", "text"}


def test_tool_calls_are_put_together_good():
    stream, tokens, _ = run(read("tool_calls"))
    assert stream.tool_calls == (
        ToolCall("call_1", "weather", '{"city":"Zürich"}'),
        ToolCall("call_2", "time", "{}"),
    )
    assert stream.text == ""
    assert stream.finish_reason == "tool_calls"
    assert [token.tool.index for token in tokens] == [0, 0, 0, 1]


def test_last_usage_wins_good():
    stream, _, _ = run(read("crlf_comments_cumulative_usage"))
    assert stream.usage == Usage(4, 3)


def test_timings_stand_in_for_missing_usage_good():
    chunk = {
        "choices": [{"text": "a", "finish_reason": "stop"}],
        "timings": {"cache_n": 2, "prompt_n": 3, "predicted_n": 1, "predicted_ms": 5.0},
    }
    stream, _, error = run(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
    assert error is None
    assert stream.usage == Usage(5, 1, 2)
    assert stream.timings == Timings(cache_n=2, prompt_n=3, predicted_n=1, predicted_ms=5.0)


def test_spaces_at_the_edge_of_a_read_are_text_good():
    assert run(read("cr_only_no_space"))[0].text == " A  B "


def test_missing_done_after_finish_is_a_warning_good():
    stream, _, error = run(read("no_done"))
    assert error is None
    assert stream.warnings == ["the stream ended without [DONE]"]


def test_comments_are_no_progress_good():
    stream = Stream()
    stream.feed(b": ping\n\n", 1)
    assert not stream.progressed
    stream.feed(b'data: {"choices":[],"prompt_progress":{"total":9,"processed":3}}\n\n', 2)
    assert stream.progressed
    assert stream.prompt_progress == (3, 9)


def test_metrics_follow_their_definitions_good():
    chunks = [read("llama_server_completion").partition(b"\n\ndata: [DONE]")[0] + b"\n\n"]
    events = [event + b"\n\n" for event in chunks[0].split(b"\n\n") if event]
    stream, tokens, _ = run(*events)  # one event a second, the first at 1 s
    metrics = stream.metrics(sent_ns=0, end_ns=20_000_000_000)
    first, last = tokens[0].at_ns / 1e9, tokens[-1].at_ns / 1e9
    assert metrics.ttft_s == first
    assert metrics.decode_tok_s == pytest.approx(3 / (last - first))
    assert metrics.prefill_tok_s == pytest.approx((6 - metrics.cached_tokens) / first)
    assert metrics.total_s == 20


def test_role_chunks_and_progress_are_not_the_first_token_good():
    stream = Stream()
    stream.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', 5)
    assert stream.first_ns == 0
    stream.feed(b'data: {"choices":[{"delta":{"reasoning_content":"x"}}]}\n\n', 7)
    assert (stream.first_ns, stream.last_ns) == (7, 7)


def test_tokens_without_text_are_not_the_last_output_good():
    events = [part + b"\n\n" for part in read("vllm_completion").split(b"\n\n") if part]
    stream, tokens, _ = run(*events)
    assert [token.at_ns for token in tokens if token.text] == [stream.first_ns, stream.last_ns]
    assert stream.last_ns < tokens[-1].at_ns


@pytest.mark.parametrize(
    ("name", "kind", "says", "partial"),
    [
        ("bad_error_then_done", StreamInterrupted, "EngineCore died", "A"),
        ("bad_error_first_then_done", BadStatus, "EngineCore died", None),
        ("bad_bare_error_field", StreamInterrupted, "context shift is disabled", "A"),
        ("bad_named_error_event", BadStatus, "boom", None),
        ("bad_old_vllm_error", BadStatus, "too long", None),
        ("bad_only_done", StreamInterrupted, "without a finish reason", ""),
        ("bad_empty", StreamInterrupted, "without a finish reason", ""),
        ("bad_no_finish_reason", StreamInterrupted, "without a finish reason", "AB"),
        ("bad_eof_mid_event", StreamInterrupted, "without a finish reason", "AB"),
        ("bad_abort", StreamInterrupted, "abort", "A"),
        ("bad_not_json", ProtocolError, "not a chunk", None),
        ("bad_utf8", ProtocolError, "not a chunk", None),
        ("bad_error_after_finish", StreamInterrupted, "late", "A"),
    ],
)
def test_failures_are_never_successes_bad(name, kind, says, partial):
    _, tokens, error = run(read(name))
    assert type(error) is kind
    assert says in str(error)
    assert getattr(error, "partial", None) == partial
    assert "".join(token.text for token in tokens) == (partial or ("A" if kind is ProtocolError else ""))


def test_every_bad_fixture_has_its_expectation_good():
    (marker,) = test_failures_are_never_successes_bad.pytestmark
    assert sorted(case[0] for case in marker.args[1]) == BAD


def test_error_status_inside_a_stream_is_kept_with_its_cause_bad():
    _, _, error = run(read("bad_error_then_done"))
    assert isinstance(error.__cause__, BadStatus)
    assert error.__cause__.status == 500
    assert run(read("bad_named_error_event"))[2].status == 429
    assert "context" in run(b'data: {"error":{"code":400,"message":"context length exceeded"}}\n\n')[2].advice


def test_event_beyond_the_bound_ends_the_stream_with_what_came_before_ugly():
    stream = Stream(max_event=200)
    tokens = stream.feed(b'data: {"choices":[{"text":"A"}]}\n\n', 1)
    stream.feed(b"data: " + b"x" * 300, 2)
    assert [token.text for token in tokens] == ["A"]
    with pytest.raises(ProtocolError, match="larger than 200 bytes"):
        stream.end()


def test_nothing_counts_after_done_ugly():
    raw = read("no_done") + b'data: [DONE]\n\ndata: {"choices":[{"text":"B"}]}\n\ndata: {"error":"x"}\n\n'
    stream, _, error = run(raw)
    assert (stream.text, error) == ("A", None)


texts = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


@settings(deadline=None, max_examples=200)
@given(texts, st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_any_text_arrives_unchanged_in_any_split_good(parts, chat, escaped, end, data):
    events = [
        {"choices": [{"delta": {"content": part}} if chat else {"text": part}], "usage": None}
        for part in parts
    ]
    events.append({"choices": [{"finish_reason": "stop", "delta": {}}]})
    lines = [f"data: {json.dumps(event, ensure_ascii=escaped)}" for event in events] + [
        ": ping",
        "data: [DONE]",
    ]
    raw = "".join(line + end * 2 for line in lines).encode("utf-8", "surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    stream, tokens, error = run(*(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)))
    assert error is None
    assert stream.text == "".join(parts)
    assert [token.text for token in tokens] == parts


@functools.cache
def corpus():
    return [read(name) for name in GOOD + BAD]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_damaged_streams_end_in_a_known_error_or_well_ugly(data):
    raw = bytearray(data.draw(st.sampled_from(corpus())))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=5))
    run(bytes(raw))  # anything but a RequestError fails the test
