"""Access control of the monitor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.helpers import ROOT
from tests.helpers.monitor import write_record
from tests.helpers.processes import free_port, wait_until
from verl_ext.errors import UserError
from verl_ext.monitor.__main__ import main
from verl_ext.monitor.access import HEADERS, TokenAuth, check_token, cookie_of, digest_of, is_loopback
from verl_ext.monitor.database import SQLITE_HEADER, MonitorDatabase
from verl_ext.monitor.server import cookie_secret, escape_formula


def ask(token: str | None, kind: str = "http", query: str = "", **headers: str) -> tuple[bool, list[dict[str, Any]]]:
    """Send a request; returns whether it reached the page, and the messages sent back."""
    reached, sent = [], []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        reached.append(True)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "headers": encoded, "query_string": query.encode()}
    asyncio.run(TokenAuth(page, token)(scope, receive, send))
    return bool(reached), sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_requests_without_token_are_rejected(kind: str) -> None:
    for headers in ({}, {"cookie": f"{cookie_of('secret')}=wrong"}, {"host": "localhost:6007"}):
        reached, sent = ask("secret", kind, "token=guess", **headers)
        assert not reached and sent[0].get("status") == 403 or sent[0] == {"type": "websocket.close", "code": 1008}


def test_token_in_url_becomes_cookie() -> None:
    reached, [start] = ask("secret", query="token=secret")
    assert reached
    [cookie] = [value.decode() for name, value in start["headers"] if name == b"set-cookie"]
    assert (
        cookie.startswith(f"{cookie_of('secret')}={digest_of('secret')};")
        and "HttpOnly" in cookie
        and "SameSite=Strict" in cookie
    )
    kept = f'x={{"a": [1]}}; {cookie_of("secret")}={digest_of("secret")}'
    assert ask("secret", "websocket", cookie=kept)[0]
    reached, [start] = ask("secret", query="token=wrong", cookie=kept)
    assert reached and start["headers"] == [*HEADERS]  # a wrong token does not revoke the cookie


def test_token_is_removed_from_query() -> None:
    seen = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["query_string"])

    for query in (b"token=secret&run=a%2Bb&x=", b"EIO=4&client_id=a+b%20c"):
        cookie = [(b"cookie", f"{cookie_of('secret')}={digest_of('secret')}".encode())]
        scope = {"type": "http", "headers": cookie, "query_string": query}
        asyncio.run(TokenAuth(page, "secret")(scope, None, None))  # type: ignore[arg-type]
    assert seen == [b"run=a%2Bb&x=", b"EIO=4&client_id=a+b%20c"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_rejects_requests_from_other_origins(kind: str) -> None:
    kept = {"cookie": f"{cookie_of('secret')}={digest_of('secret')}"}
    for origin in ("http://evil.example", "https://localhost:6007.evil.example", "http://localhost:8000", "null"):
        assert not ask(None, kind, host="localhost:6007", origin=origin)[0], origin
        assert not ask("secret", kind, host="localhost:6007", origin=origin, **kept)[0], origin
    assert ask(None, kind, host="localhost:6007", origin="http://localhost:6007")[0]
    assert ask("secret", kind, host="monitor.example", origin="https://monitor.example", **kept)[0]


def test_token_may_contain_any_character() -> None:
    for token in ("a+b/c==", "a b;c", "密码", "#&?"):
        reached, [start] = ask(token, query=f"token={quote(token, safe='')}")
        [cookie] = [value.decode() for name, value in start["headers"] if name == b"set-cookie"]
        assert reached and ask(token, cookie=cookie.split(";")[0])[0]


def test_loopback_server_rejects_other_host_names() -> None:
    for host in ("localhost:6007", "127.0.0.1:6007", "[::1]:6007", "localhost"):
        assert ask(None, host=host)[0], host
    for host in ("evil.example:6007", "192.168.1.2:6007", ""):
        assert not ask(None, host=host)[0], host


def test_non_loopback_host_requires_token() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost") and not is_loopback("0.0.0.0")
    check_token("0.0.0.0", "a longer secret")
    check_token("127.0.0.1", None)
    check_token("127.0.0.1", "short")
    with pytest.raises(UserError, match="--token"):
        check_token("0.0.0.0", None)
    with pytest.raises(UserError, match="other machines can guess"):
        check_token("0.0.0.0", "guess")


def test_cookie_secret_is_private_to_user(tmp_path: Path) -> None:
    secret = cookie_secret(tmp_path / "monitor.sqlite")
    assert len(secret) == 32 and cookie_secret(tmp_path / "monitor.sqlite") == secret
    assert (tmp_path / "monitor.secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "other.secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        cookie_secret(tmp_path / "other.sqlite")
    assert not (tmp_path / "elsewhere").exists()


def test_csv_cells_are_escaped_against_formulas() -> None:
    for text in ("=1+1", "+1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1"):
        assert escape_formula(text) == f"'{text}"
    assert [escape_formula(value) for value in (-1.5, "-Infinity", "a-b", "")] == [-1.5, "-Infinity", "a-b", ""]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--root", "no/such/directory"], "set --root"),
        (["--root", ".", "--host", "0.0.0.0"], "--token"),
        (["--root", ".", "--port", "99999"], "'99999' is not an integer from 1 to 65535"),
        (["--root", ".", "--port", "{taken}"], "cannot be used (Address already in use"),
        (["plot", "."], "specify the directory of a run"),
        (["plot", ".", "--smoothing", "1"], "below 1"),
    ],
)
def test_rejects_bad_input_in_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, socket.create_server(("127.0.0.1", 0)) as taken:
        main([word.format(taken=taken.getsockname()[1]) for word in words])
    shown = capsys.readouterr().err
    assert left.value.code == 2 and told in shown and shown.startswith("error: ") and shown.count("\n") == 1


@pytest.mark.parametrize(("content", "is_deleted"), [(b"{}", False), (SQLITE_HEADER + b"x" * 100, True)])
def test_advises_to_delete_only_sqlite_files(tmp_path: Path, content: bytes, is_deleted: bool) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="set another") as told:
        MonitorDatabase(path)
    assert ("delete it" in str(told.value)) == is_deleted and path.read_bytes() == content


def test_plot_rejects_run_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(tmp_path / "run", status="finished")
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(SystemExit) as left:
        main(["plot", str(tmp_path / "run"), "--output", str(tmp_path / "plots")])
    assert left.value.code == 2 and "has no metrics to plot yet" in capsys.readouterr().err
    (tmp_path / "run/run.json").write_text('{"status": "finished", "attempts": 5}')
    with pytest.raises(SystemExit) as left:
        main(["plot", str(tmp_path / "run"), "--output", str(tmp_path / "plots")])
    assert left.value.code == 2 and "run.json is not the record of a run" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_ctrl_c_stops_monitor_cleanly(tmp_path: Path) -> None:
    port = free_port()
    words = ["--root", str(tmp_path), "--port", str(port), "--database", str(tmp_path / "monitor.sqlite")]
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_ext.monitor", *words],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    )  # fmt: skip
    wait_until(lambda: answers(port), process)
    process.send_signal(signal.SIGINT)
    told, complained = process.communicate(timeout=30)
    assert (process.returncode, told.splitlines()[-1], complained) == (0, "Ended by SIGINT.", "")


def test_monitors_on_other_ports_have_other_cookies() -> None:
    """A browser sends and replaces the cookies of a host name on all of its ports."""
    kept = {}
    for token in ("secret", "other"):
        name, value = (
            dict(ask(token, query=f"token={token}")[1][0]["headers"])[b"set-cookie"].decode().split(";")[0].split("=")
        )
        kept[name] = value
    cookies = "; ".join(f"{name}={value}" for name, value in kept.items())
    assert ask("secret", cookie=cookies)[0] and ask("other", cookie=cookies)[0]


def test_ipv6_address_is_checked_and_printed_in_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr("verl_ext.monitor.server.serve", lambda *values: served.append(values))
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        port = taken.getsockname()[1]
        words = ["--root", str(tmp_path), "--host", "::1", "--port", str(port)]
        with pytest.raises(SystemExit):
            main(words)
    assert "cannot be used (Address already in use" in capsys.readouterr().err
    assert main(words) == 0 and f"http://[::1]:{port}/ " in capsys.readouterr().out
    assert served[0][2:] == ("::1", port, None)
