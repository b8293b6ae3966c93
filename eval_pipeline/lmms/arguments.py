"""What `--model_args` of lmms-eval says to the model `budget_controller`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verl_ext.errors import UserError
from verl_ext.plugins import Plugin

BATCH_SIZES = ("batch_size", "max_batch_size")
"""What lmms-eval adds by itself."""


@dataclass(frozen=True)
class Arguments:
    """Of the model.

    Attributes:
        pretrained: a controller's export, its `global_step_N`, or the directory of a run.
        budget_ms: milliseconds that each answer may take.
        vlm: where the vision-language model is by now; None where it was.
        log: file that gets a line for each answer; None for no such file.
        device: cpu or cuda, as `--device` says; None for a GPU if there is one.
        trust_remote_code: whether the model's own code may be run.
        adapter: the model's, where training had one of the user's own; None where its type says which.
    """

    pretrained: Path
    budget_ms: float
    vlm: str | None = None
    log: Path | None = None
    device: str | None = None
    trust_remote_code: bool = False
    adapter: Plugin | None = None

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> Arguments:
        """Those that lmms-eval gives, which has made numbers of what looks like some.

        Raises:
            UserError: one is missing, unknown or bad.
        """
        given = dict(words)
        if any(str(given.pop(name, 1)) != "1" for name in BATCH_SIZES):
            raise UserError("a latency budget is for one question alone; leave --batch_size at 1")
        known = [field.name for field in fields(cls)]
        if strangers := sorted(set(given) - set(known)):
            raise UserError(f"budget_controller has no argument {', '.join(strangers)}; it has {', '.join(known)}")
        if missing := [name for name in ("pretrained", "budget_ms") if name not in given]:
            raise UserError(f"budget_controller lacks {' and '.join(missing)}; give them in --model_args")
        given["budget_ms"] = _milliseconds(given["budget_ms"])
        given |= {name: Path(str(given[name])).expanduser() for name in ("pretrained", "log") if name in given}
        given |= {name: str(given[name]) for name in ("vlm", "device") if name in given}
        if not isinstance(given.get("trust_remote_code", False), bool):
            raise UserError(f"trust_remote_code={given['trust_remote_code']} must be True or False")
        if "adapter" in given:
            given["adapter"] = Plugin.parse(str(given["adapter"]), "adapter")
        return cls(**given)


def _milliseconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise UserError(f"budget_ms={value} must be a number of milliseconds above 0")
