"""How llama-server fails: its known messages, and what to do about each.

A taken port is no failure but a retry, so it is not here; nor is ``no usable GPU found``, with which a CPU
build starts well.
"""

from __future__ import annotations

from backends.failures import DEVICE_FAILURES, Failure, known

LLAMA_SERVER_FAILURES: tuple[Failure, ...] = (
    known(
        "unknown-argument",
        r"error: invalid argument: -",
        "this llama-server does not know that argument: correct `args`, or update llama.cpp",
    ),
    known(
        "no-such-device",
        r"invalid device: \S",
        "there is no device of that name: `llama-server --list-devices` names them; correct `args` or `gpus`",
    ),
    known(
        "template-missing",
        r'handling argument "--chat-template',
        "the chat template can't be read: correct `chat_template`",
    ),
    known(
        "template-bad",
        r"chat template is not supported",
        "llama-server can't use that chat template: correct `chat_template`, or leave it out",
    ),
    known(
        "bad-argument",
        r"error while handling argument",
        "llama-server refuses an argument's value: correct the profile's key or `args`",
    ),
    known(
        "unknown-architecture",
        r"unknown model architecture",
        "this llama.cpp is older than the model: update it, or take another model",
    ),
    known(
        "unsupported-gguf-version",
        r"GGUF file is version \d+",
        "this llama.cpp does not read that version of GGUF: update it, or convert the model again",
    ),
    known(
        "unsupported-quantisation",
        r"invalid ggml type",
        "this llama.cpp does not know the model's quantisation: update it, or take another quantisation",
    ),
    known(
        "tokenizer-missing",
        r"error loading model vocabulary",
        "the model has no tokenizer that llama.cpp can use: take another conversion of it",
    ),
    known("draft-missing", r"failed to load draft model", "the draft model can't be read: correct `args`"),
    known(
        "mmproj-missing",
        r"failed to load (CLIP|multimodal) model",
        "the multimodal projector can't be read: correct `model.mmproj`, it has to be made for this model",
    ),
    known(
        "lora-missing",
        r"failed to load lora adapter",
        "a LoRA adapter can't be read: correct `model.lora`, it has to be made for this model",
    ),
    known(
        "model-permission",
        r"failed to open GGUF file .*\(permission denied\)",
        "the model file may not be read: chmod or chown it, and give every folder above it the x permission",
    ),
    known("model-not-found", r"failed to open GGUF file", "the model file is gone: correct `model`"),
    known(
        "not-a-model",
        r"invalid magic characters|failed to read magic",
        "the file is not a GGUF model: correct `model`; a page or a pointer may have been downloaded instead",
    ),
    known(
        "broken-model",
        r"not within the file bounds|failed to read key-value pairs|check_tensor_dims: tensor .* not found"
        r"|wrong number of tensors",
        "the model file is broken or was not downloaded whole: fetch it again",
    ),
    known(
        "context-too-long-for-memory",
        r"failed to allocate buffer for kv cache",
        "no memory for the context: lower `context` or `slots`, set `kv_cache_type: q8_0`, "
        "or lower `gpu_layers`",
    ),
    known(
        "out-of-memory",
        r"out of memory|cannot allocate memory|insufficient memory|unable to allocate \S+ buffer"
        r"|ErrorOutOf(Device|Host)Memory",
        "not enough memory: close what else uses it, lower `context` or `slots`, set `kv_cache_type: q8_0`, "
        "lower `gpu_layers`, or take a smaller quantisation",
    ),
    *DEVICE_FAILURES,
)
