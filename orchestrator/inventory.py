"""Which models are on this machine: `scan(places)` gives an `Inventory`, fast enough to be asked any time.

    inventory_files     folders -> files that may be models; loops, links and locked doors survived
    inventory_read      one of them -> Entry
    inventory_cache     what was read before, as long as nothing changed
    inventory_engines   which engines serve which form

What can't be read is listed with its fault, never left out in silence.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from orchestrator.discovery import family
from orchestrator.gguf_known import Known
from orchestrator.home import cache_folder
from orchestrator.inventory_cache import Cache
from orchestrator.inventory_engines import serving
from orchestrator.inventory_files import Trouble, walk
from orchestrator.inventory_read import Entry, entry
from orchestrator.model_files import default_cache
from orchestrator.model_hub_store import Hub

__all__ = ["SORTS", "Entry", "Inventory", "Trouble", "cache_file", "places", "scan", "select"]

Sort = Literal["path", "name", "architecture", "parameters", "size", "context", "bits"]
SORTS: Final[tuple[Sort, ...]] = ("path", "name", "architecture", "parameters", "size", "context", "bits")


@dataclass(frozen=True, slots=True)
class Inventory:
    """What was found.

    Attributes:
        places: the folders that were searched.
        entries: models, and what belongs to them, by path.
        troubles: folders that could not be searched.
        read: entries that were read now; the others came from the cache.

    """

    places: tuple[Path, ...]
    entries: tuple[Entry, ...]
    troubles: tuple[Trouble, ...]
    read: int


def places(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the folders where models usually are, those that exist, the most likely first.

    ``ROCM_MODEL_DIR``, llama.cpp's cache, Hugging Face's, LM Studio's, and where we put packaged models.
    """
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    cache = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else home / ".cache"

    def named(variable: str, otherwise: Path) -> Path:
        value = environ.get(variable)
        return (
            Path(value.replace("~", str(home), 1) if value.startswith("~") else value) if value else otherwise
        )

    folders = [
        named("LLAMA_CACHE", cache / "llama.cpp"),
        Hub.of(environ).cache,
        home / ".lmstudio" / "models",
        home / ".cache" / "lm-studio" / "models",
        default_cache(environ),
    ]
    if environ.get("ROCM_MODEL_DIR"):
        folders.insert(0, named("ROCM_MODEL_DIR", home))
    return tuple(dict.fromkeys(folder for folder in folders if _is_there(folder)))


def _is_there(folder: Path) -> bool:
    try:
        return stat.S_ISDIR(folder.stat().st_mode)
    except PermissionError:
        return True  # as far as can be told; who searches it says so
    except OSError:
        return False


def cache_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where what was read is remembered: ``$XDG_CACHE_HOME/orchestrator/inventory.json``."""
    return cache_folder(environ) / "inventory.json"


def scan(folders: Iterable[Path], *, cache: Path | None = None) -> Inventory:
    """Find every model in and below some folders.

    Args:
        folders: where to look; one that isn't there is a trouble.
        cache: a file that remembers what was read, with ``engines.json`` beside it; None reads everything
            anew. A broken one is ignored.

    """
    roots = tuple(folders)
    remembered = Cache(cache)
    troubles: list[Trouble] = []
    known = Known()
    found: list[Entry] = []
    read = 0
    for candidate in walk(roots, troubles.append):
        entered = remembered.get(candidate)
        if entered is None:
            entered = entry(candidate, known)
            read += 1
        remembered.put(candidate, entered)
        found.append(entered)
    remembered.save(roots)
    entries = _attach(sorted(found, key=lambda each: each.path))
    if any(each.kind == "model" for each in entries):
        by_format = serving(cache and cache.with_name("engines.json"))
        entries = tuple(
            replace(each, engines=by_format.get(each.format, ())) if each.kind == "model" else each
            for each in entries
        )
    return Inventory(roots, entries, tuple(troubles), read)


def select(
    entries: Iterable[Entry],
    *,
    sort: Sort = "path",
    reverse: bool = False,
    words: Sequence[str] = (),
    kinds: Sequence[str] = (),
    engine: str | None = None,
) -> tuple[Entry, ...]:
    """Return the entries that match, in order.

    Args:
        entries: of an inventory.
        sort: by what; what is unknown comes last, equals by path.
        reverse: largest or last first.
        words: each has to be in the path, the name, the architecture or the quantisation; case is ignored.
        kinds: keeps these kinds only.
        engine: keeps what this engine can serve, or one of this family: ``vllm`` means any vLLM.

    """

    def matches(each: Entry) -> bool:
        text = " ".join(filter(None, (each.path, each.name, each.architecture, each.quantisation))).lower()
        return (
            all(word.lower() in text for word in words)
            and (not kinds or each.kind in kinds)
            and (engine is None or engine in each.engines or family(engine) in each.engines)
        )

    kept = sorted(filter(matches, entries), key=lambda each: each.path)
    if sort == "path":
        return tuple(reversed(kept) if reverse else kept)
    key = "bits_per_weight" if sort == "bits" else sort
    told = [each for each in kept if getattr(each, key) is not None]
    untold = [each for each in kept if getattr(each, key) is None]
    told.sort(key=lambda each: _ordered(getattr(each, key)), reverse=reverse)
    return (*told, *untold)


def _ordered(value: str | float) -> tuple[float, str]:
    return (0, value.lower()) if isinstance(value, str) else (value, "")


def _attach(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Name beside each GGUF model the projectors in its folder that were made for its width."""
    projectors = defaultdict(list)
    for each in entries:
        if each.kind == "mmproj":
            projectors[Path(each.path).parent].append(each)
    return tuple(
        replace(
            each,
            mmproj=tuple(
                other.path
                for other in projectors.get(Path(each.path).parent, ())
                if not (other.width and each.width) or other.width == each.width
            ),
        )
        if each.kind == "model" and each.format == "gguf"
        else each
        for each in entries
    )
