"""How vLLM fails: its known messages, and what to do about each.

A taken port is no failure but a retry, so it is not here.
"""

from __future__ import annotations

from backends.failures import DEVICE_FAILURES, Failure, known

VLLM_FAILURES: tuple[Failure, ...] = (
    known(
        "unknown-argument",
        r"error: unrecognized arguments",
        "this vLLM does not know that argument: correct `args`, or update vLLM",
    ),
    known(
        "bad-argument",
        r"error: argument \S+: (invalid|expected)",
        "vLLM refuses an argument's value: correct the profile's key or `args`",
    ),
    known(
        "context-longer-than-model",
        r"max_model_len \(\d+\) is greater than the derived",
        "the model was not made for a context that long: lower `context`",
    ),
    known(
        "context-too-long-for-memory",
        r"model's max seq len \(\d+\)",
        "no memory for the context: lower `context`, raise `memory_fraction`, or take a smaller quantisation",
    ),
    known(
        "memory-not-free",
        r"free memory on device .*less than desired GPU memory utilization",
        "another program holds the GPU's memory: end it, or lower `memory_fraction`",
        permanent=False,  # it may be on its way out
    ),
    known(
        "no-memory-for-cache",
        r"no available memory for the cache blocks",
        "the model fills the memory that vLLM may use: raise `memory_fraction`, "
        "or take a smaller model or quantisation",
    ),
    known(
        "out-of-memory",
        r"(CUDA|HIP)( error:)? out of memory|OutOfMemoryError",
        "not enough GPU memory: close what else uses it, lower `context` or `slots`, "
        "lower `memory_fraction` if the model itself fits, or take a smaller quantisation",
    ),
    known(
        "unsupported-quantisation",
        r"quantization (method \S+ )?is (currently )?not supported",
        "this card or this vLLM can't run the model's quantisation (FP8 does not run on gfx11): "
        "take an AWQ, GPTQ or unquantised model",
    ),
    known(
        "unknown-architecture",
        r"model architectures \[.*\] (are not supported|failed to be inspected)",
        "this vLLM does not know the model's architecture: update it, take another model, "
        "or serve a GGUF of it with llama-server",
    ),
    known(
        "model-not-found",
        r"invalid repository id or local directory|repo id must be in the form",
        "there is no such model: correct `model`; vLLM wants a folder with config.json, or owner/name",
    ),
    known(
        "tokenizer-missing",
        r"unable to load vocabulary|couldn't instantiate the backend tokenizer",
        "the model's folder lacks its tokenizer: fetch tokenizer.json and tokenizer_config.json too",
    ),
    *DEVICE_FAILURES,
    known(
        "template-missing",
        r"default chat template is no longer allowed",
        "the model has no chat template: set `chat_template`",
        permanent=False,  # chats are refused, all else is served
    ),
    known(
        "engine-failed",
        r"engine core initialization failed|EngineDeadError",
        "vLLM tells the cause further up: see `orchestrator logs`",
        permanent=False,
    ),
)
