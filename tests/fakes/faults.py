"""What the fake engine does wrong as a process: exits, children that stay, floods of log, busy loading."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

LIFE_OF_A_CHILD = 300  # seconds; nothing outlives a test run by more than this
_started = time.monotonic()


def log(text: str, level: str = "I", *, jsonl: bool = False) -> None:
    """Write one line to the log in the real engine's form."""
    if jsonl:
        import json

        name = {"I": "info", "W": "warning", "E": "error"}[level]
        line = json.dumps(
            {"type": "log", "time": int(time.monotonic() * 1e6), "level": name, "msg": text + "\n"}
        )
        raw(line.encode() + b"\n", 1)
        return
    micro = int((time.monotonic() - _started) * 1e6)
    minutes, micro = divmod(micro, 60_000_000)
    clock = f"{minutes}.{micro // 1_000_000:02}.{micro // 1000 % 1000:03}.{micro % 1000:03}"
    raw(f"{clock} {level} {text}\n".encode())


def raw(data: bytes, descriptor: int = 2) -> None:
    """Write all of `data`, waiting for a slow reader as a real engine's print does."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except (BrokenPipeError, OSError):
        return  # nobody reads any more


def end(code: int) -> NoReturn:
    """End at once, nothing flushed: with an exit code, or by a signal if negative."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


def spawn(kind: str, keep: list[int]) -> int:
    """Fork a process that stays, and return its pid.

    `kind` joins words with +: plain; session (setsid); double (forked twice, so its parent is init or a
    subreaper); stubborn (ignores TERM, INT and HUP); port or sockets (keeps the descriptors in `keep`).
    """
    words = set(kind.split("+"))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        pid_of_child = int(os.read(reader, 32))
        os.close(reader)
        if "double" in words:
            os.waitpid(pid, 0)
        return pid_of_child
    try:
        signal.set_wakeup_fd(-1)
        deaf = signal.SIG_IGN if "stubborn" in words else signal.SIG_DFL
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, deaf)
        if "session" in words:
            os.setsid()
        if "double" in words and os.fork():
            os._exit(0)
        os.write(writer, str(os.getpid()).encode())
        first = 3
        for descriptor in sorted(keep if words & {"port", "sockets"} else []):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, 4096)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIFE_OF_A_CHILD)
        while True:
            signal.pause()
    finally:
        os._exit(70)


def ballast(size: int) -> bytearray:
    """Return `size` bytes that are really resident."""
    block = bytearray(size)
    block[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * len(range(0, size, os.sysconf("SC_PAGE_SIZE")))
    return block


def flood(rate: int, kind: str, interval: float) -> bytes:
    """Return what `interval` seconds of flood are: `rate` bytes a second."""
    size = max(1, int(rate * interval))
    line = {
        "lines": b"0.00.000.000 I slot print_timing: " + b"noise " * 15 + b"\n",
        "long": b"progress " * 12,
        "binary": b"\xff\xfe\x80broken \xc3\x28 \xe2\x82 text\n",
    }[kind]
    return (line * (size // len(line) + 1))[:size] if kind == "long" else line * max(1, size // len(line))


def work(kind: str, model: str) -> Iterator[None]:
    """Burn a slice of CPU, or read a slice of the model, at every step; idle does nothing."""
    if kind == "read":
        path = model if os.path.isfile(model) else sys.executable
        while True:
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    yield
    while True:
        until = time.process_time() + (0.015 if kind == "cpu" else 0)
        while time.process_time() < until:
            pass
        yield
