"""What a rule sees, and how grave it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How grave a finding is; a greater one is graver."""

    OK = 0
    NOTICE = 1
    WARNING = 2
    ALARM = 3

    @property
    def word(self) -> str:
        """For people and files."""
        return self.name.lower()


@dataclass(frozen=True)
class Seen:
    """What a rule's check comes to.

    Attributes:
        level: how grave it is.
        message: what was seen, with its figures, without a full stop.
        advice: what to do about it, if it differs from the rule's advice.
    """

    level: Level
    message: str
    advice: str | None = None


@dataclass(frozen=True)
class Finding:
    """What a rule sees at one moment of a run.

    Attributes:
        rule: its name.
        level: how grave it is.
        message: what was seen.
        advice: what to do about it, one sentence.
        step: the run's last step then.
    """

    rule: str
    level: Level
    message: str
    advice: str
    step: int

    @property
    def sentence(self) -> str:
        """What was seen, and what to do about it where there is something to do."""
        return self.message if self.level == Level.OK else f"{self.message}; {self.advice}"


def ok(message: str) -> Seen:
    """Nothing to complain about."""
    return Seen(Level.OK, message)


def notice(message: str, advice: str | None = None) -> Seen:
    """Worth knowing, and often right as it is."""
    return Seen(Level.NOTICE, message, advice)


def warning(message: str) -> Seen:
    """Likely wrong."""
    return Seen(Level.WARNING, message)


def alarm(message: str) -> Seen:
    """What the run is for is in danger."""
    return Seen(Level.ALARM, message)
