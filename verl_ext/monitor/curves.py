"""Curves of a run for the pages: one axis over restarts, downsampling, latest values, time left, smoothing.

The follower adds the rows that it reads to a `RunCurves`, and all pages draw from the same object. The database stores
its `dump`, so a restart of the monitor loads a few blobs instead of reading the rows again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from scipy.ndimage import uniform_filter1d
from scipy.signal import lfilter

from verl_ext.health.history import columns_of
from verl_ext.health.rule import LOSS
from verl_ext.health.run_directory import PAUSES
from verl_ext.health.trend import Array
from verl_ext.metrics.jsonl import MetricsRow

MAX_POINTS = 4000
"""Maximum number of points of a curve."""
MAX_SEGMENTS = 1000
"""Maximum number of segments of a longer curve, each with two points: about one per pixel of a chart."""
RECENT_STEPS = 50
"""Number of recent steps that predict the time left; earlier ones may have run on another machine."""
MIN_SMOOTHED_POINTS = 30
AXES = ("step", "tokens", "time")
"""Quantities on the x-axis: steps, trained tokens, and minutes since the first row, all over all attempts."""
NUM_TOKENS = ("train/num_loss_tokens", "train/total_valid_token_count")
"""Metrics that count a step's tokens; the first that a run has is used."""
_AXIS_PREFIX = "axis "
"""Prefix of the saved name of an axis, which no metric has."""


class CurveEnvelope:
    """A curve of any length in bounded memory: all points while there are few, then the extrema of equal segments.

    `segments` is (segments, 6): x and y of the minimum, x and y of the maximum, sum and count of the values.
    """

    def __init__(self, segments: Array | None = None, size: int = 1, pending: Array | None = None) -> None:
        self.segments = np.empty((0, 6)) if segments is None else segments
        self.size = size  # points in a segment, a power of 2
        self.pending = np.empty((0, 2)) if pending is None else pending  # points of the unfinished segment

    @classmethod
    def of_range(cls, points: Array, low: float, high: float) -> CurveEnvelope:
        """Return the part of a curve from `low` to `high`, and a point on each side; `points` is (points, 2)."""
        begin, end = np.searchsorted(points[:, 0], low, "left"), np.searchsorted(points[:, 0], high, "right")
        part, envelope = points[max(0, begin - 1) : end + 1], cls()
        envelope.add(part[:, 0], part[:, 1])
        return envelope

    def add(self, x: Array, y: Array) -> None:
        """Append points; both arrays are (points,), and points with non-finite y are dropped."""
        points = finite_points(x, y)
        self.pending = np.concatenate([self.pending, points]) if len(self.pending) else points
        while len(self.pending):
            free = (MAX_POINTS if self.size == 1 else MAX_SEGMENTS) - len(self.segments)
            if free <= 0:  # every limit is even, so segments pair up
                self.segments, self.size = _merge(self.segments[::2], self.segments[1::2]), 2 * self.size
                continue
            count = min(len(self.pending) // self.size, free)
            if count == 0:
                return
            whole, self.pending = np.split(self.pending, [count * self.size])
            self.segments = np.concatenate([self.segments, _summarize(whole.reshape(count, self.size, 2))])

    @property
    def num_points(self) -> int:
        """Number of finite points so far."""
        return self.size * len(self.segments) + len(self.pending)

    def points(self) -> tuple[Array, Array]:
        """Return x and y of at most `MAX_POINTS` points in order, including all extrema."""
        segments = self._with_pending()
        if self.size == 1:
            return segments[:, 0], segments[:, 1]
        pairs = segments[:, :4].reshape(-1, 2, 2)
        is_reversed = pairs[:, 0, 0] > pairs[:, 1, 0]
        points: Array = np.where(is_reversed[:, None, None], pairs[:, ::-1], pairs).reshape(-1, 2)
        return points[:, 0], points[:, 1]

    def means(self) -> tuple[Array, Array]:
        """Return the middle and the mean of each segment, for smoothing."""
        segments = self._with_pending()
        return (segments[:, 0] + segments[:, 2]) / 2, segments[:, 4] / segments[:, 5]

    def _with_pending(self) -> Array:
        if not len(self.pending):
            return self.segments
        return np.concatenate([self.segments, _summarize(self.pending[None])])


def _summarize(points: Array) -> Array:
    """Convert points (segments, size, 2) to segments (segments, 6)."""
    rows = np.arange(len(points))
    low, high = points[rows, points[:, :, 1].argmin(1)], points[rows, points[:, :, 1].argmax(1)]
    count = np.full((len(points), 1), float(points.shape[1]))
    return np.concatenate([low, high, points[:, :, 1].sum(1, keepdims=True), count], axis=1)


def _merge(left: Array, right: Array) -> Array:
    """Merge pairs of neighboring segments into segments of twice the size."""
    low = np.where((left[:, 1] <= right[:, 1])[:, None], left[:, 0:2], right[:, 0:2])
    high = np.where((left[:, 3] >= right[:, 3])[:, None], left[:, 2:4], right[:, 2:4])
    return np.concatenate([low, high, left[:, 4:] + right[:, 4:]], axis=1)


class RunCurves:
    """All curves of a run over one axis, which counts steps over all attempts.

    An attempt that resumes at step 20 after one that reached step 30 repeats steps 21 to 30. On this axis it starts at
    30, so both are visible. If no attempt loses a step, the axis equals the steps.

    Other threads hold `lock` while they read; `version` changes with every new row.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version = 0
        self.last_id = 0  # id of the newest row in here
        self.num_unsaved = 0  # rows since the last dump
        self.saved_id = 0  # id of the newest row in the saved curves and points
        self.envelopes: dict[str, CurveEnvelope] = {}
        self.unsaved: dict[str, Array] = {}  # by metric: points (points, 2) that are not saved
        self.axes = {name: CurveEnvelope() for name in AXES[1:]}  # values at steps, for `AXES`
        self.gaps: dict[str, list[float]] = {}  # by metric: places where its values begin to be non-finite
        self.latest: dict[str, float] = {}
        self.starts: dict[int, int] = {}  # by attempt: its start on the axis
        self.offsets: dict[int, int] = {}  # by attempt: axis minus step
        self.steps_per_epoch: int | None = None
        self.longest_pause_s = 0.0
        self._end = 0
        self._begin_s: float | None = None
        self._num_tokens = 0.0
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=RECENT_STEPS)  # attempt, step, time

    def add(self, rows: Sequence[MetricsRow], first_steps: Mapping[int, int], last_id: int = 0) -> None:
        """Append rows in their order.

        Args:
            rows: new rows.
            first_steps: step from which each attempt resumed, if `run.json` has it.
            last_id: id of the last row in the database.
        """
        x = np.array([self._place(row, first_steps) for row in rows], np.float64)
        columns = columns_of([row.metrics for row in rows])
        self._add_to_axes(x, rows, columns)
        for name, (places, values) in columns.items():
            self.envelopes.setdefault(name, CurveEnvelope()).add(x[places], values)
            points = finite_points(x[places], values)
            self.unsaved[name] = np.concatenate([self.unsaved[name], points]) if name in self.unsaved else points
            self._add_gaps(name, x[places], values)
            self.latest[name] = float(values[-1])
            if name in PAUSES:
                self.longest_pause_s = float(np.nanmax([self.longest_pause_s, *values]))
        self._recent.extend(
            (row.attempt, row.step, row.time) for row in rows[-4 * RECENT_STEPS :] if LOSS in row.metrics
        )
        self.last_id = last_id
        self.num_unsaved += len(rows)
        self.version += 1

    def _add_gaps(self, name: str, x: Array, values: Array) -> None:
        """Note where values stop being finite; with too many places, every second one is dropped."""
        is_finite = np.isfinite(values)
        if is_finite.all():
            return
        was_finite = np.concatenate([[np.isfinite(self.latest.get(name, 0.0))], is_finite[:-1]])
        gaps = self.gaps.get(name, []) + x[was_finite & ~is_finite].tolist()
        self.gaps[name] = gaps if len(gaps) <= MAX_SEGMENTS else gaps[::2]

    def _place(self, row: MetricsRow, first_steps: Mapping[int, int]) -> int:
        """Return the position of a row on the axis."""
        if row.attempt not in self.offsets:
            first = first_steps.get(row.attempt, max(0, row.step - 1))
            self.starts[row.attempt] = self._end if self.offsets else first
            self.offsets[row.attempt] = self.starts[row.attempt] - first
        place = row.step + self.offsets[row.attempt]
        self._end = max(self._end, place)
        epoch = row.metrics.get("train/epoch")
        # with a tiny epoch, the number of steps would overflow the integers of the saved state
        if isinstance(epoch, (int, float)) and epoch > 1e-9 and abs(row.step / epoch) < 1 << 53:
            self.steps_per_epoch = round(row.step / epoch)
        return place

    def _add_to_axes(self, x: Array, rows: Sequence[MetricsRow], columns: Mapping[str, tuple[Any, Array]]) -> None:
        if rows and self._begin_s is None:
            self._begin_s = rows[0].time
        self.axes["time"].add(x, np.array([row.time - (self._begin_s or 0.0) for row in rows]) / 60)
        counted = next((name for name in NUM_TOKENS if name in columns), None)
        if counted is not None:
            places, values = columns[counted]
            if not self.has_axis("tokens"):  # a validation before the first step is at 0 tokens
                self.axes["tokens"].add(x[places[:1]] - 1, np.zeros(1))
            totals = self._num_tokens + np.cumsum(np.where(np.isfinite(values), values, 0.0))
            self.axes["tokens"].add(x[places], totals)
            self._num_tokens = float(totals[-1])

    def without_lost_steps(self, x: Array, values: Array) -> tuple[Array, Array]:
        """Convert positions to the run's own steps, and drop points of steps that a later attempt repeats.

        Args:
            x: (points,), ascending.
            values: (points,).
        """
        if not len(x) or not self.offsets:
            return x, values
        offsets, firsts = self._offsets_and_first_steps()
        attempts = np.searchsorted([*self.starts.values()][1:], x)  # a start belongs to the attempt before it
        last_steps = np.append(np.minimum.accumulate(firsts[::-1])[::-1][1:], np.inf)
        steps = x - offsets[attempts]
        is_kept = steps <= last_steps[attempts]
        return steps[is_kept], values[is_kept]

    def to_places(self, steps: Array) -> Array:
        """Convert the run's own steps to positions on the axis, in the last attempt that has them."""
        if not self.offsets:
            return steps
        offsets, firsts = self._offsets_and_first_steps()
        attempts = len(firsts) - 1 - np.argmax(firsts[::-1] < steps[:, None], axis=1)
        attempts[steps <= firsts.min()] = 0
        return steps + offsets[attempts]

    def _offsets_and_first_steps(self) -> tuple[Array, Array]:
        """Return the offset and the step before the first one of each attempt, in order."""
        offsets = np.array([*self.offsets.values()], float)
        return offsets, np.array([*self.starts.values()], float) - offsets

    def has_axis(self, axis: str) -> bool:
        """Whether positions in steps can be converted to one of `AXES`."""
        return axis == AXES[0] or self.axes[axis].num_points > 0

    def to_axis(self, steps: Array, axis: str) -> Array:
        """Convert positions in steps to one of `AXES`; without its values, they remain steps."""
        x, values = self._axis(axis)
        return np.interp(steps, x, values) if len(x) else steps

    def ends(self, axis: str = AXES[0]) -> list[float]:
        """Return the first and the last position of a row on one of `AXES`; empty before the first row."""
        x, _ = self.axes["time"].points()
        return self.to_axis(x[[0, -1]], axis).tolist() if len(x) else []

    def step_ends(self) -> list[float]:
        """Return the first and the last of the run's own steps; empty before the first row."""
        x, _ = self.axes["time"].points()
        steps, _ = self.without_lost_steps(x, x)
        return steps[[0, -1]].tolist() if len(steps) else []

    def to_steps(self, positions: Array, axis: str) -> Array:
        """Convert positions on one of `AXES` to steps."""
        x, values = self._axis(axis)
        return np.interp(positions, values, x) if len(x) else positions

    def _axis(self, axis: str) -> tuple[Array, Array]:
        if axis not in self.axes:
            return np.empty(0), np.empty(0)
        x, values = self.axes[axis].points()
        return x, np.maximum.accumulate(values)  # a clock may be set back

    @property
    def step(self) -> int:
        """The last training step; 0 before the first."""
        return self._recent[-1][1] if self._recent else 0

    def step_seconds(self) -> float | None:
        """Return the mean duration of the last attempt's recent steps, including pauses; None if unknown."""
        recent = [(step, time) for attempt, step, time in self._recent if attempt == self._recent[-1][0]]
        if not recent:
            return None
        steps, seconds = recent[-1][0] - recent[0][0], recent[-1][1] - recent[0][1]
        return seconds / steps if steps > 0 and seconds > 0 else None

    def seconds_left(self, total_steps: int | None) -> float | None:
        """Return the time until the last step at the recent speed; None if unknown."""
        step_seconds = self.step_seconds()
        return None if total_steps is None or step_seconds is None else max(0, total_steps - self.step) * step_seconds

    def dump(self) -> tuple[bytes, list[tuple[str, int, bytes, bytes]]]:
        """Return the state as JSON, and name, segment size, segments and pending points of each metric.

        Segments of one point are saved as points (points, 2), a third of the size.
        """
        state = {
            "last_id": self.last_id,
            "gaps": [*self.gaps.items()],
            # JSON has no non-finite numbers
            "latest": [(name, value if np.isfinite(value) else str(value)) for name, value in self.latest.items()],
            "starts": [*self.starts.items()],
            "offsets": [*self.offsets.items()],
            "steps_per_epoch": self.steps_per_epoch,
            "longest_pause_s": self.longest_pause_s,
            "end": self._end,
            "begin_s": self._begin_s,
            "num_tokens": self._num_tokens,
            "recent": [*self._recent],
        }
        self.num_unsaved, self.saved_id, self.unsaved = 0, self.last_id, {}
        named = {**self.envelopes, **{_AXIS_PREFIX + name: each for name, each in self.axes.items()}}
        blobs = [
            (name, each.size, each.segments[:, : 2 if each.size == 1 else 6].tobytes(), each.pending.tobytes())
            for name, each in named.items()
        ]
        return orjson.dumps(state), blobs

    @classmethod
    def load(cls, state: str | bytes, blobs: Iterable[tuple[str, int, bytes, bytes]]) -> RunCurves:
        """Restore curves from the result of `dump`."""
        found, curves = orjson.loads(state), cls()
        curves.last_id, curves.saved_id, curves.version = found["last_id"], found["last_id"], 1
        curves.gaps = dict(found["gaps"])
        curves.latest = {name: float(value) for name, value in found["latest"]}
        curves.starts, curves.offsets = dict(found["starts"]), dict(found["offsets"])
        curves.steps_per_epoch, curves.longest_pause_s = found["steps_per_epoch"], found["longest_pause_s"] or 0.0
        curves._end, curves._begin_s, curves._num_tokens = found["end"], found["begin_s"], found["num_tokens"]
        curves._recent.extend(map(tuple, found["recent"]))
        for name, size, segments, pending in blobs:
            saved = np.frombuffer(segments)
            whole = _summarize(saved.reshape(-1, 1, 2)) if size == 1 else saved.reshape(-1, 6)
            arrays = whole, size, np.frombuffer(pending).reshape(-1, 2)
            is_axis = name.startswith(_AXIS_PREFIX)
            (curves.axes if is_axis else curves.envelopes)[name.removeprefix(_AXIS_PREFIX)] = CurveEnvelope(*arrays)
        return curves


def finite_points(x: Array, y: Array) -> Array:
    """Return points (points, 2), without those whose y is not finite."""
    points: Array = np.column_stack([x, y])[np.isfinite(y)]
    return points


# Smoothing


def ema(values: Array, weight: float) -> Array:
    """Exponential moving average with bias correction, as in Adam (Kingma and Ba, 2015).

    Args:
        values: (points,), finite.
        weight: weight of the past, from 0 (no smoothing) to below 1.
    """
    if not len(values) or weight == 0:
        return values
    past = lfilter([1 - weight], [1, -weight], values)
    return past / (1 - weight ** np.arange(1, len(values) + 1))


def moving_average(values: Array, window: int) -> Array:
    """Mean over a window around each point; the window is truncated at the ends.

    Args:
        values: (points,), finite.
        window: number of points, odd; 1 changes nothing.
    """
    if not len(values) or window <= 1:
        return values
    total = uniform_filter1d(values, window, mode="constant")
    return total / uniform_filter1d(np.ones_like(values), window, mode="constant")


def smooth(values: Array, weight: float) -> Array:
    """`ema`, then `moving_average` with a window that grows with the weight, to 9 points at 0.9."""
    return moving_average(ema(values, weight), 1 + 2 * round(weight * 4.5))


def breaks_of(x: Array, gaps: Sequence[float]) -> dict[int, float]:
    """Return the gaps between points, by the index of the next point; `x` is (points,), ascending."""
    places = np.searchsorted(x, gaps).tolist()
    return {place: gap for place, gap in zip(places, gaps) if 0 < place < len(x)}


def smooth_parts(values: Array, breaks: Iterable[int], weight: float) -> Array:
    """Smooth the parts of a curve between breaks.

    Args:
        values: (points,), finite.
        breaks: indices at which parts begin, ascending.
        weight: see `smooth`.
    """
    parts = np.split(values, [*breaks])
    return np.concatenate([smooth(part, weight) for part in parts])


def is_worth_smoothing(num_points: int, weight: float) -> bool:
    """Whether to smooth a curve; smoothing would flatten curves with few points, such as validations."""
    return weight > 0 and num_points >= MIN_SMOOTHED_POINTS
