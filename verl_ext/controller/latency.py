"""Milliseconds of a run: measured, or predicted by a latency model that was fitted on this machine."""

from __future__ import annotations

import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from verl_ext.controller.adapters import VLMAdapter
from verl_ext.controller.execution import EncodedImage, Latency, RunResult, RunWorkload
from verl_ext.controller.inference import Decision
from verl_ext.controller.vlm import matches_fingerprint
from verl_ext.errors import UserError
from verl_ext.files import parse_json

LATENCY_FILE = "latency_model.json"
"""File in a run directory with the latency model that the run fitted."""
FEATURES = {
    "vision_ms": ("call", "patches", "patches^2"),
    "prefill_ms": ("call", "tokens", "blocks", "blocks*tokens", "blocks*tokens^2", "experts", "experts*tokens"),
    "decode_ms": ("tokens", "blocks", "blocks*context", "experts"),
}
"""The time of each part is a weighted sum of these, with weights of at least 0. `blocks` is the number of active blocks
and `experts` the sum of their top-k. `tokens` are those of the prompt in prefill, and the decoded ones in decode, where
blocks and experts count once per token."""
NUM_CHECKED_QUESTIONS = 8
"""Questions on which the lowest budget is checked."""
MARGIN = 1.05
"""Factor by which a suggested budget exceeds the measured time."""


def workload_features(part: str, workload: RunWorkload) -> list[float]:
    """The values of `FEATURES[part]`."""
    if part == "vision_ms":
        return vision_features(workload.num_patches)
    blocks, experts = workload.configuration.num_active, sum(workload.configuration.topk)
    tokens, decoded = workload.num_prompt_tokens, workload.num_decoded
    if part == "prefill_ms":
        return [1, tokens, blocks, blocks * tokens, blocks * tokens**2, experts, experts * tokens]
    context = tokens + decoded / 2
    return [decoded, blocks * decoded, blocks * context * decoded, experts * decoded]


def vision_features(num_patches: int) -> list[float]:
    """The values of `FEATURES["vision_ms"]`."""
    return [1, num_patches, num_patches**2]


@dataclass(frozen=True)
class LatencyModel:
    """Predicts milliseconds from workloads.

    Attributes:
        coefficients: of each part, by the names in `FEATURES`.
        r2: R squared of the total on configurations that were held out.
        machine: on which it was fitted.
        model: fingerprint of the vision-language model on which it was fitted.
        deciding_ms: time of one decision of the controller.
        scatter: by percentile of `PERCENTILES`, the ratio of single runs to their predictions.
    """

    coefficients: dict[str, dict[str, float]]
    r2: float
    machine: str
    model: str
    deciding_ms: float = 0.0
    scatter: dict[str, float] = field(default_factory=dict)

    def predict(self, workload: RunWorkload) -> Latency:
        """The latency of a workload."""
        parts = {
            part: float(np.dot(workload_features(part, workload), [self.coefficients[part][name] for name in names]))
            for part, names in FEATURES.items()
        }
        return Latency(**parts, num_decoded=workload.num_decoded)

    def vision_ms(self, num_patches: int) -> float:
        """Milliseconds of encoding an image with this number of patches."""
        names = FEATURES["vision_ms"]
        values = dict(zip(names, vision_features(num_patches)))
        return sum(self.coefficients["vision_ms"][name] * values[name] for name in names)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> LatencyModel:
        """Read a file that `save` wrote.

        Raises:
            UserError: the file is missing, or is not a latency model.
        """
        try:
            model = cls(**parse_json(path.read_text()))
            if {part: tuple(names) for part, names in model.coefficients.items()} != FEATURES:
                raise ValueError("its coefficients have other names")
            if not isinstance(model.machine, str):
                raise TypeError("its machine is not text")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not a latency model ({error}); create one by `python -m verl_ext.controller.calibrate`"
            ) from error
        return model


def fit_coefficients(workloads: Sequence[RunWorkload], latencies: Sequence[Latency]) -> dict[str, dict[str, float]]:
    """Coefficients of at least 0 that minimize the squared relative error.

    Args:
        workloads: of the runs.
        latencies: of the runs.
    """
    coefficients = {}
    for part, names in FEATURES.items():
        rows = np.array([workload_features(part, workload) for workload in workloads], dtype=float)
        times = np.array([getattr(latency, part) for latency in latencies])
        used = times > 0  # an answer of one token decodes nothing
        if not used.any():
            coefficients[part] = dict.fromkeys(names, 0.0)
            continue
        rows, scale = rows[used] / times[used, None], np.abs(rows[used] / times[used, None]).max(axis=0)
        scale[scale == 0] = 1.0
        weights, _ = nnls(rows / scale, np.ones(int(used.sum())))
        coefficients[part] = dict(zip(names, (weights / scale).tolist()))
    return coefficients


def r2_score(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """R squared, the share of the variance of the measurements that the predictions explain."""
    truth, guess = np.asarray(measured), np.asarray(predicted)
    return float(1 - ((truth - guess) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())


class LatencySource(ABC):
    """Gives milliseconds for the parts of an adaptive answer."""

    is_measured: bool
    """Whether the milliseconds change when the same run is repeated."""

    @property
    @abstractmethod
    def deciding_ms(self) -> float:
        """Milliseconds of a decision that was not timed itself, without encoding the image at the lowest tier."""

    @abstractmethod
    def run_ms(self, result: RunResult) -> float:
        """Milliseconds of running a configuration, including the encoding of the image."""

    @abstractmethod
    def encode_ms(self, low: EncodedImage, adapter: VLMAdapter) -> float:
        """Milliseconds of encoding an image at the lowest tier, which a decision needs."""

    @abstractmethod
    def decision_ms(self, decision: Decision) -> float:
        """Milliseconds of a decision, without that encoding."""


@dataclass(frozen=True)
class MeasuredLatency(LatencySource):
    """Milliseconds as measured.

    Attributes:
        deciding_ms: see `LatencySource`.
    """

    deciding_ms: float = 0.0
    is_measured = True

    def run_ms(self, result: RunResult) -> float:
        """See `LatencySource`."""
        return result.latency.total_ms

    def encode_ms(self, low: EncodedImage, adapter: VLMAdapter) -> float:
        """See `LatencySource`."""
        return low.vision_ms

    def decision_ms(self, decision: Decision) -> float:
        """See `LatencySource`."""
        return decision.own_ms


@dataclass(frozen=True)
class ModelledLatency(LatencySource):
    """Milliseconds from a latency model, which are the same in every run.

    Attributes:
        model: fitted on this machine for this vision-language model.
        percentile: share of single runs, in percent, that take at most the given time; 50 gives the fitted time.
    """

    model: LatencyModel
    percentile: int = 50
    is_measured = False

    @classmethod
    def load(cls, path: Path, adapter: VLMAdapter, percentile: int = 50) -> ModelledLatency:
        """Load the latency model of a file.

        Args:
            path: of the file.
            adapter: of the vision-language model.
            percentile: see the class.

        Raises:
            UserError: the file is missing, or was fitted on another vision-language model.
        """
        model = LatencyModel.load(path)
        if not matches_fingerprint(model.model, adapter, str(path)):
            raise UserError(
                f"{path} was fitted on another model; create one for this model by "
                "`python -m verl_ext.controller.calibrate`"
            )
        if percentile != 50 and str(percentile) not in model.scatter:
            raise UserError(
                f"{path} does not say how far single runs are from its predictions; create it again by `python -m "
                "verl_ext.controller.calibrate`, or leave latency.percentile at 50"
            )
        return cls(model, percentile)

    @property
    def _factor(self) -> float:
        """Ratio of the percentile to the fitted time."""
        return 1.0 if self.percentile == 50 else self.model.scatter[str(self.percentile)]

    @property
    def deciding_ms(self) -> float:
        """See `LatencySource`."""
        return self._factor * self.model.deciding_ms

    def run_ms(self, result: RunResult) -> float:
        """See `LatencySource`."""
        return self._factor * self.model.predict(result.workload).total_ms

    def encode_ms(self, low: EncodedImage, adapter: VLMAdapter) -> float:
        """See `LatencySource`."""
        return self._factor * self.model.vision_ms(adapter.num_patches(low.inputs))

    def decision_ms(self, decision: Decision) -> float:
        """See `LatencySource`."""
        return self.deciding_ms


def require_reachable(
    setting: str, lowest_ms: float, cheapest_ms: Sequence[float], full_ms: float | None = None
) -> None:
    """Refuse budgets that no configuration can meet for most questions.

    Args:
        setting: option or key of the budgets.
        lowest_ms: the lowest budget.
        cheapest_ms: for some questions, milliseconds of the cheapest configuration and the decision for it.
        full_ms: latency of the full configuration if the budgets are shares of it, else None.

    Raises:
        UserError: the lowest budget is below the median of `cheapest_ms`.
    """
    needed_ms = statistics.median_high(cheapest_ms)
    if lowest_ms >= needed_ms:
        return
    begins, enough = f"{lowest_ms:g} ms", f"{needed_ms * MARGIN:.1f} ms"
    if full_ms is not None:
        begins, enough = f"{lowest_ms / full_ms:g} ({lowest_ms:.1f} ms)", f"{needed_ms * MARGIN / full_ms:.3g}"
    raise UserError(
        f"{setting} begins at {begins}, but the cheapest configuration and the decision for it take {needed_ms:.1f} "
        f"ms; begin at {enough} or more"
    )
