"""A raw TCP server that answers each request from a script of bytes and deeds; it knows no HTTP library."""

import contextlib
import json
import socket
import struct
import threading

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(data, size=None):
    """Frame a body, in pieces of `size` bytes or in one."""
    size = size or max(1, len(data))
    return b"".join(
        b"%x\r\n%s\r\n" % (len(data[at : at + size]), data[at : at + size])
        for at in range(0, len(data), size)
    )


def reply(status, body, kind="application/json"):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        kind.encode(),
        len(body),
        body,
    )


def event(**chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(*words, finish="stop"):
    """A whole body: a chunk a word, finish, usage and [DONE]."""
    events = [event(choices=[{"index": 0, "text": word, "finish_reason": None}]) for word in words]
    events.append(event(choices=[{"index": 0, "text": "", "finish_reason": finish}]))
    events.append(event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": len(words)}))
    return b"".join([*events, b"data: [DONE]\n\n"])


class HoldUntilClosed:
    """Wait until the client goes; the server's `gone` is then set."""


class Reset:
    """Break the connection with RST."""


class Scripted:
    """Answers connection after connection. A script is bytes, events to wait for, and the deeds above.

    Attributes:
        requests: (head, parsed body) of every request, in order.
        gone: set when a client left during `HoldUntilClosed`.
        reached: set when a script got to a hold or an event.

    """

    def __init__(self, script, port=0):
        self.script = script
        self.requests = []
        self.gone = threading.Event()
        self.reached = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._open.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection:
            raw = b""
            while b"\r\n\r\n" not in raw:
                raw += self._more(connection)
            head, _, body = raw.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            while lengths and len(body) < int(lengths[0].split(b":")[1]):
                body += self._more(connection)
            self.requests.append((head.decode(), json.loads(body) if body else None))
            script = self.script(head.decode(), len(self.requests)) if callable(self.script) else self.script
            for step in script:
                if isinstance(step, bytes):
                    connection.sendall(step)
                elif isinstance(step, threading.Event):
                    self.reached.set()
                    step.wait(30)
                elif step is Reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif step is HoldUntilClosed:
                    self.reached.set()
                    with contextlib.suppress(ConnectionError):
                        while connection.recv(1000):
                            pass
                    self.gone.set()

    @staticmethod
    def _more(connection):
        data = connection.recv(65536)
        if not data:
            raise ConnectionAbortedError
        return data

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
