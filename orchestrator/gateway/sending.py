"""Writing to a connection now, rather than at the end of the loop's turn.

uvloop gathers what is written and sends it once everything that has come in was read. With 64 streams whose
events come together that is most of the delay that the gateway adds to an event.
"""

from __future__ import annotations

import asyncio
import os


class Sender:
    """Writes to one transport, in order.

    Args:
        transport: one over a socket; where it encrypts, all is left to it.

    """

    __slots__ = ("_fd", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        plain = transport.get_extra_info("sslcontext") is None
        self._fd: int | None = transport.get_extra_info("socket").fileno() if plain else None

    def send(self, data: bytes) -> None:
        """Write at once where nothing waits; the transport takes what is left, and tells when it is lost."""
        fd, transport = self._fd, self._transport
        if fd is not None and not transport.is_closing() and not transport.get_write_buffer_size():
            try:
                sent = os.write(fd, data)
            except OSError:  # it can take no more now, or is lost: either is the transport's to find out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)
