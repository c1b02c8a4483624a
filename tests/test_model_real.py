"""TextModel and AsyncTextModel on the real llama-server with the real Gemma 3 270M."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
import time

import httpx
import pytest

import orchestrator
from orchestrator.backend import Dialect, Endpoint
from orchestrator.errors import BadStatus, StreamInterrupted
from orchestrator.model import AsyncTextModel, TextModel
from orchestrator.source import Server, Settings
from orchestrator.tokens import Message

pytestmark = pytest.mark.real

PROMPT = "The capital of France is"
SAME = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "tools"),
    *("presence_penalty", "frequency_penalty", "grammar", "json_schema", "ignore_eos", "logit_bias"),
)

# What llama-server 11434 understands, option by option, as these tests prove.
LLAMA_SERVER = Dialect(
    "llama-server",
    fields={
        **{name: name for name in SAME},
        "logprobs": "n_probs",
        "reasoning": "chat_template_kwargs.enable_thinking",
    },
    defaults={
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 131072,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
        "return_progress": True,
    },
)


class Engine:
    """A llama-server of the tests' own."""

    def __init__(self, binary, model, *args):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.key = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [
                *(str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)),
                *("--alias", "gemma", "--fit", "off", "--no-ui", "-np", "4", *args),
            ],
            env={**os.environ, "LLAMA_API_KEY": self.key},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.key}"},
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.until(self._ready)

    def _ready(self):
        assert self.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200

    @staticmethod
    def until(true, seconds=60):
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def source(self, **settings):
        return Server(Endpoint(self.url, self.key, "gemma", LLAMA_SERVER), Settings(slots=4, **settings))

    def slots(self):
        return self.http.get("/slots").json()

    def busy(self):
        return [slot for slot in self.slots() if slot["is_processing"]]

    def close(self):
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def engine(llama_server_binary, gemma_gguf):
    # A small batch, so that a prompt is read in many steps between which a cancellation can be seen.
    engine = Engine(llama_server_binary, gemma_gguf, "-c", "8192", "-b", "32", "-ub", "32")
    yield engine
    engine.close()


@pytest.fixture
def model(engine):
    with TextModel(engine.source()) as model:
        yield model


def test_greedy_answer_with_the_servers_own_counts_good(model):
    generation = model.generate(PROMPT, max_tokens=8, temperature=0)
    tokens = list(generation)
    assert (
        "".join(token.text for token in tokens)
        == generation.text()
        == " the capital of the country of France."
    )
    assert generation.finish_reason == "length"
    assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (6, 8)
    assert model.metrics.timings.predicted_n == 8
    assert model.metrics.decode_tok_s > 0
    assert generation.prompt_progress == (6, 6)


def test_async_gives_the_same_answer_good(engine, model):
    async def main():
        async with AsyncTextModel(engine.source()) as other:
            generation = other.generate(PROMPT, max_tokens=16, temperature=0)
            return await generation.text(), generation.usage.completion_tokens

    generation = model.generate(PROMPT, max_tokens=16, temperature=0)
    assert asyncio.run(main()) == (generation.text(), generation.usage.completion_tokens)


def test_logprobs_bring_ids_and_alternatives_good(model):
    tokens = list(model.generate(PROMPT, max_tokens=2, temperature=0, logprobs=3))
    assert [token.id for token in tokens] == [506, 5279]
    assert all(token.logprob == token.top[0].logprob and len(token.top) == 3 for token in tokens)


def test_prompt_of_token_ids_gives_the_same_as_its_text_good(engine, model):
    ids = engine.http.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    by_text = model.generate(PROMPT, max_tokens=8, temperature=0)
    by_ids = model.generate(ids, max_tokens=8, temperature=0)
    assert by_text.text() == by_ids.text()
    assert by_text.usage.prompt_tokens == by_ids.usage.prompt_tokens


def parameters(engine, model, path, **options):
    """Return the sampling parameters with which the server really ran a request."""
    extra = {"id_slot": 0}
    if path == "chat":
        model.chat([Message("user", "hi")], max_tokens=1, extra=extra, **options).text()
    else:
        model.generate("hi", max_tokens=1, extra=extra, **options).text()
    return next(slot for slot in engine.slots() if slot["id"] == 0)["params"]


@pytest.mark.parametrize("path", ["completion", "chat"])
def test_the_servers_default_samplers_never_leak_in_good(engine, model, path):
    used = parameters(engine, model, path)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    assert {name: used[name] for name in neutral} == neutral
    assert used["samplers"] == ["penalties", "temperature", "min_p", "top_k", "top_p"]
    assert used["n_probs"] == 0


@pytest.mark.parametrize("path", ["completion", "chat"])
@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("temperature", 0.5, "temperature"),
        ("top_k", 7, "top_k"),
        ("top_p", 0.5, "top_p"),
        ("min_p", 0.25, "min_p"),
        ("seed", 11, "seed"),
        ("repeat_penalty", 1.5, "repeat_penalty"),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", 0.25, "frequency_penalty"),
        ("ignore_eos", True, "ignore_eos"),
        ("logprobs", 3, "n_probs"),
    ],
)
def test_every_option_reaches_the_sampler_good(engine, model, path, option, value, name):
    assert parameters(engine, model, path, **{option: value})[name] == value


def test_stop_text_ends_the_output_and_is_not_part_of_it_good(model):
    generation = model.generate(PROMPT, max_tokens=40, temperature=0, stop=[" country"])
    assert generation.text() == " the capital of the"
    assert generation.finish_reason == "stop"


def test_seed_repeats_the_same_choices_good(model):
    first, again, other = (model.generate("Once", max_tokens=12, seed=seed).text() for seed in (3, 3, 4))
    assert first == again != other


def test_grammar_and_schema_bind_the_output_good(model):
    assert model.generate(PROMPT, max_tokens=5, grammar='root ::= "yes" | "no"').text() in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for generation in (
        model.generate("x", max_tokens=40, json_schema=schema, temperature=0),
        model.chat([Message("user", "x")], max_tokens=40, json_schema=schema, temperature=0),
    ):
        assert json.loads(generation.text()) == {"a": 7}


def test_bad_grammar_is_the_servers_own_words_bad(model):
    with pytest.raises(BadStatus, match="grammar") as caught:
        model.generate("x", grammar="root ::= nonsense").text()
    assert caught.value.status == 400


def test_prompt_beyond_the_context_says_what_to_do_bad(model):
    with pytest.raises(BadStatus, match="exceeds the available context size") as caught:
        model.generate([2] + [1000] * 3000, max_tokens=1).text()
    assert "context" in caught.value.advice
    assert model.generate("x", max_tokens=1).text() is not None


def test_wrong_key_bad(engine):
    with pytest.raises(BadStatus, match="401") as caught:
        orchestrator.connect(engine.url, key="wrong")
    assert "key" in caught.value.advice


def test_connect_finds_out_what_it_is_good(engine):
    with orchestrator.connect(engine.url, key=engine.key) as model:
        assert model.slots == 4
        assert (model.info.context, model.info.vocabulary) == (2048, 262144)
    assert engine.process.poll() is None


def test_eight_requests_on_four_slots_all_complete_good(engine, model):
    results = model.batch_generate([f"Number {n} is" for n in range(8)], max_tokens=12, ignore_eos=True)
    assert [result.error for result in results] == [None] * 8
    assert [result.usage.completion_tokens for result in results] == [12] * 8


def test_every_label_gets_its_exact_probability_good(engine, model):
    labels = [" Paris", " London", " the capital", " the"]
    (result,) = model.classify([PROMPT], labels)
    assert sum(result.probabilities.values()) == pytest.approx(1)
    assert result.label in {
        " the",
        " the capital",
    }  # " the" takes most, and the longer one about half of that
    (fewer,) = model.classify([PROMPT], [" Paris", " London", " the"])
    assert fewer.label == " the"
    assert fewer.probabilities[" the"] == pytest.approx(
        result.probabilities[" the"] + result.probabilities[" the capital"], rel=0.01
    )
    # The same by hand: the first token's probabilities over the whole vocabulary.
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "n_probs": 3000}
    answer = engine.http.post("/v1/completions", json=body, timeout=60).json()
    top = {
        entry["token"]: entry["logprob"]
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    }
    ratio = result.probabilities[" Paris"] / result.probabilities[" London"]
    assert ratio == pytest.approx(2.718281828 ** (top[" Paris"] - top[" London"]), rel=0.05)
    both = result.probabilities[" the"] + result.probabilities[" the capital"]
    assert both / result.probabilities[" Paris"] == pytest.approx(
        2.718281828 ** (top[" the"] - top[" Paris"]), rel=0.05
    )


# -- cancelling frees the slot ----------------------------------------------------------------------


def test_break_frees_the_slot_good(engine, model):
    for _ in model.generate("Once", max_tokens=1900, ignore_eos=True):
        assert engine.busy()
        break
    engine.until(lambda: not engine.busy())


def long_prompt():
    return [2] + [1000 + secrets.randbelow(50000) for _ in range(1900)]  # never in the cache


def test_closing_while_the_prompt_is_read_frees_the_slot_good(engine, model):
    generation = model.generate(long_prompt(), max_tokens=8)
    reader = threading.Thread(target=lambda: list(generation))
    reader.start()
    engine.until(lambda: (generation.prompt_progress or (0, 0))[0] > 0)
    generation.close()
    reader.join(20)
    engine.until(lambda: not engine.busy())
    read, total = generation.prompt_progress
    assert read < total
    assert generation.partial == ""


def test_cancelled_task_frees_the_slot_while_the_prompt_is_read_good(engine):
    async def main():
        async with AsyncTextModel(engine.source()) as model:
            generation = model.generate(long_prompt(), max_tokens=8)
            task = asyncio.create_task(generation.text())
            await asyncio.to_thread(engine.until, lambda: (generation.prompt_progress or (0, 0))[0] > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return generation.prompt_progress

    read, total = asyncio.run(main())
    engine.until(lambda: not engine.busy())
    assert read < total


def test_killed_engine_is_an_interruption_with_the_text_so_far_bad(llama_server_binary, gemma_gguf):
    engine = Engine(llama_server_binary, gemma_gguf, "-c", "8192")
    try:
        with TextModel(engine.source()) as model:
            generation = model.generate("Once", max_tokens=1900, ignore_eos=True)
            first = next(generation)
            engine.process.kill()
            with pytest.raises(StreamInterrupted) as caught:
                generation.text()
            assert caught.value.partial.startswith(first.text)
            assert model.last_error is caught.value
    finally:
        engine.close()
