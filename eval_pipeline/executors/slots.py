"""Which worker gets which batch; the same for every executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eval_pipeline.executors.executor import BATCHES_PER_WORKER
from eval_pipeline.work.batch import Batch, BatchId, Event, Failed, Finished


@dataclass
class Slot:
    """What one worker has to do.

    Attributes:
        export: the model it has loaded or is about to; None before the first batch.
        batches: those under way, by id.
    """

    export: Path | None = None
    batches: dict[BatchId, Batch] = field(default_factory=dict)

    def takes(self, export: Path | None) -> bool:
        """Whether a batch for this model can begin without pushing out a model that is in use."""
        if not self.batches:
            return True
        return self.export == export and len(self.batches) < BATCHES_PER_WORKER

    def give(self, batch: Batch) -> None:
        """Enter a batch."""
        self.export = batch.export
        self.batches[batch.id] = batch

    def cost(self, export: Path | None) -> tuple[int, int]:
        """Sort key of workers that could take a batch: the idle ones first, of these those with the model loaded."""
        return len(self.batches), int(self.export != export)

    def forget_ended(self, events: list[Event]) -> list[Event]:
        """Take out the batches that these events end; returns the events."""
        for event in events:
            if isinstance(event, Finished | Failed):
                self.batches.pop(event.batch, None)
        return events
