"""From words to arms."""

from __future__ import annotations

import pytest

from orchestrator.bench.arms import specs
from orchestrator.bench.workload import WorkloadError


def names(*subjects: str, **options: object) -> list[str]:
    return [spec.name for spec in specs(subjects, **options)]  # type: ignore[arg-type]


def test_arms_are_called_after_what_differs_good() -> None:
    assert names("a.yaml", "sub/b.yaml") == ["a", "b"]
    assert names("a.yaml", backends=["llama-server", "vllm-cpu"]) == ["llama-server", "vllm-cpu"]
    assert names("a.yaml", vary=["slots=1,2,4"]) == ["slots=1", "slots=2", "slots=4"]
    assert names("http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1") == ["127.0.0.1:1", "127.0.0.1:2"]
    assert names("a.yaml", vary=["slots=1,2", "flash_attention=on,off"]) == [
        "slots=1 flash_attention=on",
        "slots=1 flash_attention=off",
        "slots=2 flash_attention=on",
        "slots=2 flash_attention=off",
    ]


def test_overrides_are_kept_apart_from_what_all_share_good() -> None:
    first, second = specs(["a.yaml"], vary=["slots=1,2"], sets=["context=64"])
    assert (first.name, first.overrides) == ("slots=1", ("context=64", "slots=1"))
    assert second.overrides == ("context=64", "slots=2")


def test_a_control_is_the_same_arm_twice_good() -> None:
    first, second = specs(["a.yaml"], control=True)
    assert (first.name, second.name) == ("a#1", "a#2")
    assert first.subject == second.subject


def test_two_files_of_one_name_are_told_apart_ugly() -> None:
    assert names("x/a.yaml", "y/a.yaml") == ["a#1", "a#2"]


@pytest.mark.parametrize(
    ("subjects", "options", "said"),
    [
        (["a.yaml"], {}, "one arm"),
        (["a.yaml"], {"vary": ["slots=1"]}, "two values"),
        (["a.yaml"], {"vary": ["slots"]}, "KEY=VALUE"),
        (["http://127.0.0.1:1"], {"vary": ["slots=1,2"]}, "runs already"),
    ],
)
def test_words_that_make_no_two_arms_bad(subjects: list[str], options: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        specs(subjects, **options)  # type: ignore[arg-type]
