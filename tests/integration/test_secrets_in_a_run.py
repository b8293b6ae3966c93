"""A training, an evaluation and the monitor with keys in their environment: no output, file or command line has one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest

from tests.helpers import ROOT
from tests.helpers.commands import Run
from tests.helpers.evaluation import command, slow_problems, write_recipe
from tests.helpers.processes import family_of
from tests.helpers.wandb_files import read_records
from tests.integration.test_eval_server import serving

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
    """Runs commands, keeps what they print, and looks at all of their processes meanwhile."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.said = b""
        self.command_lines: set[str] = set()
        self.open_to_others: set[str] = set()

    def run(self, *words: str, code: int = 0) -> str:
        """Run one to its end; returns what it printed."""
        process = subprocess.Popen(
            words, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        looking = threading.Thread(target=self._look, args=(process,))
        looking.start()
        said = process.communicate(timeout=200)[0]
        looking.join()
        self.said += said
        assert process.returncode == code, said.decode()
        return said.decode()

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        itself = psutil.Process(process.pid)
        while process.poll() is None:
            for each in [itself, *family_of(process)]:
                try:
                    self.command_lines.add(" ".join(each.cmdline()))
                    listening = [end for end in each.net_connections("inet") if end.status == psutil.CONN_LISTEN]
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                self.open_to_others |= {f"{end.laddr} {each}" for end in listening if end.laddr.ip not in LOOPBACK}
            time.sleep(0.2)


@contextmanager
def refusing() -> Iterator[int]:
    """A server that refuses every key, and repeats it; its port."""

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
def watched(tmp_path: Path, quickstart: Path) -> Watched:
    """With the environment of a user who has every key there is, and the caches below `tmp_path`."""
    run = Run(quickstart, tmp_path / "checkpoints/project/run")
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    (tmp_path / "tmp").mkdir()
    offline = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path / "tmp")}
    watched = Watched({**run.environment, **offline, **caches, **KEYS})
    watched.environment.pop("PYTEST_CURRENT_TEST", None)  # by which NiceGUI would take itself to be tested
    return watched


def look_at_the_monitor(watched: Watched, root: Path) -> bytes:
    """What its page, its numbers and a page that it lacks say to a visitor with the token, and what it prints."""
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = str(free.getsockname()[1])
    words = (sys.executable, "-m", "verl_ext.monitor", "--root", str(root), "--host", "127.0.0.2", "--port", port)
    process = subprocess.Popen(
        words, cwd=ROOT, env=watched.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    pages, token = b"", KEYS["VERL_EXT_MONITOR_TOKEN"]
    for path in ("", "csv/1", "nowhere"):
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.2:{port}/{path}?token={token}", timeout=5) as reply:
                    pages += bytes(reply.headers["referrer-policy"], "ascii") + reply.read()
                break
            except HTTPError as error:
                pages += error.read()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
    process.terminate()
    return pages + process.communicate(timeout=30)[0]


def test_no_key_comes_to_light(watched: Watched, quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path / "checkpoints/project/run", "trainer.logger=[console,wandb,tensorboard]")
    watched.run(*run.words)
    recipe = write_recipe(tmp_path / "served.yaml", {"tier1": {"sums": slow_problems(2, 0)}}, batch_size=2)
    asked = ("--recipe", recipe, "--output", tmp_path / "place", "engine.kind=openai", "engine.api_key_env=ENGINE_KEY")
    with serving() as (_, port):
        watched.run(*command("run", *asked, f"engine.base_url=http://127.0.0.1:{port}/v1"))
    with refusing() as port:
        url = f"engine.base_url=http://127.0.0.1:{port}/v1"
        assert "refuses the key" in watched.run(*command("run", *asked, url), code=2)
    said = watched.said + look_at_the_monitor(watched, tmp_path / "checkpoints")
    assert b"no-referrer" in said and b"train/loss" in said and b"accepted_at_1" in said
    assert PLANTED not in said
    assert len(watched.command_lines) > 5 and not [line for line in watched.command_lines if "PLANTED" in line]
    assert watched.open_to_others == set()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "metrics.jsonl", "debug.log", "ledger.sqlite"} <= {path.name for path in files}
    assert [path for path in files if PLANTED in path.read_bytes()] == []
    offline = [record for path in files if path.suffix == ".wandb" for record in read_records(path)]
    assert len(offline) > 10 and not [record for record in offline if "PLANTED" in str(record)]


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("+engine.api_key={OPENAI_API_KEY}", "engine.api_key"),
        ("+trainer.wandb_proxy='{HTTPS_PROXY}'", "trainer.wandb_proxy"),
        ("trainer.experiment_name='${{oc.env:HF_TOKEN}}'", "trainer.experiment_name"),
    ],
)
def test_a_key_among_the_settings_is_refused_before_anything_is_written(
    watched: Watched, tmp_path: Path, key: str, where: str
) -> None:
    words = (sys.executable, "-m", "verl_ext.launch", "sft", "1", f"trainer.default_local_dir={tmp_path}/run")
    said = watched.run(*words, key.format(**KEYS), code=2)
    assert said.startswith(f"error: {where} ") and said.count("\n") == 1 and "PLANTED" not in said
    assert not (tmp_path / "run").exists()
