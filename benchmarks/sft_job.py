"""What the SFT benchmark tells a side to do, and what a side tells of its steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One side's work.

    Attributes:
        data: parquet file of chats.
        model: directory of the model.
        output: directory to write into.
        batch_size: samples of a step, over all ranks.
        num_steps: steps; the first is not counted.
        max_length: tokens of a sample; longer ones are cut.
        way: what is particular to it.
        lr: constant.
    """

    data: str
    model: str
    output: str
    batch_size: int
    num_steps: int
    max_length: int
    way: str = ""
    lr: float = 1e-4

    def save(self, path: Path) -> Path:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> Job:
        """Read what `save` wrote."""
        return cls(**json.loads(Path(path).read_text()))


def tell(tokens: int, seconds: float, **more: float) -> None:
    """Print one step of rank 0 for the benchmark to read."""
    print("STEP", json.dumps({"tokens": tokens, "seconds": seconds, **more}), flush=True)
