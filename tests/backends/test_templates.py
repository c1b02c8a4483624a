"""Real chat templates on both real engines: the same text, one BOS, and one meaning of `reasoning`.

Both serve tiny models with one vocabulary: a token for each byte and for each marker of the families. So the
ids say exactly which text a model would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.llama_server import LlamaServer
from backends.vllm import VllmCpu
from orchestrator.profile import ModelSpec, Profile
from orchestrator.request import chat_body
from tests import gguf_files, hf_models
from tests.backends.vllm_real import DUMMY, SMALL, vllm_environ

__all__ = ["vllm_environ"]  # a fixture

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"
BOS, EOS = "<begin>", "<end>"
SPECIAL = (
    *(BOS, EOS, "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
FAMILIES = ("gemma3", "llama3.1", "qwen3")
SYSTEM = {"role": "system", "content": "You answer in one word."}
ASKED = {"role": "user", "content": "  What is the capital of France? \n"}
TURNS = [
    ASKED,
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "Et l'Italie? 日本 🙂"},
]
TALKS = {
    "one turn": [ASKED],
    "a system message": [SYSTEM, ASKED],
    "several turns": TURNS,
    "several turns after a system message": [SYSTEM, *TURNS],
}


@pytest.fixture(scope="module")
def vllm(
    vllm_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., list[int]]]:
    """Render a chat with vLLM: the ids that its model gets. One boot for all; a request has its template."""
    root = tmp_path_factory.mktemp("templates")
    profile = Profile(
        name="tiny",
        model=ModelSpec(hf=str(hf_models.tiny(root / "model", special=SPECIAL))),
        backend="vllm-cpu",
        context=1024,
        args=(*DUMMY, "--trust-request-chat-template"),
        options={"vllm": SMALL},
        timeouts={"start": 280, "stop": 10, "stall": 120},
    )
    backend = VllmCpu(profile, environ={**vllm_environ, "ORCHESTRATOR_HOME": str(root / "home")})
    endpoint = backend.start()
    headers = {"authorization": f"Bearer {endpoint.key}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=60, trust_env=False) as client:

        def ids(family: str, messages: list[dict[str, str]], **options: Any) -> list[int]:
            body = chat_body(endpoint, messages, {"max_tokens": 1, **options})
            body = {**body, "chat_template": template_of(family), "stream": False}
            body.pop("stream_options", None)
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            kept = ("model", "messages", "chat_template", "chat_template_kwargs")
            asked = {name: body[name] for name in kept if name in body}
            found: list[int] = client.post("/tokenize", json=asked).json()["tokens"]
            assert len(found) == answer.json()["usage"]["prompt_tokens"]
            return found

        yield ids
    backend.stop(0)


@pytest.fixture(scope="module", params=FAMILIES)
def llama(
    request: pytest.FixtureRequest, llama_server_binary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Callable[..., list[int]]]]:
    """Render a chat with llama-server, whose model has the family's template, and BOS as its models do."""
    family: str = request.param
    root = tmp_path_factory.mktemp("llama")
    model = gguf_files.tiny_llama(
        root / "tiny.gguf", special=SPECIAL, begin=family != "qwen3", chat_template=template_of(family)
    )
    profile = Profile(
        name="tiny",
        model=ModelSpec(gguf=str(model)),
        backend="llama-server",
        context=1024,
        command=(str(llama_server_binary),),
        device="cpu",
    )
    backend = LlamaServer(profile, environ={"PATH": "/usr/bin:/bin", "ORCHESTRATOR_HOME": str(root / "home")})
    endpoint = backend.start(timeout=120)
    headers = {"authorization": f"Bearer {endpoint.key}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=60, trust_env=False) as client:

        def ids(messages: list[dict[str, str]], **options: Any) -> list[int]:
            body = chat_body(endpoint, messages, {"max_tokens": 1, **options})
            body = {**body, "stream": False}
            body.pop("stream_options", None)
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            text = client.post("/apply-template", json=body).json()["prompt"]
            asked = {"content": text, "add_special": True, "parse_special": True}
            found: list[int] = client.post("/tokenize", json=asked).json()["tokens"]
            assert len(found) == answer.json()["usage"]["prompt_tokens"]
            return found

        yield family, ids
    backend.stop(0)


def template_of(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text()


def text_of(ids: list[int]) -> str:
    """Return the text of ids: markers by name, the rest bytes."""
    letters = hf_models.byte_letters()
    values = {letter: byte for byte, letter in enumerate(letters)}
    whole = b""
    for each in ids:
        if each < len(SPECIAL):
            whole += SPECIAL[each].encode()
        else:
            whole += bytes([values[letters[each - len(SPECIAL)]]])
    return whole.decode()


@pytest.mark.parametrize("talk", TALKS)
def test_both_engines_read_the_same_text_with_one_bos_good(talk: str, vllm: Any, llama: Any) -> None:
    family, rendered = llama
    ours, theirs = rendered(TALKS[talk]), vllm(family, TALKS[talk])
    assert text_of(ours) == text_of(theirs)
    assert ours == theirs
    assert ours.count(SPECIAL.index(BOS)) == (0 if family == "qwen3" else 1)
    if family != "qwen3":
        assert ours[0] == SPECIAL.index(BOS)
    assert "What is the capital of France?" in text_of(ours)
    assert ("one word" in text_of(ours)) is ("system" in talk)


@pytest.mark.parametrize(("reasoning", "ends"), [(True, "assistant\n"), (False, "<think>\n\n</think>\n\n")])
@pytest.mark.parametrize("llama", ["qwen3"], indirect=True)
def test_reasoning_switches_the_thinking_of_both_good(
    reasoning: bool, ends: str, vllm: Any, llama: Any
) -> None:
    family, rendered = llama
    ours = rendered(TURNS, reasoning=reasoning)
    assert text_of(ours) == text_of(vllm(family, TURNS, reasoning=reasoning))
    assert text_of(ours).endswith(ends)


@pytest.mark.parametrize("llama", ["qwen3"], indirect=True)
def test_thoughts_of_an_earlier_answer_are_dropped_by_both_good(vllm: Any, llama: Any) -> None:
    family, rendered = llama
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis"}
    ours = rendered([ASKED, thought, TURNS[-1]])
    assert text_of(ours) == text_of(vllm(family, [ASKED, thought, TURNS[-1]]))
    assert "hm" not in text_of(ours)
    assert "Paris" in text_of(ours)
