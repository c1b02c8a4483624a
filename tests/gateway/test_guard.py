"""Who is answered: names, origins, keys, paths."""

from __future__ import annotations

import pytest

from orchestrator.gateway import Gateway
from orchestrator.gateway.guard import is_loopback
from tests.gateway.scripted import behind_gateway, connected, get, in_loop, ok

OWN = "sk-gateway-secret"


def status_of(raw: str, **options: object) -> tuple[int, dict[str, str]]:
    """Send a head as it stands; return status and headers."""
    got: list[tuple[int, dict[str, str]]] = []

    @in_loop
    async def run() -> None:
        async with behind_gateway(ok, **options) as setup, connected(setup.port) as client:
            client.write(raw.replace("PORT", str(setup.port)).encode() + b"\r\n\r\n")
            answer = await client.answer()
            got.append((answer.status, answer.headers))

    run()
    return got[0]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:PORT", "localhost:PORT", "[::1]:PORT", "LOCALHOST", "127.0.0.1:9"]
)
def test_names_of_this_machine_are_answered_good(host: str) -> None:
    assert status_of(f"GET /health HTTP/1.1\r\nHost: {host}")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example:PORT", "127.0.0.1.evil.example", "localhost.evil", "", "[::2]"]
)
def test_rebound_names_are_refused_bad(host: str) -> None:
    assert status_of(f"GET /v1/models HTTP/1.1\r\nHost: {host}")[0] == 403


@in_loop
async def test_configured_name_is_answered_good() -> None:
    async with (
        behind_gateway(ok, host="127.0.0.2") as setup,
        connected(setup.port, host="127.0.0.2") as client,
    ):
        client.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.2\r\n\r\n")
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    "header",
    [
        "Origin: https://evil.example",
        "Origin: null",
        "Origin: http://localhost:3000",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
    ],
)
def test_other_sites_are_refused_bad(header: str) -> None:
    status, headers = status_of(f"GET /v1/models HTTP/1.1\r\nHost: localhost:PORT\r\n{header}")
    assert status == 403
    assert not [name for name in headers if name.startswith("access-control")]


def test_own_origin_is_answered_good() -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost:PORT\r\nOrigin: http://localhost:PORT"
    assert status_of(head)[0] == 200


def test_preflight_gets_no_permission_good() -> None:
    status, headers = status_of("OPTIONS /v1/models HTTP/1.1\r\nHost: localhost:PORT")
    assert status == 204
    assert set(headers) == {"allow"}


@pytest.mark.parametrize(
    "header", [f"Authorization: Bearer {OWN}", f"authorization: bearer {OWN}", f"X-Api-Key: {OWN}"]
)
def test_key_opens_good(header: str) -> None:
    assert status_of(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{header}", api_key=OWN)[0] == 200


@pytest.mark.parametrize(
    "header",
    [
        "X: y",
        f"Authorization: Bearer {OWN}x",
        "Authorization: Bearer",
        f"Authorization: Basic {OWN}",
        "X-Api-Key: é",
    ],
)
def test_wrong_key_is_refused_everywhere_but_for_health_bad(header: str) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/api/status", "/api/events", "/else"):
        status, headers = status_of(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}", api_key=OWN)
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
    assert status_of(f"GET /health HTTP/1.1\r\nHost: localhost\r\n{header}", api_key=OWN)[0] == 200


@in_loop
async def test_clients_key_does_not_reach_the_engine_good() -> None:
    async with behind_gateway(ok, api_key=OWN) as setup:
        got = await get(setup.port, {"model": "gemma"}, headers=f"Authorization: Bearer {OWN}\r\n")
        assert got.status == 200
        assert OWN.encode() not in setup.engine.calls[0].head


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../slots",
        "/v1/./x",
        "/v1/%2e%2e/slots",
        "/v1/%252e%252e/slots",
        "/v1/..%2fslots",
        "/v1/x/..",
        "/v1/..\\slots",
        "http://127.0.0.1/v1/x",
    ],
)
def test_paths_that_climb_are_refused_bad(path: str) -> None:
    assert status_of(f"GET {path} HTTP/1.1\r\nHost: localhost")[0] == 400


def test_paths_with_dots_in_names_are_passed_good() -> None:
    assert status_of("GET /v1/files/a..b.txt%20c HTTP/1.1\r\nHost: localhost")[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_beyond_loopback_needs_a_key_bad(host: str) -> None:
    with pytest.raises(ValueError, match="beyond loopback and needs a key"):
        Gateway({}, host=host)


@pytest.mark.parametrize(
    ("host", "url", "outside"),
    [
        ("127.0.0.1", "http://127.0.0.1:1/v1", None),
        ("localhost", "http://127.0.0.1:1/v1", None),
        ("[::1]", "http://[::1]:1/v1", None),
        ("0.0.0.0", "http://127.0.0.1:1/v1", "http://192.0.2.7:1/v1"),
        ("", "http://127.0.0.1:1/v1", "http://192.0.2.7:1/v1"),
        ("::", "http://[::1]:1/v1", "http://[2001:db8::7]:1/v1"),
        ("192.0.2.9", "http://192.0.2.9:1/v1", "http://192.0.2.9:1/v1"),
    ],
)
def test_an_address_that_can_be_asked_at_is_shown_good(
    monkeypatch: pytest.MonkeyPatch, host: str, url: str, outside: str | None
) -> None:
    way_out = {False: "192.0.2.7", True: "2001:db8::7"}
    monkeypatch.setattr("orchestrator.gateway.server.outside_address", way_out.get)
    gateway = Gateway({}, host=host, port=1, api_key=OWN)
    assert (gateway.url, gateway.outside_url) == (url, outside)


def test_a_machine_without_a_way_out_has_no_address_for_others_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.gateway.server.outside_address", lambda ipv6: None)
    assert Gateway({}, host="0.0.0.0", port=1, api_key=OWN).outside_url is None


def test_every_address_with_a_key_answers_any_name_good() -> None:
    head = f"GET /v1/models HTTP/1.1\r\nHost: box.lan:PORT\r\nAuthorization: Bearer {OWN}"
    assert status_of(head, host="0.0.0.0", api_key=OWN)[0] == 200


def test_loopback_is_known_good() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil")] == [False] * 4
