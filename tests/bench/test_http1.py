"""The measuring connection's framing, at every way in which reads can be cut."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.bench.http1 import Body, Connection, Head

CHUNKED = Head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked")
PARTS = [b"data: {}\n\n", b"\r\n\r\n", b"0\r\n\r\n", "data: é\n\n".encode(), b"x" * 300]
FRAMED = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in PARTS) + b"0\r\n\r\n"


def test_chunks_are_found_at_every_split_good() -> None:
    for at in range(len(FRAMED)):
        body = Body(CHUNKED)
        assert body.feed(FRAMED[:at]) + body.feed(FRAMED[at:]) == b"".join(PARTS)
        assert body.done


@settings(deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1))
def test_chunks_are_found_in_reads_of_any_size_good(sizes: list[int]) -> None:
    body, found, at, turn = Body(CHUNKED), b"", 0, 0
    while at < len(FRAMED):
        size = sizes[turn % len(sizes)]
        found += body.feed(FRAMED[at : at + size])
        at, turn = at + size, turn + 1
    assert found == b"".join(PARTS)
    assert body.done


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_noise_ends_in_an_error_or_not_at_all_ugly(noise: bytes, at: int) -> None:
    body = Body(CHUNKED)
    try:
        body.feed(noise[:at])
        body.feed(noise[at:])
    except ValueError:
        return
    assert len(noise) >= 5 or not body.done


def test_a_length_and_no_length_good() -> None:
    body = Body(Head(b"HTTP/1.1 200 OK\r\nContent-Length: 5"))
    assert body.feed(b"abc") == b"abc"
    assert not body.done
    assert body.feed(b"defgh") == b"de"
    assert body.done
    endless = Body(Head(b"HTTP/1.1 200 OK"))
    assert endless.until_close
    assert endless.feed(b"abc") == b"abc"
    assert not endless.done


def test_a_head_that_is_not_http_bad() -> None:
    with pytest.raises(ValueError, match="not HTTP"):
        Head(b"SSH-2.0-OpenSSH")


class Wire(asyncio.Transport):
    """A transport that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = ""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


def exchanged(*reads: bytes, lost: bool = False) -> Connection:
    """Feed reads to a connection."""

    async def main() -> Connection:
        connection = Connection()
        connection.connection_made(Wire())
        connection.send(b"POST")
        for read in reads:
            connection.data_received(read)
        if lost:
            connection.connection_lost(None)
        return connection

    return asyncio.run(main())


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_every_read_keeps_its_own_moment_good() -> None:
    found = exchanged(HEAD + b"3\r\nabc\r\n", b"3\r\ndef\r\n", b"0\r\n\r\n")
    assert [data for _, data in found.reads] == [b"abc", b"def"]
    moments = [at for at, _ in found.reads]
    assert found.sent_ns <= moments[0] < moments[1] <= found.end_ns
    assert found.error is None


def test_a_head_in_pieces_good() -> None:
    whole = HEAD + b"3\r\nabc\r\n0\r\n\r\n"
    for at in range(1, len(whole)):
        found = exchanged(whole[:at], whole[at:])
        assert b"".join(data for _, data in found.reads) == b"abc"
        assert found.error is None


@pytest.mark.parametrize("reads", [(), (HEAD,), (HEAD + b"3\r\nabc\r\n",), (b"HTTP/1.1 200",)])
def test_a_connection_that_breaks_is_never_a_success_bad(reads: tuple[bytes, ...]) -> None:
    found = exchanged(*reads, lost=True)
    assert found.error == "the connection broke: the server closed it"
    assert found.end_ns


def test_broken_framing_ends_the_exchange_bad() -> None:
    found = exchanged(HEAD + b"zz\r\nabc")
    assert found.error is not None
    assert found.error.startswith("broken HTTP")


def test_pings_are_no_news_ugly() -> None:
    found = exchanged(HEAD + b"3\r\n:\n\n\r\n")
    assert found.idle_ns == found.sent_ns
    assert exchanged(HEAD + b"3\r\nabc\r\n").idle_ns > found.sent_ns
