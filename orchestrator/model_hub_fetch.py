"""Talks to the hub, through ``huggingface_hub``: what a repository holds, and getting files from it.

That library starts a download that was interrupted anew, and trusts what arrives by plain HTTP by its length
alone. Here what has arrived is kept, whatever ends the process, and goes on where it stopped; a file gets
its name once its checksum is the one that the hub tells. Requests, redirects and tokens are the library's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from orchestrator.errors import ModelError
from orchestrator.model_hub_choice import File, Listing
from orchestrator.model_hub_faults import told
from orchestrator.model_hub_store import Hub, sound

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Progress = Callable[[int, int], None]  # bytes done, bytes in total

LARGEST = 50_000_000_000  # bytes; larger files are given out by Xet's protocol only
_TIMEOUT = 10.0  # seconds for an answer
_POLL = 0.1  # seconds; a lock can't be awaited together with progress
_TRIES = 5  # in a row without a byte
_PAUSE = 0.25  # seconds before the first of them


def listing(hub: Hub, repo: str) -> Listing:
    """Ask what a repository's main branch holds.

    Raises:
        HubUnreachable: it can't be asked.
        ModelError: there is no such repository, or not for us.

    """
    with told(hub, repo):
        info = _api(hub).model_info(repo, files_metadata=True, timeout=_TIMEOUT)
        files = tuple(
            File(
                file.rfilename,
                -1 if file.size is None else file.size,
                (file.lfs.sha256 if file.lfs else file.blob_id) or "",
            )
            for file in info.siblings or ()
        )
        found = Listing(repo, info.sha or "", files)
        if not sound(found):
            raise ModelError(
                f"model: hf:{repo}: {hub.endpoint} does not tell its files' names, sizes and checksums",
                advice="it is no hub, or a mirror that leaves them out; see HF_ENDPOINT",
            )
        return found


@dataclass(frozen=True, slots=True)
class Download:
    """Files of a repository that are to be had and are not here.

    Attributes:
        hub: where they are.
        listing: of the repository.
        files: what is missing.

    """

    hub: Hub
    listing: Listing
    files: tuple[File, ...]

    remote: ClassVar[bool] = True
    doing: ClassVar[str] = "downloading"

    @property
    def size(self) -> int:
        """Bytes that still have to arrive."""
        store = self.hub.store(self.listing.repo)
        return sum(file.size - store.arrived(file) for file in self.files)

    def __str__(self) -> str:
        """Return how much it is, as people read it."""
        count, size = len(self.files), self.size
        told = f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
        return f"{count} file{'s' if count > 1 else ''}, {told}"

    def fetch(self, progress: Progress | None = None) -> None:
        """Get the files, going on where an interrupted attempt stopped; harmless when they are here.

        Safe when several processes do it at once: each file is got by one, the others wait for it.

        Args:
            progress: called with bytes done and in total; what it raises calls the work off.

        Raises:
            HubUnreachable: the network is down, or offline mode is on.
            ModelError: the hub refuses, there is too little space, or what it gives is not what it tells.

        """
        store, total, done = self.hub.store(self.listing.repo), sum(file.size for file in self.files), 0
        with told(self.hub, self.listing.repo):
            self._make_room()
            for file in self.files:
                _Fetching(self, file, progress or _ignore, done, total).run()
                done += file.size
            store.point(self.listing)

    def _make_room(self) -> None:
        """Raise when the disk can't hold what is missing."""
        folder = self.hub.cache
        while not folder.exists():
            folder = folder.parent
        needed, free = self.size, shutil.disk_usage(folder).free
        if needed > free:
            raise ModelError(
                f"model: hf:{self.listing.repo} needs {needed >> 20} MiB in {self.hub.cache}, "
                f"{free >> 20} MiB are free",
                path=self.hub.cache,
                advice="make room (`hf cache ls` shows what is there), or set HF_HUB_CACHE to another folder",
            )


class _Fetching:
    """One file on its way."""

    def __init__(self, download: Download, file: File, progress: Progress, before: int, total: int) -> None:
        self.hub, self.listing, self.file = download.hub, download.listing, file
        self.store = download.hub.store(download.listing.repo)
        self.blob, self.partial = self.store.blob(file), self.store.partial(file)
        self.report = lambda done: progress(before + min(done, file.size), total)

    def run(self) -> None:
        """Get it and let it be found."""
        if self.file.size > LARGEST:
            self._by_xet()
        else:
            self.blob.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if not self.blob.is_file():
                    self._by_http()
                self.store.publish(self.listing, self.file)
        self.report(self.file.size)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that Hugging Face's tools hold too; the kernel lets go of it however we end."""
        from filelock import FileLock, Timeout

        path = self.store.lock(self.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=0o664)
        while True:
            try:
                lock.acquire(timeout=_POLL, poll_interval=_POLL / 2)
                break
            except Timeout:
                self.report(self.store.arrived(self.file))
        try:
            yield
        finally:
            lock.release()

    def _by_http(self) -> None:
        """Write what is missing behind what has arrived, and verify the whole."""
        while True:
            with self.partial.open("ab") as out:
                begin = out.tell()
                if begin > self.file.size:
                    begin = _empty(out)
                self._stream(out)
                out.flush()
                os.fsync(out.fileno())
            digest = _digest(self.partial, self.file)
            if digest == self.file.digest:
                self.partial.replace(self.blob)
                return
            self.partial.unlink()
            if begin == 0:  # else what was here before is to blame, as after a power cut
                raise ModelError(
                    f"model: hf:{self.listing.repo}: {self.file.path} arrived with the checksum {digest}, "
                    f"should be {self.file.digest}",
                    advice="try again; if it stays so, a proxy or a mirror on the way changes it",
                )

    def _stream(self, out: BinaryIO) -> None:
        """Append what is missing; a connection that breaks is taken up again as long as anything arrives."""
        import httpx2

        failures, done = 0, out.tell()
        while done < self.file.size:
            try:
                self._append(out)
                if out.tell() <= done:
                    raise httpx2.RemoteProtocolError("the answer ended before anything came")
            except httpx2.TransportError:
                failures = 0 if out.tell() > done else failures + 1
                if failures == _TRIES:
                    raise
                time.sleep(_PAUSE * 2**failures)
            done = out.tell()

    def _append(self, out: BinaryIO) -> None:
        """Append what one response brings."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        begin = out.tell()
        listing, hub = self.listing, self.hub
        # not the place that it redirects to, which is good for an hour only: every attempt asks anew
        url = hf_hub_url(listing.repo, self.file.path, revision=listing.commit, endpoint=hub.endpoint)
        headers = {
            **build_hf_headers(token=hub.token),
            "Accept-Encoding": "identity",
            "Range": f"bytes={begin}-",
        }
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=_TIMEOUT, retry_on_exceptions=()
        ) as response:
            hf_raise_for_status(response)
            if begin and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                begin = _empty(out)
            self.report(begin)
            for block in response.iter_bytes():
                # more than was promised is left out: the checksum tells whether it is the same file
                begin += out.write(block[: self.file.size - begin])
                self.report(begin)

    def _by_xet(self) -> None:
        """Leave to the library what is too large for plain HTTP; it locks and verifies, but never resumes."""
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self.listing.repo,
            self.file.path,
            revision=self.listing.commit,
            cache_dir=self.hub.cache,
            endpoint=self.hub.endpoint,
            token=self.hub.token,
            tqdm_class=_bar(self.report),
        )


def _ignore(_done: int, _total: int) -> None:
    pass


def _empty(out: BinaryIO) -> int:
    out.seek(0)
    return out.truncate()


def _digest(path: Path, file: File) -> str:
    """Return the checksum of the kind that a file's digest is: SHA-256, or git's of a blob."""
    if len(file.digest) == 64:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    content_of_small = path.read_bytes()  # git keeps large ones elsewhere
    return hashlib.sha1(
        b"blob %d\0" % len(content_of_small) + content_of_small, usedforsecurity=False
    ).hexdigest()


def _api(hub: Hub) -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub.endpoint, token=hub.token, library_name="inference-orchestrator")


def _bar(report: Callable[[int], None]) -> type[Any]:
    """Return what the library takes for a progress bar: it draws nothing and tells what is done."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            report(int(self.n))

    return Bar
