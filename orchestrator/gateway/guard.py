"""Who may ask: the Host header, browsers' origins, the key, and paths that stay below their prefix."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import socket
from urllib.parse import unquote

from orchestrator.gateway.wire import Failure, RequestMessage

MOST_QUOTED = 8  # times that a path may be percent-encoded, one within the other
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


def bracketed(host: str) -> str:
    """Return `host` as it stands in a URL, IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Say whether an address means every one that this machine has."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def outside_address(ipv6: bool) -> str | None:
    """Return this machine's address on its way to others, None where there is no such way."""
    # documentation's addresses: a datagram socket only looks up the route, nothing is sent
    family, far = (socket.AF_INET6, "2001:db8::1") if ipv6 else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        return str(probe.getsockname()[0])
    return None


def is_open(host: str, api_key: str | None) -> bool:
    """Say whether others than this machine could reach an address and would need no key."""
    return not is_loopback(host.strip("[]")) and not api_key


class Guard:
    """Decides from a request's head alone whether it is answered at all.

    A page that rebinds its own name to 127.0.0.1 gives itself away by its Host header. Beyond loopback
    the names of this machine are unknown, and the key, which is then required, does that work.

    """

    def __init__(self, host: str, api_key: str | None) -> None:
        self._names = None if is_wildcard(host) else _LOOPBACK_NAMES | {bracketed(host.strip("[]").lower())}
        self._key = api_key.encode() if api_key else None

    def refusal(self, message: RequestMessage, path: str) -> Failure | None:
        """Return why a request is refused, or None."""
        headers = message.headers
        host = headers.get("Host", "")
        if self._names is not None and _name(host) not in self._names:
            return Failure(
                403,
                "gateway: this Host header is not answered here",
                "permission_error",
                "host_refused",
                advice="use 127.0.0.1 or localhost, or listen on that name with --host",
            )
        origin = headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            return _FOREIGN
        if headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"}:
            return _FOREIGN
        if self._key is not None and path != "/health" and not self._knows(message):
            return Failure(
                401,
                "gateway: the API key is missing or wrong",
                "authentication_error",
                "invalid_api_key",
                advice="send it as Authorization: Bearer KEY",
                headers={b"WWW-Authenticate": b"Bearer"},
            )
        if not path.startswith("/") or (
            ("%" in path or "/." in path or "\\" in path) and not _stays_below(path)
        ):
            return Failure(400, "gateway: this path is not one that is served", code="bad_path")
        return None

    def _knows(self, message: RequestMessage) -> bool:
        assert self._key is not None
        scheme, _, token = message.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = message.headers.get("X-Api-Key", "")
        return hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self._key)


_FOREIGN = Failure(
    403,
    "gateway: pages of other sites are not answered",
    "permission_error",
    "origin_refused",
    advice="ask from a program, or from a server of your own in front",
)


def _name(host: str) -> str:
    """Return a Host header's name without its port, lower case."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _stays_below(path: str) -> bool:
    """Say whether no segment climbs, however it is spelt, and nothing in it steers a terminal or a log."""
    plain = path
    for _ in range(MOST_QUOTED):
        plain, before = unquote(plain), plain
        if plain == before:
            break
    else:
        return False
    if any(character < " " or character == "\x7f" for character in plain):
        return False
    return not any(segment in {".", ".."} for segment in plain.replace("\\", "/").split("/"))
