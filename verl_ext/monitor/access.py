"""Who may see the page: this machine, or whoever has the token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_ext.errors import UserError

SHORTEST_TOKEN = 12
"""Characters of a token for other machines, which may try as often as they like."""
COOKIE = "verl_ext_monitor"
REFUSAL = b"The token is missing or wrong: open the address that the monitor printed, with ?token=... at its end.\n"
HEADERS = (
    (b"referrer-policy", b"no-referrer"),  # the address may have the token in it
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def is_loopback(host: str) -> bool:
    """Whether a host names this machine itself."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(host: str, token: str | None) -> None:
    """Refuse to show the page to other machines without a token, or with one that can be guessed.

    Args:
        host: address that the server listens on.
        token: that visitors must bring; None for none.

    Raises:
        UserError: no token for an address that others can reach, or too short a one.
    """
    if is_loopback(host):
        return
    if not token:
        raise UserError(
            f"--host {host} lets other machines in, so visitors must bring a token; add --token WORD, or set "
            "VERL_EXT_MONITOR_TOKEN"
        )
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"the token has fewer than {SHORTEST_TOKEN} characters, which other machines can guess; take one such as "
            f"{secrets.token_urlsafe(16)}"
        )


class Access:
    """ASGI middleware: refuses requests without the token, or where there is none, for another host than this machine.

    The latter keeps a web page elsewhere from reading this one through a name that it had pointed to 127.0.0.1. A
    request that a page elsewhere makes is refused too, as browsers open web sockets to anywhere. The token goes no
    further than here, where no log and no page can repeat it.

    Args:
        app: what is guarded.
        token: that must come with the first request; None on a loopback address.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        brought = self._token is not None and same(given, self._token)
        if not (brought or self._allows(headers)) or is_from_elsewhere(headers):
            await _refuse(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = f"{COOKIE}={digest_of(self._token or '')}; HttpOnly; SameSite=Strict; Path=/"
                more = [*HEADERS, (b"set-cookie", cookie.encode("latin-1"))] if brought else HEADERS
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        await self._app({**scope, "query_string": without_token(scope)}, receive, with_headers)

    def _allows(self, headers: dict[str, str]) -> bool:
        if self._token is None:
            host = headers.get("host", "")
            name = host.rsplit(":", 1)[0] if host.count(":") == 1 or host.startswith("[") else host
            return is_loopback(name.strip("[]"))
        return same(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""), digest_of(self._token))


def is_from_elsewhere(headers: Mapping[str, str]) -> bool:
    """Whether a page of another address makes the request, as its browser says."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def without_token(scope: Scope) -> bytes:
    """The query of a request without the token."""
    query = scope.get("query_string", b"")
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    kept = [(name, value) for name, value in pairs if name != "token"]
    return query if kept == pairs else urlencode(kept).encode("latin-1")


def digest_of(token: str) -> str:
    """What the cookie holds: the token itself may have characters that cookies may not."""
    return hashlib.sha256(token.encode()).hexdigest()


def same(one: str, other: str) -> bool:
    """Whether two secrets are the same, in a time that tells nothing of where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": REFUSAL})
