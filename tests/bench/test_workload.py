"""Presets, prompts of exact length, and prompts from files."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import pytest

from orchestrator.bench import prompts
from orchestrator.bench.prompts import Material, asks, read_prompts
from orchestrator.bench.values import Workload
from orchestrator.bench.workload import WorkloadError, changed, presets, shaped

IDS = Material(tuple(range(1000, 1200)))


def test_prompts_have_exactly_the_length_asked_for_good() -> None:
    load = Workload(name="x", prompt_tokens=(8, 64, 333), output_tokens=(1, 2), requests=6)
    made = asks(load, IDS, 1, "0")
    assert [len(ask.prompt) for ask in made] == [8, 64, 333, 8, 64, 333]
    assert [ask.output_tokens for ask in made] == [1, 2, 1, 2, 1, 2]


def test_the_same_key_gives_the_same_prompts_and_another_key_others_good() -> None:
    load = Workload(name="x", requests=3)
    assert asks(load, IDS, 1, "0") == asks(load, IDS, 1, "0")
    assert asks(load, IDS, 1, "0") != asks(load, IDS, 1, "1")
    assert asks(load, IDS, 2, "0") != asks(load, IDS, 1, "0")


def shared(a: list[int], b: list[int]) -> int:
    """Return how many tokens two prompts have in common at their beginning."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_no_two_prompts_begin_alike_good() -> None:
    load = Workload(name="x", requests=8)
    made = [ask.prompt for key in range(25) for ask in asks(load, IDS, 1, str(key))]
    assert max(shared(a, b) for a, b in combinations(made, 2)) < 8  # type: ignore[arg-type]
    assert len({tuple(prompt[:4]) for prompt in made}) == len(made)


def test_a_prefix_is_shared_on_purpose_and_the_rest_is_not_good() -> None:
    load = Workload(name="x", prompt_tokens=(100,), prefix_tokens=60, requests=10)
    made = [ask.prompt for ask in asks(load, IDS, 1, "0")]
    assert all(60 <= shared(a, b) < 68 for a, b in combinations(made, 2))  # type: ignore[arg-type]


def test_without_a_tokeniser_prompts_are_text_with_a_nonce_ugly() -> None:
    made = asks(Workload(name="x", requests=4), Material(None), 1, "0")
    assert all(isinstance(ask.prompt, str) for ask in made)
    assert len({str(ask.prompt)[:12] for ask in made}) == 4


def test_the_presets_are_those_of_the_source_good() -> None:
    decode, ttft, one, two, four = presets(["decode", "ttft", "slots"], 4, 4096)
    assert (decode.output_tokens, decode.concurrency, decode.metric) == ((128,), 1, "decode_tok_s")
    assert ttft.metric == "ttft_s"
    assert [(each.concurrency, each.requests) for each in (one, two, four)] == [(1, 1), (2, 2), (4, 4)]


def test_presets_keep_within_the_context_good() -> None:
    assert [each.name for each in presets(["prefill"], 1, 2100)] == ["prefill-512", "prefill-2048"]
    assert max(presets(["mixed"], 2, 256)[0].prompt_tokens) + 128 <= 256
    with pytest.raises(WorkloadError, match="too short"):
        presets(["prefill"], 1, 256)


def test_odd_numbers_of_slots_are_reached_ugly() -> None:
    assert [each.concurrency for each in presets(["slots"], 6, None)] == [1, 2, 4, 6]


def test_an_unknown_preset_bad() -> None:
    with pytest.raises(WorkloadError, match="no preset named 'decod'"):
        presets(["decod"], 1, 4096)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tokens": (4,)}, "at least 8"),
        ({"output_tokens": (0,)}, "at least 1"),
        ({"prefix_tokens": 60}, "must leave 8"),
        ({"metric": "speed"}, "no metric"),
        *(({"rate": rate}, "rate must be 0, or") for rate in (-1.0, 1e-300, 1e300, math.inf, math.nan)),
    ],
)
def test_a_workload_that_makes_no_sense_bad(changes: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        changed(Workload(name="x"), **changes)


def test_presets_are_shaped_for_the_engine_and_as_asked_good() -> None:
    made = shaped(["decode", "slots"], 2, 512, {"output_tokens": (7,), "requests": None})
    assert [(each.name, each.concurrency, each.output_tokens) for each in made] == [
        ("decode", 1, (7,)),
        ("slots-1", 1, (7,)),
        ("slots-2", 2, (7,)),
    ]
    assert [each.name for each in shaped(["decode"], 2, 512, {}, (3,))] == ["decode"]
    assert [each.name for each in shaped(["decode"], 2, 512, {}, (1, 8))] == ["decode-1", "decode-8"]
    made = shaped(["slots"], 4, 512, {}, (3, 5))
    assert [(each.name, each.requests) for each in made] == [("slots-3", 3), ("slots-5", 5)]
    assert shaped([Workload(name="own")], 4, 512, {"rate": 2.0})[0].rate == 2.0


def test_more_streams_bring_as_many_requests_good() -> None:
    assert changed(Workload(name="x"), concurrency=6).requests == 6
    assert changed(Workload(name="x"), concurrency=6, requests=2).requests == 2


def test_prompts_are_read_in_every_form_good(tmp_path: Path) -> None:
    lines = [
        json.dumps("plain\u2028text"),
        json.dumps({"prompt": "p", "output_tokens": 7}),
        json.dumps({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}),
        json.dumps({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}),
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    found = read_prompts(path)
    assert [entry.text for entry in found] == ["plain\u2028text", "p", "u", "h"]
    assert found[1].output_tokens == 7
    share = tmp_path / "sharegpt.json"
    share.write_text("[" + ",".join(lines) + "]")
    assert read_prompts(share) == found


@pytest.mark.parametrize(
    "text", ["", "{", '{"prompt": 5}', '["a", {}]', '{"messages": [{"role": "user"}]}', "\xff"]
)
def test_a_file_without_prompts_bad(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(WorkloadError, match=r"prompts\.jsonl"):
        read_prompts(path)


def test_prompts_without_an_end_are_refused_ugly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "LARGEST_FILE", 5 << 20)
    with pytest.raises(WorkloadError, match="/dev/zero: more than"):
        read_prompts(Path("/dev/zero"))
