"""A profile whose model is on the hub, on the command line: planned without it, started with it."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Start, Write
from tests.fakes import until
from tests.fakes.hub import Hub, Repo, served

REPO = "owner/tiny-GGUF"


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with served() as hub:
        hub.repos[REPO] = Repo({"tiny-F32.gguf": tiny_model.read_bytes()})
        monkeypatch.setenv("HF_ENDPOINT", hub.urls["hub"])
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def test_check_asks_nobody_and_plan_fetches_nothing_good(hub: Hub, fake: Write, cli: Cli) -> None:
    profile = fake(model=f"hf:{REPO}")
    done = cli("check", profile)
    assert (done.returncode, hub.requests) == (0, [])
    done = cli("plan", profile)
    assert done.returncode == 0, done.stderr
    assert f"model: hf:{REPO} is not here: 1 file, 0.4 MiB would be downloaded" in done.stdout
    assert "no chat template" not in done.stdout
    assert not hub.contents()
    document = json.loads(cli("plan", profile, "--json").stdout)
    assert document["model"]["path"].endswith("/tiny-F32.gguf")
    assert document["model"]["architecture"] is None


def test_run_fetches_the_model_and_answers_good(hub: Hub, fake: Write, cli: Cli) -> None:
    profile = fake(model={"gguf": f"hf:{REPO}:f32"})
    done = cli("run", profile, "Hi", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert len(hub.contents()) == 1
    hub.status = 503
    done = cli("run", profile, "Hi", "--max-tokens", "4")
    assert done.returncode == 0, "what is here needs no hub"


def test_up_tells_how_far_it_is_and_can_be_called_off_good(hub: Hub, fake: Write, start: Start) -> None:
    hub.hold = threading.Event()
    up = start("up", fake(model=f"hf:{REPO}"), "--port", "0")
    arrived = re.compile("downloading the model: [1-9]0 % of")
    until(lambda: any(map(arrived.search, up.err)), "a part of the model")
    up.signal(signal.SIGINT)
    assert up.wait() == 0, up.err
    hub.hold.set()
    again = start("up", fake(model=f"hf:{REPO}"), "--port", "0")
    again.ready()
    assert hub.contents()[-1].range != "bytes=0-", "it goes on where it was called off"


def test_a_model_that_is_refused_is_told_before_anything_starts_bad(hub: Hub, fake: Write, cli: Cli) -> None:
    done = cli("up", fake(model=f"hf:{REPO}:Q4_K_M"), "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [f"model: hf:{REPO} holds no Q4_K_M", "advice: it holds F32"]
    hub.repos[REPO].gated = True
    done = cli("up", fake(model=f"hf:{REPO}"), "--port", "0")
    assert done.returncode == 2
    assert "accepted its licence" in done.stderr


def test_pull_fetches_what_is_named_good(hub: Hub, fake: Write, cli: Cli, tiny_model: Path) -> None:
    done = cli("pull", f"hf:{REPO}")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == tiny_model.read_bytes()
    assert "downloading 1 file, 0.4 MiB" in done.stderr
    hub.repos["owner/tiny"] = Repo({"config.json": b"{}", "model.safetensors": b"weights"})
    folder = Path(cli("pull", "hf:owner/tiny").stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    hub.repos["owner/eye"] = Repo({"mmproj-F16.gguf": tiny_model.read_bytes()})
    done = cli("pull", fake(model={"gguf": f"hf:{REPO}", "mmproj": "hf:owner/eye"}))
    assert done.returncode == 2, "a model is no projector"
    assert "is a model, not a projector" in done.stderr
    assert cli("pull", "hf:nobody/nothing").returncode == 2
