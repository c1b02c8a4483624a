"""The prompts of a round, made from a seed and of exact length in tokens.

Prompts are lists of token ids, so that every engine gets the same tokens whatever its tokeniser does to text.
They begin with a nonce, so that no prefix cache helps, unless the workload measures one on purpose. A server
without a tokeniser gets text instead; its lengths are then approximate, and the gate still demands that both
arms count the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.bench.frames import read_at_most
from orchestrator.bench.values import Workload
from orchestrator.bench.workload import WorkloadError

LARGEST_FILE = 1 << 30  # bytes of prompts; all of ShareGPT is 0.6 GiB
NONCE = 4  # tokens; the first differs between nearly all prompts, all four between any two
TEXT = """The harbour lies quiet before the boats come in, and along the wall old men mend their nets while
children count gulls. A baker carries warm bread across the square; the clock above the town hall is four
minutes slow, as it has been since the flood of ninety-two. Nobody minds. In the library a student reads about
glaciers, how they carve valleys, carry boulders over hundreds of miles and leave them where no river could.
She writes: density 917 kg per cubic metre, flow a few metres each year, sometimes far more. Outside it begins
to rain, softly at first, then in long grey sheets that hide the hills. The ferry sounds its horn twice. Two
engineers argue about the new bridge, its cables, its cost, whether steel from the north can arrive by March.
One draws a curve on a napkin, the other laughs and orders tea. When the lamps are lit the market women pack
apples, onions, honey and wool into their vans, and the last tram climbs slowly towards the upper town."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be made: its prompt, and how many tokens are wanted."""

    prompt: list[int] | str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt from a file, as text and, where there is a tokeniser, as ids."""

    text: str
    output_tokens: int | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Material:
    """What prompts are made of.

    Attributes:
        ids: the tokens of `TEXT`, or None when the server can't tokenise.
        entries: the prompts of the workload's file.

    """

    ids: tuple[int, ...] | None
    entries: tuple[Entry, ...] = ()


def asks(workload: Workload, material: Material, seed: int, key: str) -> list[Ask]:
    """Return the requests of one round.

    Args:
        workload: what to ask.
        material: what prompts are made of.
        seed: the run's seed.
        key: names the round; the same key gives the same prompts.

    """
    made = []
    for index in range(workload.requests):
        chance = random.Random(f"{seed}/{workload.name}/{key}/{index}")  # noqa: S311 - not a secret
        wanted = workload.output_tokens[index % len(workload.output_tokens)]
        if material.entries:
            entry = material.entries[index % len(material.entries)]
            made.append(Ask(_from_entry(entry, material, chance), entry.output_tokens or wanted))
            continue
        length = workload.prompt_tokens[index % len(workload.prompt_tokens)]
        if material.ids is None:
            made.append(Ask(_words(length, chance), wanted))
            continue
        shared = _stretch(material.ids, 0, workload.prefix_tokens)
        nonce = [chance.choice(material.ids) for _ in range(NONCE)]
        start = chance.randrange(len(material.ids))
        rest = _stretch(material.ids, start, length - len(shared) - NONCE)
        made.append(Ask([*shared, *nonce, *rest], wanted))
    return made


def _stretch(ids: Sequence[int], start: int, length: int) -> list[int]:
    return [ids[(start + at) % len(ids)] for at in range(max(0, length))]


def _words(length: int, chance: random.Random) -> str:
    words = TEXT.split()
    start = chance.randrange(len(words))
    body = [words[(start + at) % len(words)] for at in range(max(1, length * 3 // 4))]
    return " ".join([f"{chance.getrandbits(48):012x}", *body])


def _from_entry(entry: Entry, material: Material, chance: random.Random) -> list[int] | str:
    if entry.ids is None or material.ids is None:
        return f"{chance.getrandbits(48):012x} {entry.text}"
    return [*(chance.choice(material.ids) for _ in range(NONCE)), *entry.ids]


def read_prompts(path: Path) -> list[Entry]:
    """Read prompts from JSONL, or from a JSON list, in one of these forms each.

    ``"text"``, ``{"prompt": .., "output_tokens": ..}``, ``{"messages": [{"role": .., "content": ..}]}`` or
    ShareGPT's ``{"conversations": [{"from": "human", "value": ..}]}``; of a conversation the first user turn
    is taken.

    Raises:
        WorkloadError: the file can't be read, is too large, or holds something else.

    """
    try:
        data = read_at_most(path, LARGEST_FILE)
        if data is None:
            raise WorkloadError(
                f"prompts: {path}: more than {LARGEST_FILE >> 30} GiB",
                advice="take a part of it, such as its first lines",
            )
        text = data.decode("utf-8")
        items = (
            msgspec.json.decode(text)
            if text.lstrip().startswith("[")
            else [msgspec.json.decode(line) for line in text.split("\n") if line.strip()]
        )
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise WorkloadError(f"prompts: {path}: can't be read as prompts: {error}") from error
    found = [_entry(item) for item in items]
    wrong = [number for number, entry in enumerate(found, 1) if entry is None]
    if wrong or not found:
        which = f"entry {wrong[0]} has no prompt" if wrong else "holds no prompts"
        raise WorkloadError(
            f"prompts: {path}: {which}",
            advice='a line is "text", {"prompt": "text"}, {"messages": [..]} or {"conversations": [..]}',
        )
    return [entry for entry in found if entry is not None]


def _entry(item: Any) -> Entry | None:
    if isinstance(item, str) and item:
        return Entry(item)
    if not isinstance(item, dict):
        return None
    wanted = item.get("output_tokens") or item.get("max_tokens")
    output = wanted if isinstance(wanted, int) and wanted > 0 else None
    if isinstance(item.get("prompt"), str) and item["prompt"]:
        return Entry(item["prompt"], output)
    for key, speaker, said in (("messages", "role", "content"), ("conversations", "from", "value")):
        for turn in item[key] if isinstance(item.get(key), list) else ():
            if isinstance(turn, dict) and turn.get(speaker) in ("user", "human"):
                content = turn.get(said)
                return Entry(content, output) if isinstance(content, str) and content else None
    return None
