"""The tables of known failures, on messages that were really seen: each file names where."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.failures import Failure, diagnose
from backends.failures_llama_server import LLAMA_SERVER_FAILURES
from backends.failures_vllm import VLLM_FAILURES
from backends.llama_server import LlamaServer
from backends.process import Tail
from orchestrator.backend import State
from orchestrator.errors import ExitedEarly
from tests.backends.conftest import Recorder, launches

MESSAGES = Path(__file__).parent.parent / "data" / "engine_messages"
TABLES = {"llama-server": LLAMA_SERVER_FAILURES, "vllm": VLLM_FAILURES}

# what the collection calls otherwise than the tables do
KINDS = {
    "out-of-memory-load": "out-of-memory",
    "out-of-memory-use": "out-of-memory",  # the same words; only the moment differs
    "invalid-device-function": "no-kernels-for-gpu",
    "rocblas-no-kernels": "no-kernels-for-gpu",
    "engine-died": "engine-failed",
}
# retried on another port, or told by engines that go on
NO_FAILURE = {"port-taken", "address-unusable", "no-gpu-support", "healthy", "healthy-pinned"}
# a retry, or the next request, may well succeed
PASSING = {"gpu-fault", "memory-not-free", "template-missing", "engine-failed"}


def message(path: Path) -> tuple[str, str, str]:
    """Return engine, kind and the message without the line that says where it was found."""
    engine, kind, _, _ = path.name.split(".")
    source, _, text = path.read_text().partition("\n")
    assert source.startswith("# found: "), path
    return engine, kind, text


def expected_kind(kind: str) -> str | None:
    return None if kind in NO_FAILURE else KINDS.get(kind, kind)


@pytest.mark.parametrize("path", sorted(MESSAGES.glob("*.txt")), ids=lambda path: path.stem)
def test_every_message_that_was_seen_is_known_good(path: Path) -> None:
    engine, kind, text = message(path)
    found = diagnose(TABLES[engine], text)
    assert (found.kind if found else None) == expected_kind(kind)
    if found:
        permanent = found.kind not in PASSING or (engine, found.kind) == ("llama-server", "template-missing")
        assert found.permanent is permanent


@pytest.mark.parametrize("path", sorted(MESSAGES.glob("*.txt")), ids=lambda path: path.stem)
def test_a_message_is_known_amid_a_long_log_ugly(path: Path) -> None:
    engine, kind, text = message(path)
    healthy = message(MESSAGES / "llama-server.healthy.1.txt")[2]
    found = diagnose(TABLES[engine], f"{healthy}\n{text}\n{healthy}")
    assert (found.kind if found else None) == expected_kind(kind)


@pytest.mark.parametrize("engine", TABLES)
def test_every_row_has_a_message_that_was_seen_good(engine: str) -> None:
    seen = {
        found.kind
        for path in MESSAGES.glob("*.txt")
        if (found := diagnose(TABLES[engine], message(path)[2])) is not None
    }
    without = {failure.kind for failure in TABLES[engine]} - seen
    assert without <= {"bad-argument"}, "vLLM's is argparse's own wording"


@pytest.mark.parametrize("failure", [*LLAMA_SERVER_FAILURES, *VLLM_FAILURES], ids=lambda f: f.kind)
def test_advice_says_what_to_do_in_one_line_good(failure: Failure) -> None:
    assert "\n" not in failure.advice
    assert failure.advice[0].islower() or failure.advice.startswith(("vLLM", "GPU", "FP8"))
    assert not failure.advice.endswith(".")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_kind_is_named_once_good(table: tuple[Failure, ...]) -> None:
    kinds = [failure.kind for failure in table]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize(
    "line",
    [
        "0.00.302.439 W load: control-looking token: 212 '</s>' was not control-type; unable to tell why",
        "WARNING [interface.py:222] Failed to import from vllm._C: ImportError('libcudart.so.12: "
        "cannot open shared object file: No such file or directory')",
        "INFO [loggers.py:257] Engine 000: GPU KV cache usage: 99.0%, memory in use, nothing is out of order",
        "srv    operator(): unauthorized: Invalid API Key",
        "srv    send_error: task id = 5, error: request (9999 tokens) exceeds the available context size",
        "",
    ],
)
def test_what_a_healthy_engine_says_is_no_failure_good(table: tuple[Failure, ...], line: str) -> None:
    assert diagnose(table, line) is None


@pytest.mark.real
def test_the_real_engine_started_well_is_no_failure_good(engine: Callable[..., LlamaServer]) -> None:
    backend = engine(command=None, env={"LLAMA_LOG_VERBOSITY": "5"}, args=("--verbose",))
    backend.start(timeout=60)
    log = Path(backend.status()["log"]).read_text(errors="replace")
    assert len(log.splitlines()) > 100
    assert diagnose(LLAMA_SERVER_FAILURES, log) is None


@pytest.mark.real
@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"args": ("--no-such-flag",)}, "unknown-argument"),
        ({"args": ("--lora", "/nowhere.gguf")}, "lora-missing"),
        ({"args": ("--threads", "many")}, "bad-argument"),
        ({"args": ("--device", "ROCm7")}, "no-such-device"),
        ({"args": ("--chat-template-file", "/nowhere")}, "template-missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_real_engines_refusal_is_told_at_once_with_advice_bad(
    engine: Callable[..., LlamaServer], keys: dict[str, object], kind: str
) -> None:
    backend = engine(command=None, env={}, **keys)
    with pytest.raises(ExitedEarly) as caught:  # not GaveUp: nothing is retried
        backend.start(timeout=60)
    assert caught.value.advice == next(f.advice for f in LLAMA_SERVER_FAILURES if f.kind == kind)
    assert backend.status()["restarts"] == 0


def test_an_illegal_instruction_is_told_with_advice_and_not_retried_bad(
    engine: Callable[..., LlamaServer], tmp_path: Path
) -> None:
    backend = engine({"exit_after": 0.0, "exit_code": -signal.SIGILL, "say": ["nothing that tells"]})
    with pytest.raises(ExitedEarly, match="killed by SIGILL") as caught:
        backend.start(timeout=60)
    assert "compiled for another processor" in str(caught.value.advice)
    assert launches(tmp_path) == 1


PERMANENT = [
    "error: invalid argument: --frob",
    "gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)",
    "llama_model_load: error loading model: unknown model architecture: 'future'",
    "llama_model_load: error loading model: unable to allocate ROCm0 buffer",
    "ggml_cuda_init: failed to initialize ROCm: no ROCm-capable device is detected",
    "ROCm error: invalid device function",
    "Unable to open /dev/kfd read-write: Permission denied",
]


@pytest.mark.parametrize("line", PERMANENT)
def test_what_no_retry_mends_fails_at_once_bad(
    engine: Callable[..., LlamaServer], tmp_path: Path, line: str
) -> None:
    backend = engine({"exit_after": 0.0, "exit_code": 1, "say": [line, *["told afterwards"] * 100]})
    with pytest.raises(ExitedEarly) as caught:
        backend.start(timeout=60)
    found = diagnose(LLAMA_SERVER_FAILURES, line)
    assert found
    assert caught.value.advice == found.advice
    assert launches(tmp_path) == 1


@pytest.mark.parametrize(
    "line",
    [
        "what():  vk::Queue::submit: ErrorDeviceLost",
        "warning: no usable GPU found, --gpu-layers option will be ignored",  # each start of a CPU build
        "something that nobody ever saw",
    ],
)
def test_what_may_pass_is_retried_good(engine: Callable[..., LlamaServer], tmp_path: Path, line: str) -> None:
    backend = engine({"launches": [{"exit_after": 0.0, "exit_code": -6, "say": [line]}]})
    backend.start(timeout=60)
    assert launches(tmp_path) == 2


def test_a_crash_in_use_is_retried_whatever_it_says_and_advises_good(
    engine: Callable[..., LlamaServer], tmp_path: Path
) -> None:
    dying = {"exit_after": 0.2, "exit_from": "ready", "exit_code": -6, "say": ["CUDA error: out of memory"]}
    backend = engine({"launches": [dying]})
    heard = Recorder(backend)
    backend.start(timeout=60)
    heard.wait_state(State.READY, 2)
    restarting = heard.wait(lambda event: event.name == "state" and event.state is State.RESTARTING)
    assert "not enough memory" in restarting.fields["advice"]
    assert launches(tmp_path) == 2


def test_patterns_are_quick_on_a_long_log_ugly() -> None:
    log = "slot print_timing: id 0 | a model's max seq len, cannot open\n" * 4000
    log += "Free memory on device " * 2000
    for table in TABLES.values():
        assert diagnose(table, log) is None


@pytest.mark.parametrize(
    ("line", "tells"),
    [
        ("0.00.027.026 I srv    load_model: loading model 'gemma.gguf'", True),
        ("0.04.616.767 I srv    load_model: initializing, n_slots = 4", True),
        ("0.01.145.892 W load: control-looking token:    212 '</s>' was not control-type", False),
        ("0.04.776.311 I slot launch_slot_: id  3 | task 0 | processing task, is_child = 0", False),
        ("warning: consult docs/build.md for compilation instructions", False),
    ],
)
def test_only_lines_that_tell_of_progress_are_stages_good(line: str, tells: bool) -> None:
    assert bool(LlamaServer.stages.search(line)) == tells


def test_what_means_nothing_on_a_cpu_is_not_among_the_last_words_good(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    tail = Tail(log)
    log.write_text(
        "warning: no usable GPU found, --gpu-layers option will be ignored\n"
        "warning: one possible reason is that llama.cpp was compiled without GPU support\n"
        "warning: consult docs/build.md for compilation instructions\n"
        "error: the cause\n"
    )
    assert len(tail.lines(20)) == 4
    tail.noise = LlamaServer.noise_on_cpu
    assert tail.lines(20) == ["error: the cause"]
