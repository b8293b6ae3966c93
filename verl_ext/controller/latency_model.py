"""A model of how long a configuration takes, fitted on the machine that it is to speak for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from verl_ext.controller.configuration import Configuration
from verl_ext.controller.latency import Latency
from verl_ext.errors import UserError
from verl_ext.files import parse_json

PERCENTILES = (50, 75, 90, 95)
"""Of single runs around what the model says."""
LATENCY_FILE = "latency_model.json"
"""Of a run that made its latency model itself."""
FEATURES = {
    "vision_ms": ("call", "patches", "patches^2"),
    "prefill_ms": ("call", "tokens", "blocks", "blocks*tokens", "blocks*tokens^2", "experts", "experts*tokens"),
    "decode_ms": ("tokens", "blocks", "blocks*context", "experts"),
}
"""What the time of each part is a weighted sum of, with no weight below zero. `blocks` are those that run, `experts`
the sum of their top-k, `tokens` the prompt's in prefill and the decoded ones in decode, where blocks and experts count
once for each."""


@dataclass(frozen=True)
class Workload:
    """What a configuration had to do for a sample.

    Attributes:
        configuration: that ran.
        num_patches: that the vision encoder saw.
        num_prompt_tokens: of the prompt, the image's among them.
        num_decoded: tokens after the first.
    """

    configuration: Configuration
    num_patches: int
    num_prompt_tokens: int
    num_decoded: int

    def features(self, part: str) -> list[float]:
        """The values of `FEATURES[part]`."""
        blocks, experts = self.configuration.num_active, sum(self.configuration.topk)
        tokens, decoded, patches = self.num_prompt_tokens, self.num_decoded, self.num_patches
        if part == "vision_ms":
            return _vision_features(patches)
        if part == "prefill_ms":
            return [1, tokens, blocks, blocks * tokens, blocks * tokens**2, experts, experts * tokens]
        context = tokens + decoded / 2
        return [decoded, blocks * decoded, blocks * context * decoded, experts * decoded]


def _vision_features(num_patches: int) -> list[float]:
    return [1, num_patches, num_patches**2]


@dataclass(frozen=True)
class LatencyModel:
    """Milliseconds from workloads.

    Attributes:
        coefficients: of each part, by the names in `FEATURES`.
        r2: share of the variance of the total that it explained on configurations it was not fitted on.
        machine: that it was fitted on.
        model: that it was fitted on.
        deciding_ms: what the controller itself takes for a question.
        scatter: by percentile of `PERCENTILES`, how many times its prediction a single run took.
    """

    coefficients: dict[str, dict[str, float]]
    r2: float
    machine: str
    model: str
    deciding_ms: float = 0.0
    scatter: dict[str, float] = field(default_factory=dict)

    def predict(self, workload: Workload) -> Latency:
        """The latency of a workload."""
        parts = {
            part: float(np.dot(workload.features(part), [self.coefficients[part][name] for name in names]))
            for part, names in FEATURES.items()
        }
        return Latency(**parts, num_decoded=workload.num_decoded)

    def vision_ms(self, num_patches: int) -> float:
        """Milliseconds of encoding an image of so many patches."""
        names = FEATURES["vision_ms"]
        values = dict(zip(names, _vision_features(num_patches)))
        return sum(self.coefficients["vision_ms"][name] * values[name] for name in names)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> LatencyModel:
        """Read what `save` wrote.

        Raises:
            UserError: there is no such file, or it is another kind of file.
        """
        try:
            found = cls(**parse_json(path.read_text()))
            if {part: tuple(names) for part, names in found.coefficients.items()} != FEATURES:
                raise ValueError("its coefficients have other names")
            if not isinstance(found.machine, str):
                raise TypeError("its machine is not text")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is no latency model ({error}); make one by `python -m verl_ext.controller.calibrate`"
            ) from error
        return found


def fit(workloads: Sequence[Workload], latencies: Sequence[Latency]) -> dict[str, dict[str, float]]:
    """Coefficients by least squares of the relative error, none below zero.

    Args:
        workloads: what was run.
        latencies: how long each took.
    """
    found = {}
    for part, names in FEATURES.items():
        rows = np.array([workload.features(part) for workload in workloads], dtype=float)
        times = np.array([getattr(latency, part) for latency in latencies])
        used = times > 0  # an answer of one token decodes nothing
        if not used.any():
            found[part] = dict.fromkeys(names, 0.0)
            continue
        rows, scale = rows[used] / times[used, None], np.abs(rows[used] / times[used, None]).max(axis=0)
        scale[scale == 0] = 1.0
        weights, _ = nnls(rows / scale, np.ones(int(used.sum())))
        found[part] = dict(zip(names, (weights / scale).tolist()))
    return found


def explained(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """R squared, the share of the variance of what was measured that the predictions explain."""
    truth, guess = np.asarray(measured), np.asarray(predicted)
    return float(1 - ((truth - guess) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())
