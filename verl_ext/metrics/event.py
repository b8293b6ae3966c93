"""Something that is said of a run, beside its figures."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Event:
    """One thing that was noticed.

    Attributes:
        step: optimizer steps since the run began.
        name: of what is said, such as that of a health rule.
        level: ok, notice, warning or alarm.
        text: one sentence, or two.
        time: seconds since 1970.
    """

    step: int
    name: str
    level: str
    text: str
    time: float = field(default_factory=time.time)

    def row(self) -> dict[str, str | float]:
        """For `events.jsonl`, which has the step already."""
        return {name: value for name, value in asdict(self).items() if name != "step"}
