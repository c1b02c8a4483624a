"""The client against the server of known pace."""

from __future__ import annotations

from orchestrator.bench import selftest
from orchestrator.bench.session import run


def test_the_client_can_say_what_it_is_able_to_good() -> None:
    found = run(selftest.self_test(streams=8))
    assert found.streams == 8
    assert found.events == 8 * 42
    assert found.ceiling_events_s > 0
    assert found.read_delay_s > 0  # no read is stamped before it was written
    assert found.ttft_error_s > 0  # a request is sent before it is received
    assert abs(found.decode_error) < 0.5
    assert found.ok == (not found.reasons)
