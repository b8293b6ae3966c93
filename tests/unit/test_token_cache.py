"""Chats are tokenized once: cached by everything the tokens depend on, and tokenized again if any of it changes."""

from __future__ import annotations

import os
import pickle
import pwd
import resource
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

from tests.helpers.trainer import small_config
from verl_ext.data import chats
from verl_ext.data.chat_template import ChatEncoder
from verl_ext.data.chats import ChatDataset
from verl_ext.errors import UserError
from verl_ext.files import user_cache_dir
from verl_ext.metrics.run_record import RunRecord
from verl_ext.trainer.stages import STAGES
from verl_ext.trainer.tokenizer import load_tokenizer


def dataset(quickstart: Path, cache: Path | None, *overrides: str, file: Path | None = None, max_samples: int = -1):
    config = small_config(quickstart, quickstart, *overrides).data
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    return ChatDataset(str(file or quickstart / "train.parquet"), tokenizer, config, max_samples, False, cache)


def same(one: ChatDataset, other: ChatDataset) -> bool:
    return all(np.array_equal(getattr(one.tokens, name), getattr(other.tokens, name)) for name in vars(one.tokens))


def test_cached_tokens_equal_fresh_tokens(quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset(quickstart, None)
    first = dataset(quickstart, tmp_path)
    monkeypatch.setattr(chats, "tokenize", None)  # the second time nothing is tokenized
    again = dataset(quickstart, tmp_path)
    assert same(made, first) and same(made, again)
    assert again.describe([3]).endswith("train.parquet rows 3")
    assert not again.tokens.input_ids.flags.writeable and not again.tokens.input_ids.flags.owndata  # mapped, not read
    assert [path.suffix for path in tmp_path.iterdir()] == [".arrow"]


@pytest.mark.parametrize("change", ["data.max_length=40", "data.apply_chat_template_kwargs={thinking: true}"])
def test_other_settings_get_separate_cache_entries(change: str, quickstart: Path, tmp_path: Path) -> None:
    dataset(quickstart, tmp_path, "data.truncation=right")
    dataset(quickstart, tmp_path, "data.truncation=right", change)
    assert len(list(tmp_path.iterdir())) == 2


def test_dated_template_uses_date_of_first_start(quickstart: Path, tmp_path: Path) -> None:
    """Also when the chats are tokenized again on a later day; runs of other days get separate cache entries."""
    (tmp_path / "dated.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    cache = tmp_path / "cache"
    config = small_config(
        quickstart, tmp_path / "run", f"data.token_cache={cache}", f"data.chat_template={tmp_path}/dated.jinja"
    )
    tokenizer = load_tokenizer(config)

    def text_of(first_start: str) -> str:
        RunRecord(tmp_path / "run").mark_waiting(first_start=first_start)
        train, _ = STAGES["sft"].load_datasets(config, tokenizer)
        return tokenizer.decode(train[0]["input_ids"])

    assert text_of("2020-07-04T09:30:00").startswith("04 Jul 2020")
    num_kept = len(list(cache.iterdir()))
    assert text_of("2020-07-04T23:00:00").startswith("04 Jul 2020") and len(list(cache.iterdir())) == num_kept
    assert text_of("2020-07-05T00:00:00").startswith("05 Jul 2020") and len(list(cache.iterdir())) == 2 * num_kept
    several = ChatEncoder(tokenizer, config.data, datetime(2020, 7, 4))
    assert pickle.loads(pickle.dumps(several)).template.kwargs["strftime_now"]("%d") == "04"


def test_changed_file_of_same_name_is_tokenized_again(quickstart: Path, tmp_path: Path) -> None:
    file, cache = tmp_path / "chats.parquet", tmp_path / "cache"
    rows = pd.read_parquet(quickstart / "train.parquet")
    rows.head(20).to_parquet(file)
    first = dataset(quickstart, cache, file=file)
    rows.tail(20).to_parquet(file)
    second = dataset(quickstart, cache, file=file)
    assert not same(first, second) and same(second, dataset(quickstart, None, file=file))
    assert len(dataset(quickstart, cache, file=file, max_samples=5)) == 5


def test_damaged_cache_file_is_rebuilt(quickstart: Path, tmp_path: Path) -> None:
    whole = dataset(quickstart, None)
    dataset(quickstart, tmp_path)
    [kept] = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:1000])
    assert same(dataset(quickstart, tmp_path), whole)
    assert kept.stat().st_size > 1000


def test_damaged_parquet_pages_raise_user_error(quickstart: Path, tmp_path: Path) -> None:
    """The launcher reads only the end of the file."""
    damaged = bytearray((quickstart / "train.parquet").read_bytes())
    damaged[100:900] = bytes(byte ^ 0xFF for byte in damaged[100:900])
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match="is not a readable parquet file"):
        dataset(quickstart, None, file=tmp_path / "damaged.parquet")


def test_unwritable_cache_directory_only_disables_cache(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert same(dataset(quickstart, tmp_path / "file"), dataset(quickstart, None))
    assert "cannot be cached" in capsys.readouterr().err


@pytest.mark.parametrize("free_kib", [0, 20])
def test_full_disk_only_disables_cache(
    free_kib: int, quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = dataset(quickstart, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_kib * 1024, hard))
    try:
        made = dataset(quickstart, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert same(made, whole)
    assert "cannot be cached" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []


def test_temporary_files_of_killed_processes_are_removed(quickstart: Path, tmp_path: Path) -> None:
    abandoned, in_use = (tmp_path / f"key.arrow.{number}.tmp" for number in (1, 2))
    for path in (abandoned, in_use):
        path.write_text("half")
    os.utime(abandoned, (0, 0))
    dataset(quickstart, tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".arrow", ".tmp"]
    assert in_use.exists()


@pytest.fixture
def one_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Share one pool among all datasets of a test, because its processes take seconds to start."""
    pools: list[ProcessPoolExecutor] = []

    def shared(*arguments: Any) -> AbstractContextManager[ProcessPoolExecutor]:
        if not pools:
            pools.append(ProcessPoolExecutor(*arguments))
        return nullcontext(pools[0])

    monkeypatch.setattr(chats, "ProcessPoolExecutor", shared)
    yield
    [pool] = pools
    pool.shutdown()


@pytest.mark.usefixtures("one_pool")
def test_several_tokenizer_processes_give_same_result(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chats, "MIN_PER_PROCESS", 100)
    monkeypatch.setattr(chats, "CHUNK", 60)
    assert same(dataset(quickstart, None, "data.num_tokenizers=2"), dataset(quickstart, None, "data.num_tokenizers=1"))
    rows = pd.read_parquet(quickstart / "train.parquet")
    rows_of_turns = [list(chat) for chat in rows["messages"]]
    pd.DataFrame({"messages": [*rows_of_turns[:130], rows_of_turns[130][:1], *rows_of_turns[131:]]}).to_parquet(
        tmp_path / "bad.parquet"
    )
    with pytest.raises(UserError, match="row 130 cannot be used: it has no assistant turn"):
        dataset(quickstart, None, "data.num_tokenizers=2", file=tmp_path / "bad.parquet")


def test_cache_without_home_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # no entry in the password file
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = user_cache_dir()
    assert user_cache_dir() == cache == tmp_path / f"verl_ext_{os.getuid()}"
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    with pytest.raises(UserError, match="HOME is not set, and other users can write to .*; set HOME or XDG_CACHE_HOME"):
        user_cache_dir()
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    with pytest.raises(UserError, match="HOME is not set"):
        user_cache_dir()
