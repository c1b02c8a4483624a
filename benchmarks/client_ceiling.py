"""How many events a second the measuring client takes on one core, at 64 streams.

The server of known pace (`orchestrator.bench.paced`) runs in processes of its own. The client's CPU time for
each event, parsing included, gives the ceiling; and a round at `--rate` shows that it really keeps up: every
stream at its known rate, the loop not late. Goal: a ceiling of 10,000 events/s.

    python benchmarks/client_ceiling.py [--streams 64] [--rate 40]
"""

import argparse
import json

from orchestrator.bench import rounds, samples, selftest
from orchestrator.bench.session import run


async def sustained(streams, rate):
    async with selftest._server() as port:
        return await selftest._round(port, streams, tokens=rate * 2, rate=float(rate), ttft_ms=50.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=selftest.STREAMS)
    parser.add_argument("--rate", type=int, default=200, help="events a second on each stream")
    options = parser.parse_args()
    tested = run(selftest.self_test(options.streams))
    done: rounds.Run = run(sustained(options.streams, options.rate))
    found = [samples.sample(each, done.began_ns) for each in done.exchanges]
    seen = samples.client(done, found)
    reads = sum(len(each.chunks_s) for each in found)
    wall = (done.ended_ns - done.began_ns) / 1e9
    report = {
        "streams": options.streams,
        "ceiling_events_s": round(tested.ceiling_events_s),
        "us_per_event": round(tested.us_per_event, 1),
        "known_rate_off": round(tested.decode_error, 5),
        "known_ttft_off_ms": round(tested.ttft_error_s * 1000, 2),
        "read_after_write_ms": round(tested.read_delay_s * 1000, 3),
        "asked_events_s": options.streams * options.rate,
        "seen_events_s": round(sum(each.output_tokens or 0 for each in found) / wall),
        "reads": reads,  # fewer, when several events come in one
        "whole_streams": sum(each.error is None for each in found),
        "client_cpu": round(seen.cpu, 3),
        "lag_p99_ms": round(seen.lag_p99_s * 1000, 2),
        "goal_events_s": selftest.CEILING,
        "met": tested.ceiling_events_s >= selftest.CEILING,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
