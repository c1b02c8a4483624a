"""What resists SIGKILL: it is named, nothing is started on top of it, and a later stop looks again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from backends import guardian
from backends.llama_server import LlamaServer
from orchestrator.backend import State
from orchestrator.errors import StopFailed
from tests.backends.conftest import Recorder, alive


def test_survivors_are_named_and_keep_the_next_start_away_ugly(
    engine: Callable[..., LlamaServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a driver that does not let a process go: neither the guardian's nor our own SIGKILL ends it."""
    meek = tmp_path / "guardian.py"
    source = Path(guardian.__file__).read_text()
    assert source.count("os.kill(pid, number)") == 1
    meek.write_text(source.replace("os.kill(pid, number)", "number == 9 or os.kill(pid, number)"))
    monkeypatch.setattr("backends.launch.END_PATIENCE", 1.5)
    backend = engine(
        {"children": ["double+session+stubborn"]}, timeouts={"start": 30, "stop": 0.2, "stall": 30}
    )
    heard = Recorder(backend)
    with monkeypatch.context() as patch:
        patch.setattr(guardian, "__file__", str(meek))
        backend.start(timeout=60)
    _, stubborn = backend.status()["engine_pids"]
    with monkeypatch.context() as patch:
        patch.setattr("backends.process.end", lambda *_: (stubborn,))
        with pytest.raises(StopFailed, match=f"survived a stop: pid {stubborn}") as caught:
            backend.stop()
        assert caught.value.survivors == (stubborn,)
        assert alive([stubborn]) == [stubborn]
        assert backend.state is State.STUCK
        assert heard.states()[-2:] == [State.STOPPING, State.STUCK]
        with pytest.raises(StopFailed):
            backend.start()
        assert not psutil.Process().children(), "the guardian, which was ended, is no zombie"
    os.kill(stubborn, signal.SIGKILL)
    backend.stop()
    assert backend.state is State.STOPPED
    assert backend.start(timeout=60).url
