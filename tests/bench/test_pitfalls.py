"""Every way that we know in which a benchmark is misled: committed by an engine, refused or seen through."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import gguf_header
from orchestrator.backend import Dialect, Endpoint
from orchestrator.bench import compare, comparing, gate, rounds, samples, selftest
from orchestrator.bench.arms import Spec, specs
from orchestrator.bench.comparing import Comparing
from orchestrator.bench.declared import Declared
from orchestrator.bench.exchange import GREEDY, NEUTRAL
from orchestrator.bench.prompts import Ask
from orchestrator.bench.session import Progress, Step, run
from orchestrator.bench.target import Target
from orchestrator.bench.values import Comparison, Sample, SelfTest, Workload
from orchestrator.errors import Incomparable
from orchestrator.source import probe
from tests.bench.conftest import HEALTHY, Write
from tests.bench.servers import OUTPUT, PROMPT, RAW, Habits, engine
from tests.fakes.hub import Repo, served
from tests.fakes.scripted import HEAD, HoldUntilClosed, Scripted, chunked

MEASURING = Path(__file__).parents[2] / "docs" / "explanation" / "measuring.md"
LOAD = Workload(name="test", prompt_tokens=(PROMPT,), output_tokens=(OUTPUT,))
PATIENT = gate.Limits(
    cpu=10, lag_s=10, heed_others=False
)  # other tests and other people use this machine too

Start = Any


@pytest.fixture
def servers() -> Iterator[Start]:
    """Start scripted engines: ``servers(Habits(), Habits())`` returns their URLs."""
    with ExitStack() as stack:
        yield lambda *habits: [stack.enter_context(closing(engine(each))).url for each in habits]


def compared(
    *subjects: str,
    tested: SelfTest = HEALTHY,
    load: Workload = LOAD,
    progress: Progress | None = None,
    **declared: Any,
) -> Comparison:
    """Compare, with the client's self-test already done."""
    arms = specs(subjects, vary=declared.pop("vary", ()), control=declared.pop("control", False))
    settings = {"workload": load, "pairs": 6, "budget": 4, "limits": PATIENT, **declared}
    return run(Comparing(Declared(arms=arms, **settings)).run(1, progress, tested))


def test_the_documented_list_names_tests_that_there_are_good() -> None:
    named = set(re.findall(r"`(test_\w+)`", MEASURING.read_text("utf-8")))
    here = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert named
    assert named <= set(re.findall(r"^def (test_\w+)", here, re.MULTILINE))


# -- right ------------------------------------------------------------------------------------------


def test_an_engine_four_times_as_fast_is_found_faster_good(servers: Start) -> None:
    found = compared(*servers(Habits(gap=0.004), Habits(gap=0.016)))
    assert found.verdict == "a_faster"
    assert found.decisions[0].ratio == pytest.approx(4, rel=0.35)
    assert found.decisions[0].pairs == 6
    assert [each.pair for each in found.rounds] == [pair for pair in range(6) for _ in range(2)]
    arms = [each.arm for each in found.rounds]
    assert arms[:4] == [arms[0], arms[1], arms[1], arms[0]]


def test_chunks_of_several_tokens_do_not_make_an_engine_slower_good(servers: Start) -> None:
    """Speculative decoding: counts come from usage, not from chunks."""
    found = compared(*servers(Habits(gap=0.01), Habits(gap=0.01, per_chunk=4)), margin=0.5)
    # what came with the first chunk took no time after it: the rate is too high by 23 to 20, never too low
    assert found.verdict != "a_faster"
    assert found.decisions[0].ratio == pytest.approx(20 / 23, rel=0.35)
    assert {each.output_tokens for part in found.rounds for each in part.samples} == {OUTPUT}


def test_pings_are_not_tokens_and_no_first_token_good(servers: Start) -> None:
    found = compared(*servers(Habits(gap=0.004, pings=3), Habits(gap=0.016)))
    assert found.verdict == "a_faster"


def test_a_role_is_no_first_token_good(servers: Start) -> None:
    """An engine that sends a role at once and the first token late is not quick."""
    habits = (Habits(ttft=0.5, role_first=True), Habits(ttft=0.02))
    found = compared(*servers(*habits), metrics=("ttft_s",))
    assert found.verdict == "b_faster"
    assert all(each.ttft_s > 0.15 for part in found.rounds[:1] for each in part.samples if each.ttft_s)


def test_usage_in_every_chunk_is_not_added_up_good(servers: Start) -> None:
    found = compared(*servers(Habits(gap=0.004, cumulative=True), Habits(gap=0.016)))
    assert found.verdict == "a_faster"
    assert {each.output_tokens for part in found.rounds for each in part.samples} == {OUTPUT}


@pytest.mark.parametrize(
    "habits",
    [
        Habits(framing="crlf"),
        Habits(framing="cr"),
        Habits(framing="no_space"),
        Habits(framing="bom"),
        Habits(framing="lines"),
        Habits(framing="bytes", word=f" {RAW}"),
        Habits(word=f" {RAW}", pings=1),
        Habits(ending="no_done"),
        Habits(usage_with_choice=True),
        Habits(cached=None),
    ],
    ids=str,
)
def test_an_honest_engine_of_odd_manners_is_read_right_good(servers: Start, habits: Habits) -> None:
    found = compared(*servers(replace(habits, gap=0.002), Habits(gap=0.016)))
    assert found.verdict == "a_faster"
    assert not [each.void for each in found.rounds if each.void]
    assert {each.output_tokens for part in found.rounds for each in part.samples} == {OUTPUT}
    assert {len(each.chunks_s) >= OUTPUT // 2 for part in found.rounds for each in part.samples} == {True}


def test_a_cache_that_says_nothing_helps_nobody_good(servers: Start) -> None:
    """It would: the same prompt again is answered sooner. But no prompt begins like another."""
    remembers = Habits(ttft=0.1, remembers=True, cached=None)
    (url,) = servers(remembers)
    first, again = (answers(url, LOAD, [Ask([1] * PROMPT, OUTPUT)])[0].ttft_s for _ in range(2))
    assert first is not None
    assert again is not None
    assert first >= 0.1 > again
    found = compared(*servers(remembers, Habits(ttft=0.1, cached=None)), metrics=("ttft_s",), margin=0.5)
    assert found.verdict in ("equivalent", "inconclusive")
    assert all(each.ttft_s >= 0.1 for part in found.rounds for each in part.samples if each.ttft_s)
    assert any("can't say whether prompts came from a cache" in note for note in found.notes)


def test_caches_are_compared_where_a_prefix_is_shared_on_purpose_good(servers: Start) -> None:
    load = Workload(
        name="prefix", prompt_tokens=(PROMPT,), output_tokens=(OUTPUT,), prefix_tokens=24, metric="ttft_s"
    )
    keeps = Habits(ttft=0.2, remembers=True, cached=24)
    found = compared(*servers(keeps, Habits(ttft=0.2)), load=load)
    assert found.verdict == "a_faster"
    assert [note for note in found.notes if "75% of its prompt tokens from its cache" in note]


def test_weights_of_another_precision_are_another_experiment_bad(
    fake: Write, tiny_model: Path, tmp_path: Path
) -> None:
    """It is not refused, for it may be what is asked; but it is said."""
    other, key = tmp_path / "other.gguf", b"general.file_type" + (4).to_bytes(4, "little")
    data = tiny_model.read_bytes()
    assert key in data
    at = data.index(key) + len(key)
    other.write_bytes(data[:at] + (7).to_bytes(4, "little") + data[at + 4 :])
    arms = fake("a", {"rate": 300}), fake("b", {"rate": 300}, model=str(other))
    found = compared(*arms, margin=0.9)
    assert "different quantisations: F32, Q8_0; weights of another precision" in "".join(found.notes)
    assert found.arms[0].model_hash != found.arms[1].model_hash


def test_what_an_engine_does_once_is_over_before_it_counts_good(servers: Start) -> None:
    found = compared(*servers(Habits(cold=2.0), Habits()), metrics=("ttft_s",), margin=0.9)
    assert found.verdict in ("equivalent", "inconclusive")
    assert all(each.ttft_s < 2 for part in found.rounds for each in part.samples if each.ttft_s)


def test_every_sampler_is_said_good() -> None:
    """An engine's own defaults have no say."""
    with closing(engine()) as server:
        compared(server.url, control=True, margin=0.9)
        bodies = [body for _, body in server.requests if body and "prompt" in body]
    asked = [body for body in bodies if len(body["prompt"]) == PROMPT]
    assert len(asked) >= 14
    for body in asked:
        given = {name: body[name] for name in (*GREEDY, *NEUTRAL, "ignore_eos", "max_tokens")}
        assert given == {**GREEDY, **NEUTRAL, "ignore_eos": True, "max_tokens": OUTPUT}


def test_a_server_without_a_tokeniser_is_asked_in_words_good() -> None:
    with closing(engine(Habits(gap=0.002, tokeniser=False))) as server:
        found = compared(server.url, control=True, margin=0.9)
        prompts = [body["prompt"] for _, body in server.requests if body and "prompt" in body]
    assert found.verdict in ("equivalent", "inconclusive")
    begins = [re.match(r"[0-9a-f]{12}\b", prompt) for prompt in prompts if isinstance(prompt, str)]
    assert len({begin[0] for begin in begins if begin}) >= 14


def test_a_declared_rule_stops_when_the_answer_is_clear_good(servers: Start) -> None:
    urls = servers(Habits(gap=0.002), Habits(gap=0.016))
    found = compared(*urls, pairs=24, stop_early=True)
    assert found.verdict == "a_faster"
    assert found.decisions[0].pairs == 8
    assert found.design.stop_early == (8, 16, 24)


def test_one_failure_voids_its_pair_and_is_shown_good(servers: Start) -> None:
    """Failures are never counted as fast answers: the pair is repeated and both rounds are listed."""
    found = compared(*servers(Habits(gap=0.004, fail_at=5), Habits(gap=0.016)))
    assert found.verdict == "a_faster"
    void = [each for each in found.rounds if each.void]
    assert len(void) == 2
    assert any("told to fail" in reason for each in void for reason in each.void)
    assert found.decisions[0].pairs == 6


# -- refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("habits", "said"),
    [
        (Habits(cached=PROMPT - 2), "came from a cache"),
        (Habits(most=7), "7 output tokens instead of 24"),
        (Habits(extra_prompt=1), r"has 32 prompt tokens where \S+ has 33"),
        (Habits(ending="stop"), "has length as finish reason"),
        (Habits(ending="error_then_done"), "told to fail"),
        (Habits(ending="bare_error"), "told to fail"),
        (Habits(held=True), "all 24 tokens came at once"),
        (Habits(ending="only_done"), "without a finish reason"),
        (Habits(ending="eof"), "broke"),
        (Habits(ending="no_usage"), "no usage"),
        (Habits(shift=1), "not the same model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arms_that_answer_different_questions_are_refused_bad(
    servers: Start, habits: Habits, said: str
) -> None:
    steps: list[Step] = []
    with pytest.raises(Incomparable, match=said):
        compared(*servers(Habits(), habits), progress=steps.append)
    assert steps
    assert not [step for step in steps if step.text.startswith("pair")]  # refused before any figure


def test_a_client_that_is_too_slow_gives_no_verdict_bad(servers: Start) -> None:
    slow = SelfTest(
        streams=64, events=1, ceiling_events_s=900.0, us_per_event=1111.0, decode_error=0.0,
        ttft_error_s=0.0, read_delay_s=0.0, ok=False, reasons=("the client takes 900 events/s on one core",),
    )  # fmt: skip
    with pytest.raises(Incomparable, match="900 events/s"):
        compared(*servers(Habits(), Habits()), tested=slow)


def test_a_machine_that_is_too_slow_is_seen_by_the_self_test_bad(
    servers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine takes this many events: the test's own answer stops the comparison before an engine does."""
    monkeypatch.setattr(selftest, "CEILING", 1e9)
    with pytest.raises(Incomparable, match="1000000000 are needed"):
        compare(*servers(Habits(), Habits()), workload=LOAD)


def test_a_client_that_wakes_late_voids_rounds_bad(servers: Start) -> None:
    with pytest.raises(Incomparable, match="the client was late"):
        compared(*servers(Habits(), Habits()), limits=gate.Limits(cpu=10, lag_s=0.0), budget=1)


def test_a_busy_client_voids_rounds_until_the_budget_is_spent_bad(servers: Start) -> None:
    with pytest.raises(Incomparable, match="the client was busy"):
        compared(*servers(Habits(), Habits()), limits=gate.Limits(cpu=0.0, lag_s=10), budget=1)


def test_an_engine_that_dies_at_every_round_is_refused_bad(fake: Write) -> None:
    """Each launch answers the warm-up and dies in the first round."""
    profile = fake("dying", {"rate": 400, "crash_request": 4})
    with pytest.raises(Incomparable, match="too many rounds were void") as caught:
        compared(profile, fake("well", {"rate": 400}), budget=1)
    assert not any(comparing.ELSEWHERE in reason for reason in caught.value.reasons)  # the causes only
    assert any("(dying)" in line for line in caught.value.voids)
    assert any(comparing.ELSEWHERE in line for line in caught.value.voids)


# -- with engines of ours ---------------------------------------------------------------------------


def test_a_restart_that_no_request_felt_voids_its_round_good(
    servers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count(1)  # one before each round and one behind it
    monkeypatch.setattr(Target, "restarts", lambda _: (int(next(looks) >= 10), ()))
    found = compared(*servers(Habits(gap=0.004), Habits(gap=0.016)))
    reasons = [reason for each in found.rounds for reason in each.void]
    assert reasons.count("the engine was restarted") == 1
    assert found.verdict == "a_faster"


def test_a_restart_voids_the_round_and_the_run_goes_on_good(fake: Write, tmp_path: Any) -> None:
    knobs = {"rate": 250, "state": str(tmp_path / "launches"), "launches": [{"crash_request": 5}]}
    found = compared(fake("dies-once", knobs), fake("slow", {"rate": 50}))
    assert found.verdict == "a_faster"
    # the request that it cut is always seen, the restart itself perhaps a moment after the round
    reasons = [reason for each in found.rounds for reason in each.void]
    assert any("restarted" in reason or "a request failed" in reason for reason in reasons)
    assert found.decisions[0].pairs == 6


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-30 12:00:00 [backends.py:200] Compiling a graph for dynamic shape takes 12.1 s",
        "WARNING Request cmpl-1 is preempted by PreemptionMode.RECOMPUTE",
        "CPU3: Core temperature above threshold, cpu clock throttled",
    ],
)
def test_a_disturbed_engine_says_so_in_its_log_and_the_round_is_void_good(fake: Write, line: str) -> None:
    found = compared(
        fake("disturbed", {"rate": 250, "say_request": 6, "say_line": line}), fake("slow", {"rate": 50})
    )
    assert found.verdict == "a_faster"
    reasons = [each.void for each in found.rounds if each.void]
    assert len(reasons) == 2
    assert any(line in reason for each in reasons for reason in each)
    assert found.decisions[0].pairs == 6


def test_launches_alternate_when_asked_to_good(fake: Write) -> None:
    found = compared(fake("a", {"rate": 250}), fake("b", {"rate": 50}), residency="alternate")
    assert found.verdict == "a_faster"
    assert found.design.residency == "alternate"
    assert [len(arm.load_s) for arm in found.arms] == [7, 7]


class _Rival:
    """An engine seen by the processor time that it has used, look after look."""

    def __init__(self, *used: float | None) -> None:
        self.used = list(used)

    def cpu_s(self) -> float | None:
        return self.used.pop(0) if len(self.used) > 1 else self.used[0]


def test_a_rival_that_spins_on_is_waited_for_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's workers do, for a second after each answer, beside whoever is measured then."""
    monkeypatch.setattr(comparing, "LOOK", 0.01)
    spins = _Rival(1.0, 1.5, 2.0, 2.5, 2.5)
    assert asyncio.run(comparing.rest([spins, _Rival(7.0)]))  # type: ignore[list-item]
    assert spins.used == [2.5]
    assert asyncio.run(comparing.rest([_Rival(None)]))  # type: ignore[list-item]
    assert asyncio.run(comparing.rest([]))
    monkeypatch.setattr(comparing, "PATIENCE", 0.05)
    never = _Rival(*(float(look) for look in range(100)))
    assert not asyncio.run(comparing.rest([never]))  # type: ignore[list-item]


def test_a_control_finds_no_difference_good(fake: Write) -> None:
    found = compared(fake("same", {"rate": 100}), control=True, margin=0.5)
    assert found.verdict in ("equivalent", "inconclusive")
    assert [arm.name for arm in found.arms] == ["same#1", "same#2"]
    assert found.arms[0].url != found.arms[1].url


def test_more_slots_are_a_higher_throughput_good(fake: Write) -> None:
    load = Workload(name="slots", output_tokens=(OUTPUT,), concurrency=4, requests=4, metric="output_tok_s")
    found = compared(fake("slots", {"rate": 200}), load=load, pairs=7, vary=["slots=1,2,4"])
    assert [each.answer for each in found.decisions] == ["b_faster", "b_faster"]
    assert any("numbers of slots" in note for note in found.notes)


def test_a_server_against_itself_gets_prompts_of_its_own_for_each_arm_ugly() -> None:
    """Else the first arm would fill the cache for the second."""
    with closing(engine(Habits(gap=0.002))) as server:
        found = compared(server.url, control=True, margin=0.9)
        prompts = [tuple(body["prompt"]) for _, body in server.requests if body and "prompt" in body]
    assert found.verdict in ("equivalent", "inconclusive")
    asked = [prompt for prompt in prompts if len(prompt) == PROMPT]
    assert len(asked) >= 14
    assert len(set(asked)) == len(asked)


def test_everything_that_may_matter_is_in_the_result_good(fake: Write) -> None:
    found = compared(fake("a", {"rate": 250}), vary=["flash_attention=on,off"], margin=0.9)
    first = found.arms[0]
    assert first.overrides == ("flash_attention=on",)
    assert first.argv[first.argv.index("--flash-attn") + 1] == "on"
    assert first.environment["FAKE_ENGINE"]
    assert first.model_hash
    assert first.sampling["temperature"] == 0
    assert first.load_s
    assert all(each.memory and each.memory.rss > 1 << 20 for each in found.rounds)
    assert all(view.source for each in found.rounds for view in each.server)
    assert found.seed == 1
    assert found.machine.cores >= 1


def test_what_is_fetched_from_the_hub_is_described_all_the_same_good(
    fake: Write, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first start nothing is known of such a model."""
    with served() as hub:
        hub.repos["owner/tiny-GGUF"] = Repo({"tiny-F32.gguf": tiny_model.read_bytes()})
        monkeypatch.setenv("HF_ENDPOINT", hub.urls["hub"])
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        profile = fake("fetched", {"rate": 300}, model="hf:owner/tiny-GGUF", context=4096)
        target = Target(Spec("fetched", profile))
        assert target.plan is not None
        assert target.plan.header is None
        try:
            target.start()
            arm = target.describe()
        finally:
            target.stop()
    known = gguf_header.read(tiny_model)
    assert (arm.quantisation, arm.context) == (known.quantisation, known.context)
    assert arm.model_hash == hashlib.sha256(tiny_model.read_bytes()).hexdigest()
    assert arm.argv[arm.argv.index("--ctx-size") + 1] == str(4 * (known.context or 0))


# -- one round --------------------------------------------------------------------------------------


def answers(url: str, load: Workload, wanted: list[Ask]) -> list[Sample]:
    """Run one round."""
    done = run(rounds.run(probe(url).at, load, wanted, 1, deadline=30, stall=20))
    return [samples.sample(each, done.began_ns) for each in done.exchanges]


def test_an_open_loop_counts_from_when_a_request_was_due_good(servers: Start) -> None:
    """Coordinated omission: the moments of sending don't wait for slow answers."""
    (url,) = servers(Habits(ttft=0.3))
    load = Workload(name="open", requests=6, rate=50.0)
    found = answers(url, load, [Ask([1] * PROMPT, OUTPUT)] * 6)
    assert not [each.error for each in found if each.error]
    assert found[-1].intended_s < 0.25  # though no answer was there by then
    assert all(each.e2e_s == pytest.approx(each.end_s - each.intended_s, abs=1e-6) for each in found)
    assert all(each.intended_s <= each.sent_s for each in found)


def test_a_closed_loop_sends_when_a_stream_is_free_good(servers: Start) -> None:
    (url,) = servers(Habits())
    found = answers(url, Workload(name="closed", concurrency=2, requests=6), [Ask([1] * PROMPT, OUTPUT)] * 6)
    assert not [each.error for each in found if each.error]
    starts, ends = sorted(each.sent_s for each in found), sorted(each.end_s for each in found)
    assert all(start >= end for start, end in zip(starts[2:], ends, strict=False))


def test_nobody_there_is_an_error_and_not_a_figure_bad() -> None:
    gone = engine()
    gone.close()
    endpoint = Endpoint(gone.url, None, "x", Dialect("x", {}))
    done = run(rounds.run(endpoint, LOAD, [Ask([1] * PROMPT, OUTPUT)], 1))
    found = samples.sample(done.exchanges[0], done.began_ns)
    assert found.error is not None
    assert found.error.startswith("no connection")
    assert samples.metrics([found]) == {}


def test_a_stalled_stream_is_given_up_bad() -> None:
    with closing(Scripted([HEAD + chunked(b":\n\n"), HoldUntilClosed])) as server:
        endpoint = Endpoint(server.url, None, "x", Dialect("x", {}))

        async def main() -> rounds.Run:
            return await rounds.run(endpoint, LOAD, [Ask([1] * PROMPT, OUTPUT)], 1, deadline=60, stall=0.2)

        done = run(main())
        found = samples.sample(done.exchanges[0], done.began_ns)
        assert found.error is not None
        assert found.error.startswith("nothing came")
        assert server.gone.wait(20)


def test_measuring_works_within_a_running_loop_ugly() -> None:
    """A notebook has a loop of its own."""

    async def inner() -> int:
        await asyncio.sleep(0)
        return 7

    async def outer() -> int:
        return run(inner())

    assert asyncio.run(outer()) == 7
