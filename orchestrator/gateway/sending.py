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
        transport: a plain one over a socket.

    """

    __slots__ = ("_fd", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._fd: int = transport.get_extra_info("socket").fileno()

    def send(self, data: bytes) -> None:
        """Write at once where nothing waits; the transport takes what is left, and tells when it is lost."""
        if not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            try:
                sent = os.write(self._fd, data)
            except OSError:  # it can take no more now, or is lost: either is the transport's to find out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        self._transport.write(data)
