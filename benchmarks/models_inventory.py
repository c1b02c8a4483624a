"""Times the inventory of a folder of models with large vocabularies, cold and from its cache.

    python benchmarks/models_inventory.py [--files 1000] [--vocabularies 10] [--tokens 131072] [--reader 3]

Writes the files into a temporary folder (about 2.9 MB each), which it removes. Cold means that our cache is
empty; the files are in the page cache. gguf.GGUFReader is timed on a few of the files and multiplied, because
it would take hours. With --vocabularies 1000 no two files share a tokenizer: our worst case.
"""

from __future__ import annotations

import argparse
import functools
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


@functools.cache
def words(tokens: int) -> tuple[bytes, ...]:
    source = random.Random(1)
    return tuple(text("".join(source.choices("etaoinshrdlu", k=source.randint(2, 9)))) for _ in range(tokens))


def vocabulary(tokens: int, seed: int) -> bytes:
    """Return a vocabulary; another seed begins elsewhere among the same words, so no two are alike."""
    known = words(tokens)
    first = seed * 131 % tokens
    body = b"".join((*known[first:], *known[:first]))
    parts = [text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, tokens) + body]
    parts.append(text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, tokens) + bytes(4 * tokens))
    parts.append(text("tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, tokens) + bytes(4 * tokens))
    return b"".join(parts)


def model(number: int, tokens: bytes, layers: int = 32) -> bytes:
    """Return a llama of 32 layers as far as its header goes; every matrix is 256 x 1."""
    keys = [
        ("general.architecture", 8, text("llama")),
        ("general.name", 8, text(f"Model {number}")),
        ("llama.context_length", 4, struct.pack("<I", 8192)),
        ("llama.block_count", 4, struct.pack("<I", layers)),
        ("llama.embedding_length", 4, struct.pack("<I", 256)),
        ("llama.attention.head_count", 4, struct.pack("<I", 4)),
    ]
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
    parts += ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    names += [f"blk.{layer}.{part}.weight" for layer in range(layers) for part in parts]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(keys) + 3)
    head += b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in keys) + tokens
    for index, name in enumerate(names):
        head += text(name) + struct.pack("<IQQIQ", 2, 256, 1, 12, index * 160)
    return head + bytes(-len(head) % 32 + 160 * len(names))


def timed(folder: Path, cache: Path) -> tuple[float, float, int]:
    """Return the seconds of a scan in a fresh process, those of the whole command, and the entries read."""
    script = (
        "import sys, time; from pathlib import Path; from orchestrator.inventory import scan;"
        "start = time.perf_counter(); found = scan([Path(sys.argv[1])], cache=Path(sys.argv[2]));"
        "print(time.perf_counter() - start, found.read, len(found.entries))"
    )
    start = time.perf_counter()
    argv = [sys.executable, "-c", script, str(folder), str(cache)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    return float(said[0]), time.perf_counter() - start, int(said[1])


def reader(paths: list[Path]) -> float:
    script = (
        "import sys, time; from gguf import GGUFReader; start = time.perf_counter();"
        "[GGUFReader(path) for path in sys.argv[1:]]; print(time.perf_counter() - start)"
    )
    argv = [sys.executable, "-c", script, *map(str, paths)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return float(said) / len(paths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--vocabularies", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--reader", type=int, default=3, help="files that GGUFReader is timed on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "models", Path(name) / "cache.json"
        folder.mkdir()
        vocabularies: dict[int, bytes] = {}
        for number in range(options.files):
            seed = number % options.vocabularies
            if seed not in vocabularies:
                vocabularies = {**(vocabularies if options.vocabularies <= 50 else {})}
                vocabularies[seed] = vocabulary(options.tokens, seed)
            (folder / f"model-{number:04}.gguf").write_bytes(model(number, vocabularies[seed]))
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(
            f"{options.files} files, {size / 1e9:.1f} GB, {options.tokens} tokens, "
            f"{options.vocabularies} vocabularies"
        )
        cold, cold_process, read = timed(folder, cache)
        assert read == options.files
        warm, warm_process, read = min(timed(folder, cache) for _ in range(5))
        assert read == 0
        each = reader(sorted(folder.iterdir())[: options.reader])
        print(f"cold                  {cold:9.2f} s   (process {cold_process:.2f} s)")
        print(f"from its cache        {warm:9.3f} s   (process {warm_process:.3f} s)")
        read_all = each * options.files
        print(f"gguf.GGUFReader       {read_all:9.0f} s   ({each:.2f} s a file, {options.reader} timed)")
        print(f"ratio, cold           {read_all / cold:9.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
