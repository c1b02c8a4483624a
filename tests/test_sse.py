"""The event decoder against the standard, against httpx-sse, and against whatever hypothesis invents."""

import json

import httpx
import httpx_sse
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.errors import ProtocolError
from orchestrator.sse import Decoder, Event

CASES = {
    "one": (b"data: x\n\n", [Event(b"x")]),
    "no_space": (b"data:x\n\n", [Event(b"x")]),
    "two_spaces_keep_one": (b"data:  x \n\n", [Event(b" x ")]),
    "crlf": (b"data: x\r\n\r\ndata: y\r\n\r\n", [Event(b"x"), Event(b"y")]),
    "cr": (b"data: x\r\rdata: y\r\r", [Event(b"x"), Event(b"y")]),
    "mixed_ends": (b"data: x\r\n\ndata: y\n\r\ndata: z\r\r\n", [Event(b"x"), Event(b"y"), Event(b"z")]),
    "bom": (b"\xef\xbb\xbfdata: x\n\n", [Event(b"x")]),
    "bom_only_at_the_start": (b"data: x\n\n\xef\xbb\xbfdata: y\n\n", [Event(b"x")]),
    "bom_then_blank": (b"\xef\xbb\xbf\n\ndata: x\n\n", [Event(b"x")]),
    "comments": (b":\n\n: ping\n\ndata: x\n:\ndata: y\n\n:\n\n", [Event(b"x\ny")]),
    "multi_line": (b"data: a\ndata: b\ndata:\n\n", [Event(b"a\nb\n")]),
    "data_without_colon": (b"data\n\n", [Event(b"")]),
    "named": (b"event: error\ndata: {}\n\ndata: x\n\n", [Event(b"{}", "error"), Event(b"x")]),
    "named_alone": (b"event: error\ndata: {}\n\n", [Event(b"{}", "error")]),
    "name_without_data_is_dropped": (b"event: a\n\ndata: x\n\n", [Event(b"x")]),
    "bare_error": (b'error: {"code":500}\n\n', [Event(b'{"code":500}', "error")]),
    "id_retry_unknown": (b"id: 1\nretry: 5\nfoo: bar\ndata: x\n\n", [Event(b"x")]),
    "separators_inside": (
        'data: "\u2028\u2029\u0085\x0b\x0c\x1c é 🎉"\n\n'.encode(),
        [Event('"\u2028\u2029\u0085\x0b\x0c\x1c é 🎉"'.encode())],
    ),
    "several_in_a_read": (b"data: 1\n\ndata: 2\n\ndata: 3\n\n", [Event(b"1"), Event(b"2"), Event(b"3")]),
    "leading_newlines": (b"\n\n\ndata: 1\n\n\n\n", [Event(b"1")]),
    "nothing": (b"", []),
}


def decode(*chunks: bytes) -> list[Event]:
    decoder = Decoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


@pytest.mark.parametrize("name", CASES)
def test_every_byte_split_gives_the_same_events_good(name):
    raw, expected = CASES[name]
    assert decode(raw) == expected
    for at in range(len(raw) + 1):
        assert decode(raw[:at], raw[at:]) == expected, at
    assert decode(*(raw[at : at + 1] for at in range(len(raw)))) == expected


@pytest.mark.parametrize("raw", [b"data: x\n\n", b"data: x\n\n:\n", b"event: a\n\n", b""])
def test_whole_events_leave_nothing_pending_good(raw):
    decoder = Decoder()
    decoder.feed(raw)
    assert not decoder.pending


@pytest.mark.parametrize("raw", [b"data: x", b"data: x\n", b"data: x\n\ndata: {", b"da"])
def test_unterminated_last_event_is_reported_and_not_dispatched_bad(raw):
    decoder = Decoder()
    assert len(decoder.feed(raw)) == raw.count(b"\n\n")
    assert decoder.pending


@pytest.mark.parametrize(
    "chunks",
    [[b"data: " + b"x" * 200 + b"\n\n"], [b"data: " + b"x" * 30] * 4, [b"data: xxxxxxxxxx\n"] * 20],
    ids=["one-read", "one-line", "many-lines"],
)
def test_event_beyond_the_bound_is_refused_bad(chunks):
    decoder = Decoder(max_event=100)
    with pytest.raises(ProtocolError, match="larger than 100 bytes"):
        list(map(decoder.feed, chunks))


def test_bound_counts_one_event_not_the_stream_good():
    decoder = Decoder(max_event=100)
    for chunk in [
        b"data: " + b"x" * 50,
        b"\n\n",
        b"data: " + b"y" * 50 + b"\r\r",
        b": " + b"z" * 60 + b"\n",
    ] * 20:
        decoder.feed(chunk)
    assert not decoder.pending


def oracle(raw: bytes) -> list[tuple[str, str]]:
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=raw)
    return [(event.event, event.data) for event in httpx_sse.EventSource(response).iter_sse() if event.data]


json_text = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
line = st.one_of(
    json_text.map(lambda text: f"data: {text}"),
    json_text.map(lambda text: f"data:{text}"),
    st.sampled_from([":", ": ping", "event: x", "id: 1", "retry: 10", "data", "data: ", "other: y", ""]),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(line, max_size=12), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_agrees_with_httpx_sse_however_it_is_split_good(lines, end, data):
    raw = (end.join(lines) + end + end).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    # Where data is empty the two differ: httpx-sse dispatches an event for a lone id or name.
    assert [(event.name, event.data.decode()) for event in decode(*pieces) if event.data] == oracle(raw)


@settings(deadline=None, max_examples=300)
@example(pieces=[b"\r\x00", b"\n", b"data", b"\n\n"])
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"\n", b"\r", b"data:", b"\n\n", b"\xef\xbb\xbf"]),
        max_size=20,
    )
)
def test_any_bytes_in_any_split_give_one_answer_ugly(pieces):
    assert decode(*pieces) == decode(b"".join(pieces))
