"""What tests share: a small real model and data set made by the product's own preparation, and one rank of gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Signals that this process was told to ignore, by `nohup` or `&`, reach the processes that tests start.

    A program that is executed inherits what is ignored, but not a handler that does nothing.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache directory of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `model/`, `train.parquet`, `val.parquet` and `problems.jsonl` of a small quickstart."""
    from verl_ext.data.prepare import prepare

    directory = tmp_path_factory.mktemp("quickstart")
    prepare(["quickstart", "--output", str(directory), "--samples", "500"])
    return directory


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
