"""The configuration of the health rules."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.config.schema import section, setting
from verl_ext.errors import UserError


@dataclass(kw_only=True)
class HealthLimits:
    """`health.limits`: thresholds of the rules."""

    trend_epochs: int = setting(10, "Epochs over which loss or reward may move in the wrong direction", gt=0)
    stuck_epochs: int = setting(
        20, "Epochs over which accuracy may be 0, the violation rate high, or the reward without a rise", gt=0
    )
    trend_p: float = setting(1e-3, "One-sided p-value (Mann-Kendall) below which a trend is a warning", gt=0, lt=0.5)
    trend_p_alarm: float = setting(1e-4, "The same for an alarm", gt=0, lt=0.5)
    improvement_p: float = setting(0.01, "One-sided p-value below which a metric counts as improving", gt=0, lt=0.5)
    window: int = setting(20, "Steps that count as recent", ge=3, le=256)
    nonfinite_steps: int = setting(3, "Consecutive steps without a finite loss that are an alarm", gt=0)
    initial_loss_max: float = setting(
        5.0, "nat/token; a higher first loss of trained weights points at data or model", gt=0
    )
    final_loss_min: float = setting(0.1, "nat/token; a lower last loss points at overfitting", gt=0)
    final_val_loss_max: float = setting(2.0, "nat/token; a higher last validation loss is a notice", gt=0)
    loss_min_change: float = setting(0.1, "nat/token; smaller changes of a loss are ignored", gt=0)
    loss_jitter_max: float = setting(0.5, "Spread of the recent losses over their level", gt=0)
    policy_loss_max: float = setting(10.0, "Absolute policy loss that is extreme", gt=0)
    val_margin: float = setting(0.02, "Share by which a validation loss must exceed its best to count as risen", gt=0)
    val_min_change: float = setting(0.01, "nat/token; a smaller rise is ignored", gt=0)
    grad_norm_min: float = setting(0.1, "Lower end of the usual range", gt=0)
    grad_norm_max: float = setting(10.0, "Upper end of the usual range", gt=0)
    grad_norm_alarm: float = setting(100.0, "Gradient norm that must not last", gt=0)
    grad_norm_vanished: float = setting(0.001, "Gradient norm below which nothing is learned", gt=0)
    step_time_factor: float = setting(3.0, "Multiple of the usual step time", gt=0)
    step_time_growth: float = setting(0.5, "Share by which step times may grow over a run", gt=0)
    data_share_max: float = setting(0.3, "Share of a step that waiting for data may take", gt=0)
    throughput_spread_max: float = setting(0.5, "Spread of the throughput over its median in recent steps", gt=0)
    lr_tolerance: float = setting(
        0.02, "Share of the peak by which the learning rate may differ from its schedule", gt=0
    )
    adv_mean_max: float = setting(0.1, "Mean of the advantages over their spread", gt=0)
    adv_std_max: float = setting(3.0, "Spread of the advantages, which is about 1 if they are normalized", gt=0)
    reward_max: float = setting(10.0, "Absolute mean reward of a step that is extreme", gt=0)
    reward_std_max: float = setting(5.0, "Spread of the rewards in a step that is extreme", gt=0)
    reward_jitter_max: float = setting(
        1.0, "Jitter of the mean reward from step to step, over its level where that is above 1", gt=0
    )
    eval_drop_max: float = setting(0.1, "Share of its best by which the reward of an evaluation may fall", gt=0)
    eval_min_change: float = setting(0.05, "A smaller fall of the reward of an evaluation is ignored", gt=0)
    milestone_epochs: int = setting(10, "Epochs between two milestones", gt=0)
    reward_milestones: list[float] = setting([-0.5, 0.0, 0.3], "Mean reward that a controller has at each milestone")
    accuracy_milestones: list[float] = setting([0.0, 0.1, 0.2], "Accuracy that a controller has at each milestone")
    violation_milestones: list[float] = setting(
        [0.5, 0.3, 0.2], "Violation rate that a controller stays below at each milestone"
    )
    reward_failure_share: float = setting(0.05, "Failures of reward functions per sample that are a warning", gt=0)
    reward_failure_share_alarm: float = setting(0.5, "Failures of reward functions per sample that are an alarm", gt=0)
    violation_alarm: float = setting(0.5, "Violation rate that must not last", gt=0)
    violation_goal: float = setting(0.05, "Violation rate that a trained controller keeps", gt=0)
    latency_share_min: float = setting(0.5, "Share of the budget below which latency leaves it unused", gt=0)
    entropy_share_min: float = setting(0.05, "Share of the first entropy below which it has collapsed", gt=0)
    length_share_min: float = setting(
        0.5, "Share of the first completion length below which completions are short", gt=0
    )
    logprob_gap: float = setting(0.05, "nat; mean distance of the engine's and the trainer's log-probabilities", gt=0)
    logprob_gap_alarm: float = setting(0.2, "nat; the same, where updates go wrong", gt=0)
    disk_saves_left: float = setting(5.0, "Further saves that the disk should have room for", gt=0)


@dataclass(kw_only=True)
class HealthConfig:
    """`health`: the rules that check a run's metrics."""

    enabled: bool = setting(True, "Check the rules on rank 0 and report what they find")
    every: int = setting(10, "Steps between two checks; validations and non-finite losses are checked at once", ge=1)
    rules: list[str] = setting([], "Lists of your own rules, each path.py:LIST or package.module:LIST")
    stop_on: list[str] = setting([], "Rules whose warning or alarm stops the run, with a checkpoint")
    limits: HealthLimits = section(HealthLimits)

    def check(self) -> None:
        """Rules stop a run only where they are checked."""
        if self.stop_on and not self.enabled:
            raise UserError("health.stop_on has no effect with health.enabled=false; set it to true")
