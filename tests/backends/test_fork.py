"""A program that forks while it owns an engine: the engine stays the parent's, in life and in death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.home import RunFolder
from orchestrator.profile import Profile
from tests.backends.conftest import alive, wait_gone

BEGIN = """
import json, multiprocessing, os, sys, time
from backends.llama_server import LlamaServer
from orchestrator.model import AsyncTextModel, TextModel
from orchestrator.profile import Profile
backend = LlamaServer(Profile.model_validate_json(sys.argv[1]))
backend.start(timeout=60)
"""

FORKS = {
    "os": """
pid = os.fork()
if pid == 0:
    time.sleep(600)
""",
    "multiprocessing": """
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
process.start()
pid = process.pid
""",
    "grandchild": """
theirs, ours = os.pipe()
if os.fork() == 0:
    if (grandchild := os.fork()):
        os.write(ours, str(grandchild).encode())
        os._exit(0)
    time.sleep(600)
pid = int(os.read(theirs, 20))
os.wait()
""",
}

TELL = """
folder = str(backend.life.folder.path)
print(json.dumps({"engine": backend.status()["engine_pids"], "fork": pid, "folder": folder}), flush=True)
time.sleep(600)
"""

# what the fork does with what it has inherited, in the middle of its parent's answer
ENDS = {
    "stop": "backend.stop()",
    "close": "model.close()",
    "close-async": "import asyncio; asyncio.run(AsyncTextModel(backend).close()); asyncio.run(other.close())",
    "exit-in-with": "model.__exit__(None, None, None)",
}

INHERIT = """
model, other = TextModel(backend), AsyncTextModel(backend)
answer = model.generate("x", max_tokens=30)
next(answer)
pid = os.fork()
if pid == 0:
    try:
        exec(sys.argv[2])
        os._exit(0)
    finally:
        os._exit(1)
code = os.waitpid(pid, 0)[1]
answer.text()
again = model.generate("x", max_tokens=3)
again.text()
print(json.dumps([code, answer.finish_reason, again.finish_reason, str(backend.state)]), flush=True)
model.close()
"""


@pytest.mark.parametrize("fork", FORKS)
def test_death_of_the_owner_ends_its_engine_though_a_fork_lives_ugly(
    fake_profile: Callable[..., Profile], fork: str
) -> None:
    profile = fake_profile(timeouts={"start": 30, "stop": 0.5, "stall": 30})
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + FORKS[fork] + TELL, profile.model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout
        told = json.loads(owner.stdout.readline())
        try:
            folder = RunFolder(Path(told["folder"]))
            assert folder.held
            owner.kill()
            owner.wait(20)
            assert not folder.held
            wait_gone(told["engine"])
            assert alive([told["fork"]])
        finally:
            owner.kill()
            os.kill(told["fork"], signal.SIGKILL)


@pytest.mark.parametrize("end", ENDS)
def test_fork_leaves_its_parents_engine_and_answers_alone_good(
    fake_profile: Callable[..., Profile], end: str
) -> None:
    profile = fake_profile({"rate": 50, "eos_after": 1000})
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + INHERIT, profile.model_dump_json(), ENDS[end]],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, "length", "length", "ready"]
