"""Secrets in the environment of training, evaluation and monitor reach no output, file or command line.

Everything starts cold, because the test inspects environments and command lines of processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest

from tests.helpers import ROOT
from tests.helpers.commands import SFTRun, environment
from tests.helpers.processes import WAIT_S, family_of, free_port, wait_until
from tests.helpers.servers import serving
from verl_ext.metrics.run_record import load_run

PLANTED = b"PLANTED"
KEYS = {
    "WANDB_API_KEY": "PLANTEDwandb0123456789abcdef0123456789ab",
    "OPENAI_API_KEY": "sk-PLANTED-openai",
    "ENGINE_KEY": "sk-PLANTED-engine",
    "HF_TOKEN": "hf_PLANTEDtoken",
    "AWS_SECRET_ACCESS_KEY": "PLANTED/aws",
    "HTTPS_PROXY": "http://user:PLANTEDpassword@127.0.0.1:9",
    "VERL_EXT_MONITOR_TOKEN": "PLANTED-monitor",
}
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class Watched:
    """Runs commands, keeps their output, and inspects all of their processes meanwhile."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.output = b""
        self.command_lines: set[str] = set()
        self.open_to_others: set[str] = set()

    def popen(self, *words: str | os.PathLike[str]) -> subprocess.Popen[bytes]:
        """Start a new process, never a warm one."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, cwd=ROOT, env=self.environment, **pipes)

    def run(self, *words: str | os.PathLike[str], code: int = 0) -> str:
        """Run a command to its end; returns its output."""
        process = self.popen(*words)
        inspection = threading.Thread(target=self._inspect, args=(process,))
        inspection.start()
        output = process.communicate(timeout=WAIT_S)[0]
        inspection.join()
        self.output += output
        assert process.returncode == code, output.decode()
        return output.decode()

    def _inspect(self, process: subprocess.Popen[bytes]) -> None:
        itself = psutil.Process(process.pid)

        def has_ended() -> bool:
            for each in [itself, *family_of(process)]:
                try:
                    self.command_lines.add(" ".join(each.cmdline()))
                    listening = [end for end in each.net_connections("inet") if end.status == psutil.CONN_LISTEN]
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                self.open_to_others |= {f"{end.laddr} {each}" for end in listening if end.laddr.ip not in LOOPBACK}
            return process.poll() is not None

        wait_until(has_ended, pause_s=0.2)


@contextmanager
def refusing() -> Iterator[int]:
    """The port of a server that refuses every key and repeats it in the error."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(f'{{"error": {{"message": "bad key {self.headers["Authorization"]}"}}}}'.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    """Commands with every secret in their environment, and caches below `tmp_path`."""
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    (tmp_path / "tmp").mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path / "tmp")}
    recorded = {"NCCL_NOTE": f"see {KEYS['OPENAI_API_KEY']}", "VERL_EXT_LOGIN": "http://user:PLANTED@host"}
    watched = Watched(environment(**offline, **caches, **KEYS, **recorded))
    watched.environment.pop("PYTEST_CURRENT_TEST", None)  # makes NiceGUI believe that it is being tested
    return watched


PAGES = ("", "csv/project/run", "nowhere")


def visit_monitor(watched: Watched, root: Path) -> bytes:
    """A page, the metrics and a missing page as a visitor with the token sees them, and the monitor's output."""
    port, token = str(free_port("127.0.0.2")), KEYS["VERL_EXT_MONITOR_TOKEN"]
    address = ("--host", "127.0.0.2", "--port", port)
    process = watched.popen(sys.executable, "-m", "verl_ext.monitor", "--root", root, *address)

    def reply(path: str) -> bytes:
        try:
            with urllib.request.urlopen(f"http://127.0.0.2:{port}/{path}?token={token}", timeout=5) as reply:
                content = bytes(reply.headers["referrer-policy"], "ascii") + reply.read()
                return content if b"train/loss" in content or not path.startswith("csv") else b""
        except HTTPError as error:  # also until the run is found
            return error.read() if path == "nowhere" else b""
        except OSError:  # it does not listen yet
            return b""

    try:
        pages = b"".join(wait_until(lambda path=path: reply(path), process) for path in PAGES)
        process.terminate()
        return pages + process.communicate(timeout=WAIT_S)[0]
    finally:
        process.kill()


def test_no_secret_is_shown_or_stored(watched: Watched, quickstart: Path, tmp_path: Path) -> None:
    from tests.helpers.evaluation import command, slow_problems, write_recipe
    from tests.helpers.wandb_files import read_records

    run = SFTRun(quickstart, tmp_path / "checkpoints/project/run", "trainer.logger=[console,wandb,tensorboard]")
    watched.run(*run.words)
    recipe = write_recipe(tmp_path / "served.yaml", {"tier1": {"sums": slow_problems(2, 0)}}, batch_size=2)
    asked = ("--recipe", recipe, "--output", tmp_path / "place", "engine.kind=openai", "engine.api_key_env=ENGINE_KEY")
    with serving() as (_, port):
        watched.run(*command("run", *asked, f"engine.base_url=http://127.0.0.1:{port}/v1"))
    with refusing() as port:
        url = f"engine.base_url=http://127.0.0.1:{port}/v1"
        assert "rejects the key" in watched.run(*command("run", *asked, url), code=2)
    output = watched.output + visit_monitor(watched, tmp_path / "checkpoints")
    assert b"no-referrer" in output and b"train/loss" in output and b"accepted_at_1" in output
    assert PLANTED not in output
    assert len(watched.command_lines) > 5 and not [line for line in watched.command_lines if "PLANTED" in line]
    assert watched.open_to_others == set()
    [attempt] = load_run(tmp_path / "checkpoints/project/run/run.json")["attempts"]
    assert attempt["environment"]["NCCL_NOTE"] == "see ***" and attempt["environment"]["HF_HUB_OFFLINE"] == "1"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "metrics.jsonl", "debug.log", "ledger.sqlite"} <= {path.name for path in files}
    assert [path for path in files if PLANTED in path.read_bytes()] == []
    offline = [record for path in files if path.suffix == ".wandb" for record in read_records(path)]
    assert len(offline) > 10 and not [record for record in offline if "PLANTED" in str(record)]


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("+engine.api_key={OPENAI_API_KEY}", "engine.api_key"),
        ("trainer.wandb_proxy='{HTTPS_PROXY}'", "trainer.wandb_proxy"),
        ("trainer.experiment_name='${{oc.env:HF_TOKEN}}'", "trainer.experiment_name"),
    ],
)
def test_rejects_secret_in_setting_before_writing(watched: Watched, tmp_path: Path, key: str, where: str) -> None:
    words = (sys.executable, "-m", "verl_ext.launch", "sft", "1", f"trainer.default_local_dir={tmp_path}/run")
    output = watched.run(*words, key.format(**KEYS), code=2)
    assert output.startswith(f"error: {where} ") and output.count("\n") == 1 and "PLANTED" not in output
    assert not (tmp_path / "run").exists()
