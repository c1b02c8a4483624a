"""What is written at once, and what is left to the transport: in order, and nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
import uvloop

from orchestrator.gateway.sending import Sender
from tests.gateway.scripted import Call, answer, behind_gateway, in_loop, until
from tests.gateway.scripted import connected as client_of


class Kept(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.Transport, Kept, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        transport, protocol = await asyncio.get_running_loop().create_connection(Kept, sock=ours)
        yield transport, protocol, theirs
        transport.abort()
        await protocol.lost


def test_what_is_sent_is_there_within_the_same_turn_good() -> None:
    async def check() -> None:
        async with connected() as (transport, _, theirs):
            Sender(transport).send(b"an event")
            assert theirs.recv(99) == b"an event"  # nobody awaited anything

    uvloop.run(check())


def test_what_the_transport_holds_goes_first_good() -> None:
    async def check() -> None:
        async with connected() as (transport, _, theirs):
            transport.write(b"a head, ")
            Sender(transport).send(b"an event")
            assert await asyncio.get_running_loop().sock_recv(theirs, 99) == b"a head, an event"

    uvloop.run(check())


def test_more_than_the_socket_takes_arrives_whole_and_in_order_ugly() -> None:
    async def check() -> None:
        async with connected() as (transport, _, theirs):
            sender, sent, size = Sender(transport), hashlib.sha256(), 0
            for number in range(60):
                data = bytes([number]) * (1 + number * 1973 % 50_021)
                sender.send(data)
                sent.update(data)
                size += len(data)
            assert transport.get_write_buffer_size() > 0  # else this test shows nothing
            came, got = hashlib.sha256(), 0
            while got < size:
                data = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
                came.update(data)
                got += len(data)
            assert came.digest() == sent.digest()

    uvloop.run(check())


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_closed_transport_is_not_written_past_ugly(end: str) -> None:
    async def check() -> None:
        async with connected() as (transport, protocol, theirs):
            sender = Sender(transport)
            getattr(transport, end)()
            sender.send(b"late")
            await asyncio.shield(protocol.lost)
            assert theirs.recv(99) == b""

    uvloop.run(check())


def test_a_lost_connection_is_told_as_ever_bad() -> None:
    async def check() -> None:
        async with connected() as (transport, protocol, theirs):
            theirs.close()
            Sender(transport).send(b"nobody reads this")
            await asyncio.wait_for(asyncio.shield(protocol.lost), 20)

    uvloop.run(check())


def test_what_is_encrypted_is_never_sent_in_clear_ugly() -> None:
    def anonymous(side: int) -> ssl.SSLContext:
        """Both sides without a certificate, so that none has to be made."""
        context = ssl.SSLContext(side)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
        return context

    class Engine(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.got = asyncio.get_running_loop().create_future()

        def data_received(self, data: bytes) -> None:
            self.got.set_result(data)

    async def check() -> None:
        loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
        engine = Engine()
        accepted = loop.connect_accepted_socket(
            lambda: engine, theirs, ssl=anonymous(ssl.PROTOCOL_TLS_SERVER)
        )
        connecting = loop.create_connection(
            Kept, sock=ours, ssl=anonymous(ssl.PROTOCOL_TLS_CLIENT), server_hostname=""
        )
        (theirs_end, _), (transport, _) = await asyncio.gather(accepted, connecting)
        await until(lambda: not transport.get_write_buffer_size())  # what the handshake left
        Sender(transport).send(b"a key")
        await asyncio.wait((engine.got, engine.lost), return_when=asyncio.FIRST_COMPLETED)
        theirs_end.abort()
        transport.abort()
        assert engine.got.done(), engine.lost
        assert engine.got.result() == b"a key"

    async def bounded() -> None:
        await asyncio.wait_for(check(), 20)

    uvloop.run(bounded())


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
@in_loop
async def test_who_reads_slowly_gets_all_of_a_large_answer_good(headers: str) -> None:
    size = 4 * 2**20  # the most that is held, and then sent in one piece

    async def script(call: Call) -> None:
        await call.send(answer(b'"%b"' % (b"x" * (size - 2))))

    async with behind_gateway(script) as setup:
        assert setup.gateway._server is not None
        with socket.socket(fileno=os.dup(setup.gateway._server.sockets[0].fileno())) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)  # the kernel shall not take all
        async with client_of(setup.port, limit=2**12) as client:
            client.ask({"model": "gemma"}, headers=headers)
            assert (await client.head()).status == 200
            (served,) = setup.gateway._clients
            waits, got, times = served._transport.get_write_buffer_size, 0, 0
            while before := waits():
                while waits() == before:
                    got += len(await client.reader.read(2**16))
                if waits():
                    served.expire()  # its time is over, and it has read something
                    times += 1
            assert times > 1  # else this test shows nothing
            await client.reader.readexactly(size - got)
