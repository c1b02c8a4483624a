"""A hub that speaks the API of Hugging Face's, for the real ``huggingface_hub`` to talk to.

Two servers as there: the hub itself, which knows who may read what, and the storage elsewhere to which it
sends those who ask for a large file, and which must never see a token. A test puts repositories in and says
what goes wrong; `requests` holds what was asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

LARGE = (".gguf", ".safetensors")  # what is in LFS


class Request(NamedTuple):
    """What was asked: `place` is ``hub`` or ``storage``."""

    place: str
    method: str
    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Repo:
    """A repository at one commit."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: bool = False
    private: bool = False
    sizes: dict[str, int] = field(default_factory=dict)  # lies about how large files are

    def digest(self, path: str) -> str:
        data = self.files[path]
        if path.endswith(LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def sibling(self, path: str) -> dict[str, Any]:
        size = self.sizes.get(path, len(self.files[path]))
        told: dict[str, Any] = {"rfilename": path, "size": size, "blobId": "b" * 40}
        if path.endswith(LARGE):
            told["lfs"] = {"sha256": self.digest(path), "size": size, "pointerSize": 134}
        else:
            told["blobId"] = self.digest(path)
        return told


class Hub:
    """The hub and its storage, and how they misbehave.

    Attributes:
        repos: by name.
        token: the one that opens gated and private repositories.
        status: what every answer's status is, None for the true one.
        cuts: after so many bytes of a content the connection breaks, one number for each request.
        ranges: whether a part of a content may be asked for.
        damaged: paths of which other bytes come than should.
        hold: a content stops in its middle until this is set.
        holding: set once one has stopped.

    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.token = "hf_right"
        self.status: int | None = None
        self.cuts: list[int] = []
        self.ranges = True
        self.damaged: set[str] = set()
        self.hold: threading.Event | None = None
        self.holding = threading.Event()
        self.requests: list[Request] = []
        self.urls: dict[str, str] = {}

    def contents(self) -> list[Request]:
        """Return the requests for large files' contents."""
        return [each for each in self.requests if each.place == "storage"]


@contextmanager
def served() -> Iterator[Hub]:
    """Give a hub that answers until the end of the context."""
    hub = Hub()
    servers = {
        place: ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, place)) for place in ("hub", "storage")
    }
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers.values()]
    for place, server in servers.items():
        server.daemon_threads = True
        hub.urls[place] = f"http://127.0.0.1:{server.server_port}"
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        if hub.hold:
            hub.hold.set()
        for server in servers.values():
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


def _handler(hub: Hub, place: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            headers = {name.lower(): value for name, value in self.headers.items()}
            hub.requests.append(Request(place, self.command, path, headers))
            if hub.status:
                self.say(hub.status)
            elif place == "storage":
                _, owner, name, file = path.split("/", 3)
                self.content(hub.repos[f"{owner}/{name}"], file)
            elif asked := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/main)?", path):
                self.about(asked[1])
            elif asked := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.resolve(asked[1], asked[2], asked[3])
            else:
                self.say(404)

        do_HEAD = do_GET  # noqa: N815  # so the base class calls it

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def known(self, name: str, *, reading: bool) -> Repo | None:
            """Return a repository, or say why not, as the hub says it."""
            repo = hub.repos.get(name)
            authorised = self.headers.get("Authorization") == f"Bearer {hub.token}"
            if repo is None or (repo.private and not authorised):
                self.say(401, {"X-Error-Code": "RepoNotFound"})
                return None
            if reading and repo.gated and not authorised:
                self.say(403 if self.headers.get("Authorization") else 401, {"X-Error-Code": "GatedRepo"})
                return None
            return repo

        def about(self, name: str) -> None:
            if repo := self.known(name, reading=False):
                told = {
                    "id": name,
                    "sha": repo.commit,
                    "siblings": [repo.sibling(path) for path in repo.files],
                }
                self.say(200, body=json.dumps(told).encode())

        def resolve(self, name: str, revision: str, path: str) -> None:
            repo = self.known(name, reading=True)
            if repo is None:
                return
            if revision not in (repo.commit, "main") or path not in repo.files:
                self.say(404, {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{repo.digest(path)}"'}
            if not path.endswith(LARGE):
                self.content(repo, path, headers)
                return
            headers["X-Linked-Etag"] = headers["ETag"]
            headers["X-Linked-Size"] = str(len(repo.files[path]))
            self.say(302, {**headers, "Location": f"{hub.urls['storage']}/{name}/{path}"})

        def content(self, repo: Repo, path: str, headers: dict[str, str] | None = None) -> None:
            data = repo.files[path]
            if path in hub.damaged:
                data = bytes(byte ^ 1 for byte in data)
            begin = 0
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if asked and hub.ranges:
                begin = int(asked[1])
            part = data[begin:]
            self.send_response(206 if asked and hub.ranges else 200)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = hub.cuts.pop(0) if hub.cuts and path.endswith(LARGE) else None
            middle = len(part) // 2 if cut is None else cut
            self.write(part[:middle])
            if hub.hold and path.endswith(LARGE):
                hub.holding.set()
                hub.hold.wait()
            if cut is not None:
                self.close_connection = True
                return
            self.write(part[middle:])

        def write(self, data: bytes) -> None:
            try:
                self.wfile.write(data)
                self.wfile.flush()
            except OSError:  # who asked is gone
                self.close_connection = True

        def say(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.write(body)

    return Handler
