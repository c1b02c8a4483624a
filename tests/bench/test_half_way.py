"""A measurement that ends half-way: what ended it is told, and nothing that was measured is lost."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from backends.llama_server import LlamaServer
from orchestrator.backend import Plan
from orchestrator.bench import from_json, gate, measure, session, text, to_json
from orchestrator.bench.against import against
from orchestrator.bench.comparing import ELSEWHERE
from orchestrator.bench.history import History, Report
from orchestrator.bench.html import page
from orchestrator.bench.session import Step
from orchestrator.bench.target import Target
from orchestrator.bench.values import Comparison, Measurement, Workload
from orchestrator.cli import report
from orchestrator.errors import BackendError, Incomparable, OrchestratorError, StopFailed, Unreachable
from tests.bench import reports
from tests.bench.conftest import Write, made_round
from tests.bench.servers import Habits, engine
from tests.bench.test_cli import SHORT, orchestrator
from tests.bench.test_pitfalls import LOAD, PATIENT, compared

NEVER = {"attempts": 0, "window": 300, "backoff": [0.05, 0.1]}


def rest_of(error: OrchestratorError) -> Comparison:
    assert isinstance(error.measured, Comparison)
    return error.measured


# -- compare ----------------------------------------------------------------------------------------


def test_a_spent_budget_loses_nothing_and_claims_nothing_bad() -> None:
    """Six pairs say that A is four times as fast, and yet it is not claimed: B's failures chose them."""
    with (
        closing(engine(Habits(gap=0.002))) as a,
        closing(engine(Habits(gap=0.016, fail_from=8))) as b,
        pytest.raises(Incomparable, match="too many rounds were void") as caught,
    ):
        compared(a.url, b.url, pairs=8, budget=1)
    found = rest_of(caught.value)
    assert found.refused == caught.value.reasons
    assert found.interrupted
    assert (found.verdict, found.decisions[0].answer) == ("inconclusive", "inconclusive")
    assert found.decisions[0].pairs == 6
    assert found.decisions[0].ratio > 2
    assert found.decisions[0].pairs_needed is None
    assert len(found.rounds) == 12 + 4
    void = [each for each in found.rounds if each.void]
    assert len(void) == 4
    assert any("told to fail" in reason for each in void for reason in each.void)
    assert any(each.samples and each.void == (ELSEWHERE,) for each in void)  # good ones are kept too
    assert any("refused after 6 of 8 pairs" in note for note in found.notes)
    assert from_json(to_json(found)) == found


def test_what_can_be_made_here_is_made_and_told_before_anything_starts_good(
    fake: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another form of the model: what is planned before it is there does not tell what will be measured."""
    made: list[str] = []
    planned = LlamaServer.plan

    class Other:
        remote, doing, size = False, "converting", 1

        def __str__(self) -> str:
            return "x.gguf to safetensors"

        def fetch(self, progress: object = None) -> None:
            made.append("made")

    def plan(engine: LlamaServer) -> Plan:
        lacking = () if made else (Other(),)
        return replace(planned(engine), downloads=lacking, context=512 if made else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(LlamaServer, "plan", plan)
    told: list[str] = []
    found = compared(
        fake("one", {"rate": 400}), fake("two", {"rate": 400}), progress=lambda step: told.append(step.text)
    )
    assert told[:2] == [f"{name}: converting x.gguf to safetensors" for name in ("one", "two")]
    assert [arm.context for arm in found.arms] == [512, 512]


def test_an_engine_that_was_given_up_is_not_waited_for_bad(fake: Write) -> None:
    """Its supervisor has given up, so that each of 50 more pairs would find the same."""
    dying = fake("dying", {"rate": 400, "crash_request": 6}, restart=NEVER)
    with pytest.raises(BackendError, match="dying") as caught:
        compared(dying, fake("well", {"rate": 400}), budget=50)
    found = rest_of(caught.value)
    assert 0 < found.decisions[0].pairs < 6
    assert found.refused == (caught.value.message,)
    assert len([each for each in found.rounds if each.void]) <= 3


@pytest.mark.parametrize("machine", ["on", "off"])
def test_a_server_that_is_gone_is_not_asked_again_and_again_bad(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    async def silence(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(session, "GONE", 0.3)
    if machine == "off":
        monkeypatch.setattr(asyncio, "open_connection", silence)
    with closing(engine()) as a, ExitStack() as stack:
        b = stack.enter_context(closing(engine()))

        def tell(step: Step) -> None:
            if step.text.startswith("pair 4"):
                stack.close()

        with pytest.raises(Unreachable, match="the server is gone: no connection") as caught:
            compared(a.url, b.url, budget=50, progress=tell)
    assert "start it again" in (caught.value.advice or "")
    found = rest_of(caught.value)
    assert found.decisions[0].pairs == 3
    assert len([each for each in found.rounds if each.void]) <= 3


def test_a_server_that_comes_back_is_measured_on_good() -> None:
    """A round without a connection is an accident, and its pair is repeated once the server is back."""
    with closing(engine()) as a, ExitStack() as stack:
        b = stack.enter_context(closing(engine()))
        name = f"127.0.0.1:{b.port}"
        away: list[bool] = []

        def tell(step: Step) -> None:
            if step.text == f"pair 4 of 6: {name}" and not away:
                away.append(True)
                stack.close()
            elif step.text == f"pair 4 of 6: {name} done" and away == [True]:
                away.append(False)
                stack.enter_context(closing(engine(port=b.port)))

        found = compared(a.url, b.url, margin=0.9, progress=tell)
    assert not found.refused
    assert found.decisions[0].pairs == 6
    (lost,) = [each for each in found.rounds if each.void and each.void != (ELSEWHERE,)]
    assert lost.arm == name
    assert all("no connection" in (each.error or "") for each in lost.samples)


def test_of_a_pair_that_was_cut_short_no_round_counts_bad() -> None:
    """Of three rounds the second was void already, and the third was not begun."""
    begun: list[str] = []

    def tell(step: Step) -> None:
        begun.extend([step.text] if step.text.startswith("pair 3") and "done" not in step.text else [])
        if len(begun) == 3:
            raise asyncio.CancelledError  # as by Ctrl-C

    with (
        closing(engine()) as a,
        closing(engine(Habits(fail_at=1 + 3))) as b,  # the first one is the warm-up
        closing(engine()) as c,
    ):
        found = compared(a.url, b.url, c.url, pairs=7, progress=tell)
    assert [each.number for each in found.rounds] == sorted({each.number for each in found.rounds})
    last = [each for each in found.rounds if each.pair == 2]
    assert {each.arm for each in last} == {f"127.0.0.1:{server.port}" for server in (a, b)}
    assert all(each.void for each in last)
    assert any("told to fail" in reason for each in last for reason in each.void)


@pytest.mark.parametrize("which", ["bench", "compare"])
def test_a_stop_that_fails_after_an_interruption_refuses_nothing_ugly(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """It did not choose which rounds are left: somebody's Ctrl-C did."""

    def stop(target: Target) -> None:
        target.endpoint = None
        raise StopFailed("stop: something is left", survivors=[1])

    def tell(step: Step) -> None:
        if step.text.startswith(("pair 3", "test: round 3")):
            raise asyncio.CancelledError

    monkeypatch.setattr(Target, "stop", stop)

    def measured(*urls: str) -> None:
        if which == "bench":
            measure(urls[0], [LOAD], rounds=6, limits=PATIENT, progress=tell)
        else:
            compared(*urls, progress=tell)

    with closing(engine()) as a, closing(engine()) as b, pytest.raises(StopFailed) as caught:
        measured(a.url, b.url)
    found = caught.value.measured
    assert found.interrupted
    assert found.refused == ()


def test_a_refusal_before_the_first_round_has_nothing_to_keep_good() -> None:
    with (
        closing(engine()) as a,
        closing(engine(Habits(extra_prompt=1))) as b,
        pytest.raises(Incomparable) as caught,
    ):
        compared(a.url, b.url)
    assert caught.value.measured is None


# -- bench ------------------------------------------------------------------------------------------


def test_bench_keeps_what_came_before_too_many_void_rounds_bad() -> None:
    with (
        closing(engine(Habits(fail_from=5))) as server,
        pytest.raises(Incomparable, match=r"^bench: test: too many void rounds") as caught,
    ):
        measure(server.url, [LOAD, LOAD], rounds=6, limits=PATIENT)
    found = caught.value.measured
    assert isinstance(found, Measurement)
    assert [len(part.rounds) for part in found.results] == [8]
    assert {each.metric: each.rounds for each in found.results[0].summaries}["decode_tok_s"] == 3
    assert found.refused == caught.value.reasons


def test_a_workload_that_can_not_be_run_does_not_cost_the_one_before_bad(fake: Write) -> None:
    long = Workload(name="long", prompt_tokens=(5000,))
    with pytest.raises(OrchestratorError, match="exceeds the context") as caught:
        measure(fake("p", {"rate": 300}), [LOAD, long], rounds=2, limits=PATIENT)
    assert isinstance(caught.value.measured, Measurement)
    assert [len(part.rounds) for part in caught.value.measured.results] == [2, 0]


# -- on the command line ----------------------------------------------------------------------------


BENCH = ("bench", "{}", "--preset", "decode", "--rounds", "20")
COMPARE = ("compare", "{}", "--aa", "--pairs", "20", "--void-budget", "9")


@pytest.mark.parametrize("words", [BENCH, (*BENCH, "--json"), (*COMPARE, "--json"), (*COMPARE, "--markdown")])
def test_what_was_measured_is_shown_written_and_kept_bad(
    fake: Write, tmp_path: Path, own_home: Path, words: tuple[str, ...]
) -> None:
    profile = fake("dying", {"rate": 200, "crash_request": 6}, restart=NEVER)
    out = tmp_path / "out"
    done = orchestrator(*(word.replace("{}", profile) for word in words), *SHORT, "--output", str(out))
    assert done.returncode == 3, done.stderr
    kept = History().open("latest").result
    assert kept == from_json((out / "report.json").read_bytes())
    assert kept.interrupted
    assert kept.refused
    assert "kept as run 1" in done.stderr
    if "--json" in words:
        document = json.loads(done.stdout)
        assert document["error"]["exit_code"] == 3
        assert from_json(msgspec.json.encode(document["measured"])) == kept
    else:
        assert "decode_tok_s" in done.stdout
        assert " faster" not in done.stdout
    for name in ("report.html", "report.md"):
        assert "efused" in (out / name).read_text(encoding="utf-8")


def test_no_history_is_heeded_half_way_too_good(fake: Write, own_home: Path) -> None:
    profile = fake("dying", {"rate": 200, "crash_request": 6}, restart=NEVER)
    done = orchestrator("bench", profile, "--preset", "decode", *SHORT, "--no-history")
    assert done.returncode == 3, done.stderr
    assert "decode_tok_s" in done.stdout
    assert not History().entries()


# -- in words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [reports.comparison(), reports.comparison(pairs=2, all_void=True), reports.comparison(control=True)],
)
def test_a_refused_comparison_is_never_an_answer_good(made: Comparison) -> None:
    found = msgspec.structs.replace(made, refused=("b broke down <often>",), interrupted=True)
    shown = page(found).partition("</style>")[2]
    for said in (report.plain(found), text.markdown(found), shown):
        assert "is faster than" not in said
        assert "equivalent" not in said
        assert "inconclusive" not in said
        assert "A control: " not in said
        assert "(refused)" in said or ">refused<" in said
    assert "Refused before its end: no verdict on" in shown
    assert "b broke down" in text.markdown(found)
    assert "b broke down &lt;often&gt;" in page(found)


def test_a_run_against_a_refused_one_says_so_good() -> None:
    refused = msgspec.structs.replace(reports.measurement(), refused=("it broke down",), interrupted=True)
    found = against(Report(refused), Report(reports.measurement()))
    assert any("A was refused before its end (it broke down)" in note for note in found.notes)


# -- short rounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "seconds", "said"),
    [
        (Workload(name="decode", output_tokens=(24,)), 0.4, "--output-tokens 96 or --requests 4"),
        (Workload(name="ttft", output_tokens=(2,), requests=5), 0.5, ": --requests 15"),
        (Workload(name="mixed", output_tokens=(32, 128), requests=4), 0.9, ": --requests 8"),
        (Workload(name="decode"), 1.0, None),
    ],
)
def test_rounds_that_are_too_short_are_said_bad(load: Workload, seconds: float, said: str | None) -> None:
    rounds = [
        msgspec.structs.replace(made_round("a", pair, void), duration_s=lasted)
        for pair, (lasted, void) in enumerate(
            [(seconds, ()), (seconds, ()), (9.0, ("void",)), (9.0, ("void",))]
        )
    ]
    found = gate.short_rounds(rounds, load)
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"rounds lasted {seconds:g} s: below 1 s")
        assert found.endswith(said)
    assert gate.short_rounds([], load) is None


def test_short_rounds_are_warned_of_good(fake: Write) -> None:
    done = orchestrator(
        "compare", fake("quick", {"rate": 300}), "--aa", *SHORT, "--pairs", "6", "--void-budget", "60"
    )
    assert done.returncode == 0, done.stderr
    assert "note: rounds lasted 0." in done.stdout
    assert "warning: rounds lasted 0." in done.stderr
    assert "--output-tokens" in done.stderr
