"""What one client, and all of them together, may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take; sizes in bytes, times in seconds.

    Attributes:
        body: the largest body of a request.
        bodies: all bodies together that are held at once.
        clients: connections at once.
        idle: a connection between two requests.
        read: a request's head, and the pause between two pieces of its body.
        write: a client that reads nothing of what waits for it.
        linger: a refused client, to read the refusal before its unread body resets the connection.

    """

    body: int = 32 * 2**20
    bodies: int = 256 * 2**20
    clients: int = 1024
    idle: float = 75.0
    read: float = 30.0
    write: float = 60.0
    linger: float = 2.0
