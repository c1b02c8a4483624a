"""llhttp, the parser of Node.js, as aiohttp builds it, without the rest of aiohttp.

Importing any part of aiohttp imports its client and server first: 6 MB and half of the gateway's start, for
code that is never called here. So the package is put in place without running its ``__init__``; whoever asks
it for more than the parser has that run then, and meets the package as it always is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

__all__ = [
    "HttpRequestParser",
    "HttpResponseParser",
    "HttpVersion11",
    "LineTooLong",
    "RawRequestMessage",
    "RawResponseMessage",
    "StreamReader",
]


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Let modules of a package be imported without its ``__init__`` as long as the context is open.

    It runs when anybody asks the package for more afterwards. Nothing is special about a package that is
    imported already, or not installed.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        yield
        return
    package, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = package
    try:
        yield
    except BaseException:
        del sys.modules[name]
        raise
    names, lock = vars(package), threading.RLock()
    path = names.pop("__path__")  # so that an import of another of its modules asks too

    def more(attribute: str) -> Any:
        # what looks through all modules (inspect, warnings) asks for names with underscores
        if attribute.startswith("__") and attribute not in {"__path__", "__version__", "__all__"}:
            raise AttributeError(attribute)
        with lock:  # other threads wait until all is there
            if "__path__" not in names:  # else it runs: what it lacks, it lacks for itself too
                names["__path__"] = path
                loader.exec_module(package)
            try:
                return names[attribute]
            except KeyError:
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from None

    names["__getattr__"] = more


if TYPE_CHECKING:
    from aiohttp.http import (
        HttpRequestParser,
        HttpResponseParser,
        HttpVersion11,
        RawRequestMessage,
        RawResponseMessage,
    )
    from aiohttp.http_exceptions import LineTooLong
    from aiohttp.streams import StreamReader
else:
    with alone("aiohttp"):
        from aiohttp.http_exceptions import LineTooLong
        from aiohttp.http_parser import (
            HttpRequestParser,
            HttpResponseParser,
            RawRequestMessage,
            RawResponseMessage,
        )
        from aiohttp.http_writer import HttpVersion11
        from aiohttp.streams import StreamReader
