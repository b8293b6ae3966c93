"""The charts as data: title, hint, metrics, unit and place."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from posixpath import commonpath
from typing import Any

import numpy as np
import orjson

from verl_ext.errors import UserError
from verl_ext.health.context import schedule_of
from verl_ext.metrics.registry import METRICS, Metric, lookup_metric
from verl_ext.monitor.curves import RunCurves
from verl_ext.monitor.database import RunInfo
from verl_ext.monitor.meanings import CHINESE_MEANINGS
from verl_ext.monitor.text import translate

MAIN, OTHER, MORE = "main", "other", "more"
"""Places of charts: always visible, in a fold below, or in one of metrics without a predefined chart."""
MAX_NAME_CHARACTERS = 30
"""Maximum length of the name of a run in a chart before the words that all names share are removed."""
WORD_ENDS = re.compile(r"(?<=[_/])|(?<=(?<!\de)-)")
"""Places between the words of a name; the minus of a number such as 1e-5 is not one."""
SCHEDULE_POINTS = 500


@dataclass(frozen=True)
class Chart:
    """One chart, with its texts in English and Chinese.

    Attributes:
        name: title, and name in files and tests.
        hint: meaning, ideal trend, and possible causes of anomalies.
        metrics: metrics to show if the run has them.
        place: `MAIN`, `OTHER` or `MORE`.
        needs: metric that the chart requires; if empty, any of `metrics`.
        scale: factor of the values.
        line: value to mark.
        with_schedule: whether to draw the learning rate schedule of the recipe, and not to smooth.
    """

    name: str
    name_zh: str
    hint: str
    hint_zh: str
    metrics: tuple[str, ...]
    place: str = OTHER
    needs: str = ""
    scale: float = 1.0
    line: float | None = None
    with_schedule: bool = False

    @property
    def unit(self) -> str:
        """Unit of the values; `1` for plain numbers and scaled ones."""
        return unit_of(self.metrics[0]) if self.metrics and self.scale == 1.0 else "1"

    def texts(self, language: str) -> tuple[str, str]:
        """Title and hint in `en` or `zh`."""
        return (self.name_zh, self.hint_zh) if language == "zh" else (self.name, self.hint)


_TIMES = ("step", "data", "forward_backward", "optimizer", "rollout", "reward", "advantages", "shard", "update", "save")
CHARTS = (
    Chart(
        "Loss",
        "损失曲线",
        "Distance between the model's predictions and the references, in training and in validation (dots). It should "
        "fall quickly at first, then flatten. A sudden rise suggests a learning rate that is too high; a lasting rise "
        "or strong oscillation suggests unstable training. A policy loss (GRPO) may be negative and only has to stay "
        "bounded.",
        "模型预测与真实标签之间的差距，圆点为验证损失。理想趋势：初期快速下降，之后趋于平稳。突然上升可能是学习率过大；持续上升或剧烈"
        "震荡表示训练不稳定。GRPO 的策略损失可以为负，稳定即可。",
        ("train/loss", "val/loss"),
        MAIN,
    ),
    Chart(
        "Perplexity",
        "困惑度曲线",
        "exp(loss): the average number of tokens that the model considers likely. It should fall with the loss; lower "
        "is better, usually between 1 and a few dozen.",
        "exp(loss)：模型平均在多少个候选词中犹豫。理想趋势：与损失同步下降，越低越好，通常为个位数到几十。",
        ("train/perplexity", "val/perplexity"),
        MAIN,
    ),
    Chart(
        "Rewards",
        "奖励",
        "Mean total reward of the samples. It should rise, then stay high. Single steps are noisy, so look at the "
        "smoothed curve and at validation. A reward that stays negative or flat suggests unsuitable reward weights "
        "or an unsuitable learning rate.",
        "样本总奖励的均值。理想趋势：逐渐提升并稳定在较高值；单步波动正常，应看平滑曲线和验证值。一直为负或不提升时，"
        "应检查奖励权重或学习率。",
        ("train/reward_total_mean", "eval/reward_total_mean"),
        MAIN,
    ),
    Chart(
        "Reward by function",
        "各奖励函数",
        "Weighted contribution of each reward function. All should improve; if one falls while the total rises, the "
        "model trades it for the others.",
        "各奖励函数的加权贡献。理想趋势：都在提升；总奖励上升而某一项下降，说明它被牺牲了。",
        (),
        MAIN,
    ),
    Chart(
        "Accuracy",
        "准确率",
        "How well answers match the references, from 0 to 1. It should rise, then stay at a level that depends on the "
        "dataset. If it is always 0, references may be missing.",
        "答案与标准答案的匹配程度（0 到 1）。理想趋势：逐渐提升后稳定，水平取决于数据集。一直为 0 说明缺少标准答案。",
        ("train/accuracy_mean", "eval/accuracy_mean"),
        MAIN,
    ),
    Chart(
        "Latency and budget",
        "延迟与预算",
        "Latency and budget of the chosen configurations, in ms. Latency should settle close to and below the budget.",
        "所选配置的延迟与预算（毫秒）。理想趋势：逐渐稳定在预算附近且不超过预算。",
        ("train/latency_ms_mean", "eval/latency_ms_mean", "train/budget_ms_mean"),
        MAIN,
    ),
    Chart(
        "Violation rate",
        "预算违反率",
        "Fraction of configurations whose latency exceeds the budget. It should fall below 5% (the line).",
        "延迟超过预算的配置比例。理想趋势：逐渐降低到 5%（标线）以下。",
        ("train/budget_violation_mean", "eval/budget_violation_mean"),
        MAIN,
        line=0.05,
    ),
    Chart(
        "Gradient norm",
        "梯度范数",
        "L2 norm of the gradient before clipping. It should stay stable, usually between 0.1 and 10. Lasting values "
        "above 100 mean exploding gradients (lower the learning rate, or clip); values near 0 mean vanishing "
        "gradients.",
        "裁剪前梯度向量的 L2 范数，反映参数更新幅度。理想趋势：相对稳定，通常在 0.1 到 10 之间。持续大于 100 表示梯度"
        "爆炸，需降低学习率或裁剪；接近 0 可能是梯度消失。",
        ("train/grad_norm",),
    ),
    Chart(
        "Learning rate and its schedule",
        "学习率曲线（与调度）",
        "The current learning rate, and the schedule of the recipe as a dashed line. Both should agree: a warm-up "
        "from 0, then the decay of the schedule.",
        "当前使用的学习率，虚线为配置要求的调度。理想趋势：两者重合，预热阶段从 0 上升，之后按调度平滑下降。",
        ("train/lr(1e-3)",),
        scale=1e-3,
        with_schedule=True,
    ),
    Chart(
        "Evaluation loss",
        "评估损失",
        "Validation loss and training loss. Both should fall together with a small gap. A validation loss that rises "
        "while the training loss falls means overfitting; use the checkpoint before the rise.",
        "在评估集上计算的损失与训练损失。理想趋势：同步下降，差距不过大。训练损失下降而评估损失上升 = 过拟合，应选择"
        "上升之前的检查点。",
        ("train/loss", "val/loss"),
        needs="val/loss",
    ),
    Chart(
        "Training speed",
        "训练速度曲线",
        "Samples per second. It should be stable, with short dips at saves and validations. Strong fluctuations or a "
        "low level suggest slow data loading. It depends on the batch size and the length of the samples.",
        "每秒处理的样本数。理想趋势：保持稳定，保存检查点和评估时短暂下降。剧烈波动或持续偏低，可能是 "
        "I/O 瓶颈。它取决于批大小和序列长度。",
        ("throughput/train/samples_per_s",),
    ),
    Chart(
        "Token throughput",
        "词元吞吐量",
        "Tokens per second, without padding; in GRPO, completion tokens. It should be stable. Unlike samples per "
        "second, it hardly depends on the length of the samples.",
        "每秒处理的词元数，不含填充；GRPO 中为生成的词元。理想趋势：保持稳定。与样本速度不同，它几乎不取决于序列长度。",
        ("throughput/train/tokens_per_s", "throughput/train/valid_tokens_per_s"),
    ),
    Chart(
        "Step time",
        "每步时间",
        "Seconds per step. They should be stable, with spikes at saves. A lasting rise suggests growing memory or slow "
        "data loading.",
        "每步训练时间（秒）。理想趋势：稳定，保存检查点时出现尖峰属于正常。持续增长可能是内存增长或数据加载过慢。",
        ("train/time(s)", "time/train/step_s"),
        needs="train/time(s)",
    ),
    Chart(
        "Advantages",
        "优势",
        "Advantages of the samples within their groups. The mean should be about 0 and the spread bounded; a standard "
        "deviation of 0 means that groups give no signal.",
        "组内样本的优势值。理想趋势：均值约为 0，离散程度有界；标准差为 0 表示组内没有学习信号。",
        ("train/adv_mean", "train/adv_std", "train/adv_min", "train/adv_max"),
    ),
    Chart(
        "Entropy",
        "熵",
        "Entropy of the sampling distributions. It should fall slowly. A sudden collapse means that the policy stops "
        "exploring; a rise means that it becomes random.",
        "采样分布的熵。理想趋势：缓慢下降。突然塌缩表示策略不再探索；上升表示策略趋于随机。",
        ("train/entropy",),
    ),
    Chart(
        "Completion and prompt length",
        "回答与提示长度",
        "Mean length in tokens. Prompts should keep their length; completions should change slowly. Growth up to the "
        "limit suggests truncated answers or a reward for length.",
        "平均长度（词元）。理想趋势：提示长度稳定，回答长度缓慢变化。持续增长到上限说明回答被截断，或奖励偏向长度。",
        ("train/seq_completion_len_mean", "train/seq_prompt_len_mean"),
    ),
    Chart(
        "Engine against trainer",
        "引擎与训练器的对数概率差",
        "Difference between the engine's and the trainer's log-probabilities of the same tokens. It should be small "
        "and stable; growth means that the rollouts no longer come from the trained policy.",
        "推理引擎与训练器对同一词元的对数概率之差。理想趋势：小且稳定；增大说明采样已偏离当前策略。",
        ("train/rollout_logprob_diff_mean", "train/rollout_logprob_diff_max"),
    ),
    Chart(
        "Time by part",
        "各阶段耗时",
        "Seconds of each part of a step. The parts should be stable, and computation should dominate; if data takes a "
        "large part, the GPUs wait.",
        "每步各阶段耗时（秒）。理想趋势：各部分稳定，计算占主要部分；数据部分过大说明 GPU 在等待。",
        tuple(f"time/train/{part}_s" for part in _TIMES),
    ),
    Chart(
        "Memory and disk",
        "内存与磁盘",
        "Peak memory and free disk space in GiB. Memory should be stable after the first steps; free space falls until "
        "rotation removes old checkpoints.",
        "内存峰值与磁盘剩余空间（GiB）。理想趋势：内存在最初几步后保持稳定；磁盘空间在旧检查点开始轮换后不再减少。",
        ("system/peak_memory_gib", "system/disk_free_gib"),
    ),
)


def charts_for(metrics: Collection[str]) -> list[Chart]:
    """Return the charts of a run with these metrics; each chart has only metrics of the run."""
    found = []
    for chart in CHARTS:
        known = reward_functions(metrics) if chart.name == "Reward by function" else chart.metrics
        shown = tuple(name for name in known if name in metrics)
        if shown and (not chart.needs or chart.needs in metrics):
            found.append(replace(chart, metrics=shown))
    return found


def more_charts(metrics: Collection[str], charts: Sequence[Chart]) -> list[Chart]:
    """Return a chart for each metric that is not in other charts, by name."""
    others = sorted({*metrics} - {name for chart in charts for name in chart.metrics})
    return [Chart(name, name, metric_hint(name, "en"), metric_hint(name, "zh"), (name,), MORE) for name in others]


def reward_functions(metrics: Collection[str]) -> tuple[str, ...]:
    """Return the metrics of reward functions: means over training samples that are not in the registry."""
    return tuple(name for name in sorted(metrics) if re.fullmatch(r"train/\w+_mean", name) and name not in METRICS)


def schedule_points(config: Mapping[str, Any], run: RunInfo, curves: RunCurves) -> list[tuple[int, float]]:
    """Return the learning rate schedule of the recipe, on the axis of the last attempt; empty if there is none."""
    total_steps = run.total_steps
    try:
        schedule = schedule_of(config, total_steps, curves.steps_per_epoch, orjson.loads(run.record)["attempts"])
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):  # the configuration of another version
        return []
    if schedule is None or not total_steps:
        return []
    offset = curves.offsets.get(max(curves.offsets, default=0), 0)
    steps = np.unique(np.linspace(1, total_steps, min(total_steps, SCHEDULE_POINTS)).astype(int)).tolist()
    return [(step + offset, schedule.at(step)) for step in steps]


# Metrics


@lru_cache(10_000)
def registered(metric: str) -> Metric | None:
    """Return the registry's entry of a metric; None for a name that it does not have."""
    try:
        return lookup_metric(metric)
    except UserError:
        return None


def unit_of(metric: str) -> str:
    """Return the unit of a metric; `1` for plain numbers and unknown metrics."""
    entry = registered(metric)
    return "1" if entry is None else entry.unit


def metric_hint(metric: str, language: str) -> str:
    """Explain a metric by the hint of its chart, or else by the registry."""
    for chart in CHARTS:
        if metric in chart.metrics:
            return chart.texts(language)[1]
    entry = registered(metric)
    meaning = "" if entry is None else entry.meaning
    return CHINESE_MEANINGS.get(meaning, meaning) if language == "zh" else meaning


def is_validation(metric: str) -> bool:
    """Whether a metric is of validation, which runs once in many steps."""
    return metric.startswith(("val/", "eval/"))


_SPLITS = {"train": "train", "val": "validation", "eval": "validation"}


def short_labels(metrics: Sequence[str], language: str) -> dict[str, str]:
    """Return a label for each metric of a chart: what differs among them, such as `train` and `validation`."""
    splits = [next((_SPLITS[part] for part in name.split("/") if part in _SPLITS), "") for name in metrics]
    words = [name.split("/")[-1].split("_") for name in metrics]
    for end in (0, -1):
        while len({tuple(each) for each in words}) > 1 and len({each[end] for each in words}) == 1:
            if min(map(len, words)) == 1:
                break
            for each in words:
                del each[end]
    is_one = len({tuple(each) for each in words}) == 1 and metrics[0] in METRICS  # functions of rewards keep their name
    labels = []
    for split, each in zip(splits, words):
        rest = "" if is_one else " ".join(each)
        shown = translate(language, split) if split and (is_one or len({*splits}) > 1) else ""
        labels.append(", ".join(filter(None, [rest, shown])))
    is_clear = all(labels) and len({*labels}) == len(labels)
    return dict(zip(metrics, labels if is_clear else metrics))


def short_names(paths: list[str]) -> list[str]:
    """Remove what all paths share: directories, and the first and last words of long names.

    If two names would be equal, the paths stay as they are.
    """
    shared = commonpath(paths) if len(paths) > 1 and not any(path.startswith("/") for path in paths) else ""
    names = [path.removeprefix(f"{shared}/") for path in paths]
    if len(paths) > 1 and max(map(len, names)) > MAX_NAME_CHARACTERS:
        names = _differing_words(names)
    return names if len({*names}) == len(paths) and all(names) else paths


def _differing_words(names: list[str]) -> list[str]:
    words = [WORD_ENDS.split(name) for name in names]
    for end in (0, -1):
        while min(map(len, words)) > 1 and len({each[end] for each in words}) == 1:
            for each in words:
                del each[end]
    return ["".join(each).rstrip("_-/") for each in words]
