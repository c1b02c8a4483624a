"""Where models of the hub are on this machine: Hugging Face's own cache, so that other tools share them.

Its layout is the documented one:

    HF_HUB_CACHE/models--OWNER--REPO/
        refs/main                      the commit
        snapshots/COMMIT/PATH          links to blobs
        blobs/DIGEST                   contents, whole and verified
        blobs/DIGEST.incomplete        what has arrived of one
    HF_HUB_CACHE/.locks/models--OWNER--REPO/DIGEST.lock

Beside it, in our cache, the list of the files that a repository has, as it was when it was last asked for:
with it a model that is here is found again without asking the hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.home import cache_folder, expand_home
from orchestrator.model_hub_choice import File, Listing

ENDPOINT = "https://huggingface.co"

_TRUE = {"1", "ON", "YES", "TRUE"}
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Hub:
    """Which hub is asked, as whom, and where what comes from it is kept."""

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool
    cache: Path
    remembered: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Hub:
        """Read the variables that Hugging Face's own tools read, by their rules."""

        def folder(text: str) -> Path:
            return Path(expand_home(text, environ))

        cache = folder(environ.get("XDG_CACHE_HOME") or "~/.cache")
        named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
        hf_home = environ.get("HF_HOME")
        return cls(
            endpoint=(environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/"),
            token=environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or None,
            offline=any(
                environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
            ),
            cache=folder(named) if named else (folder(hf_home) if hf_home else cache / "huggingface") / "hub",
            remembered=cache_folder(environ) / "hub",
        )

    def store(self, repo: str) -> Store:
        """Return the place of a repository."""
        return Store(self, repo)


@dataclass(frozen=True, slots=True)
class Store:
    """One repository's place on this machine."""

    hub: Hub
    repo: str

    @property
    def _name(self) -> str:
        return "--".join(("models", *self.repo.split("/")))

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache."""
        return self.hub.cache / self._name

    def lock(self, file: File) -> Path:
        """Return the file that is locked while a blob is written, by Hugging Face's own tools too."""
        return self.hub.cache / ".locks" / self._name / f"{file.digest}.lock"

    def blob(self, file: File) -> Path:
        """Return where the content of a file is, or will be."""
        return self.folder / "blobs" / file.digest

    def partial(self, file: File) -> Path:
        """Return where what has arrived of a file is."""
        return self.folder / "blobs" / f"{file.digest}.incomplete"

    def arrived(self, file: File) -> int:
        """Return how many bytes of a file are here."""
        for path in (self.blob(file), self.partial(file)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, file.size)
        return 0

    def place(self, listing: Listing, file: File | None = None) -> Path:
        """Return the path under which a file, or the whole commit, is found."""
        snapshot = self.folder / "snapshots" / listing.commit
        return snapshot / file.path if file else snapshot

    def missing(self, listing: Listing, files: Iterable[File]) -> tuple[File, ...]:
        """Return those files that are not here."""
        return tuple(file for file in files if not self.place(listing, file).is_file())

    def publish(self, listing: Listing, file: File) -> None:
        """Let a blob that is whole be found under its name."""
        place, blob = self.place(listing, file), self.blob(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_file():
            return
        place.unlink(missing_ok=True)  # a link to a blob that somebody removed
        try:
            place.symlink_to(os.path.relpath(blob, place.parent))
        except FileExistsError:
            pass  # another process was faster
        except OSError:
            blob.replace(place)  # a file system without links

    def point(self, listing: Listing) -> None:
        """Say which commit the main branch is at, for the tools that look for it by that name."""
        _write(self.folder / "refs" / "main", listing.commit)

    # -- lists of files ---------------------------------------------------------------------------------
    @property
    def _list(self) -> Path:
        return self.hub.remembered / f"{self._name}.json"

    def remember(self, listing: Listing) -> None:
        """Keep a list for the next time; without a place for it, the hub is asked again then."""
        files = [[file.path, file.size, file.digest] for file in listing.files]
        with contextlib.suppress(OSError):
            _write(
                self._list,
                json.dumps({"endpoint": self.hub.endpoint, "commit": listing.commit, "files": files}),
            )

    def recall(self) -> Listing | None:
        """Return the list that was kept, None without a sound one of this hub."""
        try:
            kept = json.loads(self._list.read_bytes())
            files = tuple(File(str(path), int(size), str(digest)) for path, size, digest in kept["files"])
            listing = Listing(self.repo, str(kept["commit"]), files)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return listing if kept.get("endpoint") == self.hub.endpoint and sound(listing) else None

    def found(self) -> Listing | None:
        """Return what another tool has left of the main branch, None when there is nothing."""
        try:
            commit = (self.folder / "refs" / "main").read_text("ascii").strip()
            folder = self.folder / "snapshots" / commit
            files = tuple(
                File(str(path.relative_to(folder)), path.stat().st_size, path.resolve().name)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            )
        except (OSError, ValueError):
            return None
        return Listing(self.repo, commit, files) if files else None


def sound(listing: Listing) -> bool:
    """Say whether what a hub told can be used as names of files: nothing leads out of the cache."""
    return bool(_DIGEST.fullmatch(listing.commit)) and all(
        _DIGEST.fullmatch(file.digest)
        and file.size >= 0
        and file.path
        and not file.path.startswith("/")
        and not {"", ".", ".."} & set(file.path.split("/"))
        and "\0" not in file.path
        for file in listing.files
    )


def _write(path: Path, text: str) -> None:
    """Write a small file at once: whoever reads it finds the old or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
