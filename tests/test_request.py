"""Request bodies: one meaning of each option, each engine's words for it."""

import pytest

from orchestrator.backend import Dialect, Endpoint
from orchestrator.errors import RequestError
from orchestrator.request import chat_body, completion_body
from orchestrator.source import OPENAI
from orchestrator.tokens import Message, ToolCall

DIALECT = Dialect(
    "engine",
    fields={
        "max_tokens": "n_predict",
        "temperature": "temperature",
        "logprobs": "logprobs",
        "stop": "stop",
        "grammar": "structured_outputs.grammar",
        "json_schema": "structured_outputs.json",
        "reasoning": "chat_template_kwargs.enable_thinking",
        "tools": "tools",
        "logit_bias": "logit_bias",
    },
    defaults={"temperature": 1.0, "top_k": 0, "samplers": ["a"], "chat_template_kwargs.x": 1},
)
AT = Endpoint("http://127.0.0.1:1", None, "m", DIALECT)


def test_defaults_always_go_along_and_options_override_them_good():
    assert completion_body(AT, "hi", {}) == {
        "model": "m",
        "prompt": "hi",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "top_k": 0,
        "samplers": ["a"],
        "chat_template_kwargs": {"x": 1},
    }
    assert completion_body(AT, "hi", {"temperature": 0})["temperature"] == 0


def test_options_go_under_the_engines_names_nested_ones_too_good():
    body = completion_body(
        AT, (1, 2), {"max_tokens": 5, "grammar": "g", "stop": ("a", "b"), "logit_bias": {7: 1.5}}
    )
    assert body["prompt"] == [1, 2]
    assert body["n_predict"] == 5
    assert "max_tokens" not in body
    assert body["structured_outputs"] == {"grammar": "g"}
    assert body["stop"] == ["a", "b"]
    assert body["logit_bias"] == {"7": 1.5}


def test_a_body_never_changes_the_dialect_ugly():
    chat_body(AT, [], {"reasoning": False})["samplers"].append("b")
    assert chat_body(AT, [], {})["samplers"] == ["a"]
    assert chat_body(AT, [], {})["chat_template_kwargs"] == {"x": 1}


def test_none_means_not_asked_good():
    assert completion_body(AT, "hi", {"temperature": None, "seed": None}) == completion_body(AT, "hi", {})


def test_option_that_the_engine_lacks_is_refused_by_name_bad():
    with pytest.raises(RequestError, match="engine does not offer min_p") as caught:
        completion_body(AT, "hi", {"min_p": 0.1})
    assert "temperature" in caught.value.advice


def test_unknown_option_is_refused_with_a_guess_bad():
    with pytest.raises(RequestError, match="unknown option 'temprature'; did you mean temperature"):
        completion_body(AT, "hi", {"temprature": 1})


@pytest.mark.parametrize("options", [{"reasoning": True}, {"tools": []}])
def test_chat_options_are_refused_for_completions_bad(options):
    with pytest.raises(RequestError, match="option of chat") as caught:
        completion_body(AT, "hi", options)
    assert caught.value.advice == "ask in a chat, or leave it out"


@pytest.mark.parametrize(("asked", "sent"), [(0, 1), (1, 1), (5, 5), (True, 1)])
def test_logprobs_in_one_field_or_two_good(asked, sent):
    assert completion_body(AT, "hi", {"logprobs": asked})["logprobs"] == sent
    body = chat_body(AT, [], {"logprobs": asked})
    assert (body["logprobs"], body["top_logprobs"]) == (True, sent)


def test_logprobs_false_asks_for_none_good():
    assert "logprobs" not in completion_body(AT, "hi", {"logprobs": False})


def test_openai_schema_gets_its_wrapping_good():
    at = Endpoint("http://x", None, "m", OPENAI)
    assert chat_body(at, [], {"json_schema": {"type": "object"}})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }


def test_a_plain_server_may_ignore_a_schema_outside_chats_so_it_is_refused_there_bad():
    with pytest.raises(
        RequestError, match="json_schema is an option of chat with this server, not of generate"
    ):
        completion_body(Endpoint("http://x", None, "m", OPENAI), "hi", {"json_schema": {"type": "object"}})
    assert "json" in completion_body(AT, "hi", {"json_schema": {}})["structured_outputs"]


@pytest.mark.parametrize("prompt", [["a", "b"], [1, "b"], [True], b"hi", None, 5, {1: 2}, [[1, 2]]], ids=repr)
def test_a_prompt_is_one_text_or_token_ids_bad(prompt):
    with pytest.raises(RequestError, match="one text, or a list of token ids"):
        completion_body(AT, prompt, {})


@pytest.mark.parametrize("most", [0, -1])
def test_no_tokens_at_all_can_not_be_asked_for_bad(most):
    with pytest.raises(RequestError, match=f"max_tokens must be at least 1, not {most}"):
        completion_body(AT, "hi", {"max_tokens": most})
    with pytest.raises(RequestError, match=f"max_tokens must be at least 1, not {most}"):
        chat_body(AT, [], {"max_tokens": most})


def test_messages_tool_answers_and_plain_dicts_good():
    call = ToolCall("c1", "f", "{}")
    turns = [
        Message("user", "hi"),
        Message("assistant", "", tool_calls=(call.to_json(),)),
        Message("tool", "42", tool_call_id="c1"),
        {"role": "user", "content": "?"},
    ]
    assert chat_body(AT, turns, {})["messages"] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "?"},
    ]


def test_extra_fields_go_over_everything_good():
    body = completion_body(AT, "hi", {"temperature": 0, "extra": {"temperature": 2, "cache_prompt": False}})
    assert (body["temperature"], body["cache_prompt"]) == (2, False)


def test_endpoint_never_shows_its_key_good():
    assert "secret" not in repr(Endpoint("http://x", "secret", "m", DIALECT))
