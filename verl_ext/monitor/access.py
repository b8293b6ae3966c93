"""Access control of the page: users of this machine, or visitors with the token. A security boundary."""

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

MIN_TOKEN_LENGTH = 12
"""Minimum length of a token if other machines can reach the page, because they can guess without limit."""
REFUSAL = b"The token is missing or wrong: open the address that the monitor printed, with ?token=... at its end.\n"
HEADERS = (
    (b"referrer-policy", b"no-referrer"),  # the address may contain the token
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(host: str, token: str | None) -> None:
    """Refuse an address that other machines can reach without a token, or with one that can be guessed.

    Args:
        host: address that the server listens on.
        token: token that visitors need; None for none.

    Raises:
        UserError: the token is missing or too short.
    """
    if is_loopback(host):
        return
    if not token:
        raise UserError(
            f"--host {host} lets other machines in, so visitors need a token; add --token TOKEN, or set "
            "VERL_EXT_MONITOR_TOKEN"
        )
    if len(token) < MIN_TOKEN_LENGTH:
        raise UserError(
            f"the token has fewer than {MIN_TOKEN_LENGTH} characters, so other machines can guess it; use one such as "
            f"{secrets.token_urlsafe(16)}"
        )


class TokenAuth:
    """ASGI middleware that refuses requests without the token or, if there is no token, requests to non-local hosts.

    The latter prevents other web sites from reading this page through a host name that they point to 127.0.0.1 (DNS
    rebinding). Requests from pages of other sites are refused, too, because browsers open web sockets to any address.
    The token is removed from requests, so that no log and no page can repeat it.

    Args:
        app: the guarded application.
        token: token that the first request needs; None on a loopback address.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token
        self._cookie = cookie_of(token or "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        has_token = self._token is not None and is_same_secret(given, self._token)
        if not (has_token or self._allows(headers)) or is_from_elsewhere(headers):
            await _refuse(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = f"{self._cookie}={digest_of(self._token or '')}; HttpOnly; SameSite=Strict; Path=/"
                more = [*HEADERS, (b"set-cookie", cookie.encode("latin-1"))] if has_token else HEADERS
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        await self._app({**scope, "query_string": without_token(scope)}, receive, with_headers)

    def _allows(self, headers: dict[str, str]) -> bool:
        if self._token is None:
            host = headers.get("host", "")
            name = host.rsplit(":", 1)[0] if host.count(":") == 1 or host.startswith("[") else host
            return is_loopback(name.strip("[]"))
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return is_same_secret(cookie, digest_of(self._token))


def is_from_elsewhere(headers: Mapping[str, str]) -> bool:
    """Whether, according to the browser, a page of another site sent the request."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def without_token(scope: Scope) -> bytes:
    """Return the query of a request without the token."""
    query = scope.get("query_string", b"")
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    kept = [(name, value) for name, value in pairs if name != "token"]
    return query if kept == pairs else urlencode(kept).encode("latin-1")


def cookie_of(secret: str, name: str = "verl_ext_monitor") -> str:
    """Return the name of a cookie that depends on a secret: monitors on other ports of a host share its cookies."""
    return f"{name}_{digest_of(secret)[:8]}"


def digest_of(token: str) -> str:
    """Return the value of the cookie; the token itself may contain characters that cookies do not allow."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_same_secret(one: str, other: str) -> bool:
    """Whether two secrets are equal, compared in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": REFUSAL})
