"""The configuration of the health rules."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.config.schema import section, setting
from verl_ext.errors import UserError


@dataclass(kw_only=True)
class HealthLimits:
    """`health.limits`: thresholds of the rules."""

    trend_epochs: int = setting(10, "Epochs for which loss or reward may worsen", gt=0)
    stuck_epochs: int = setting(20, "Epochs for which accuracy may be 0, violations frequent, or reward flat", gt=0)
    trend_p: float = setting(1e-3, "One-sided Mann-Kendall p-value of a trend, for a warning", gt=0, lt=0.5)
    trend_p_alarm: float = setting(1e-4, "The same p-value for an alarm", gt=0, lt=0.5)
    improvement_p: float = setting(0.01, "One-sided p-value below which a metric is improving", gt=0, lt=0.5)
    window: int = setting(20, "Steps that count as recent", ge=3, le=256)
    nonfinite_steps: int = setting(3, "Consecutive non-finite losses for an alarm", gt=0)
    initial_loss_max: float = setting(5.0, "nat/token; maximum initial loss of pretrained weights", gt=0)
    final_loss_min: float = setting(0.1, "nat/token; a lower final loss suggests overfitting", gt=0)
    final_val_loss_max: float = setting(2.0, "nat/token; a higher final validation loss is a notice", gt=0)
    loss_min_change: float = setting(0.1, "nat/token; ignore smaller loss changes", gt=0)
    loss_jitter_max: float = setting(0.5, "Maximum spread of recent losses relative to their level", gt=0)
    policy_loss_max: float = setting(10.0, "Maximum absolute policy loss", gt=0)
    val_margin: float = setting(0.02, "Relative rise of the validation loss above its best", gt=0)
    val_min_change: float = setting(0.01, "nat/token; ignore smaller rises", gt=0)
    grad_norm_min: float = setting(0.1, "Lower end of the usual gradient norm", gt=0)
    grad_norm_max: float = setting(10.0, "Upper end of the usual gradient norm", gt=0)
    grad_norm_alarm: float = setting(100.0, "A lasting gradient norm above this is an alarm", gt=0)
    grad_norm_vanished: float = setting(0.001, "Gradient norm below which nothing is learned", gt=0)
    step_time_factor: float = setting(3.0, "Multiple of the usual step time that counts as slow", gt=0)
    step_time_growth: float = setting(0.5, "Relative growth of step times over a run", gt=0)
    data_share_max: float = setting(0.3, "Maximum fraction of a step spent waiting for data", gt=0)
    throughput_spread_max: float = setting(0.5, "Maximum spread of recent throughput relative to its median", gt=0)
    lr_tolerance: float = setting(0.02, "Maximum deviation from the schedule, relative to the peak learning rate", gt=0)
    adv_mean_max: float = setting(0.1, "Maximum mean advantage relative to the spread", gt=0)
    adv_std_max: float = setting(3.0, "Maximum spread of advantages; about 1 if normalized", gt=0)
    reward_max: float = setting(10.0, "Maximum absolute mean reward of a step", gt=0)
    reward_std_max: float = setting(5.0, "Maximum spread of rewards in a step", gt=0)
    reward_jitter_max: float = setting(
        1.0, "Maximum step-to-step jitter of the mean reward, relative to levels above 1", gt=0
    )
    eval_drop_max: float = setting(0.1, "Relative fall of the evaluation reward below its best", gt=0)
    eval_min_change: float = setting(0.05, "Ignore smaller falls of the evaluation reward", gt=0)
    milestone_epochs: int = setting(10, "Epochs between milestones", gt=0)
    reward_milestones: list[float] = setting([-0.5, 0.0, 0.3], "Minimum mean reward of a controller at each milestone")
    accuracy_milestones: list[float] = setting([0.0, 0.1, 0.2], "Minimum accuracy of a controller at each milestone")
    violation_milestones: list[float] = setting(
        [0.5, 0.3, 0.2], "Maximum violation rate of a controller at each milestone"
    )
    reward_failure_share: float = setting(0.05, "Reward failures per sample for a warning", gt=0)
    reward_failure_share_alarm: float = setting(0.5, "Reward failures per sample for an alarm", gt=0)
    violation_alarm: float = setting(0.5, "A lasting violation rate above this is an alarm", gt=0)
    violation_goal: float = setting(0.05, "Maximum violation rate of a trained controller", gt=0)
    latency_share_min: float = setting(0.5, "Minimum fraction of the budget that latency should use", gt=0)
    entropy_share_min: float = setting(0.05, "Fraction of the initial entropy below which it has collapsed", gt=0)
    length_share_min: float = setting(0.5, "Minimum completion length relative to the initial one", gt=0)
    logprob_gap: float = setting(0.05, "nat; mean log-probability difference of engine and trainer for a warning", gt=0)
    logprob_gap_alarm: float = setting(0.2, "nat; the same for an alarm", gt=0)
    disk_saves_left: float = setting(5.0, "Saves that should still fit on the disk", gt=0)


@dataclass(kw_only=True)
class HealthConfig:
    """`health`: the rules that check a run's metrics."""

    enabled: bool = setting(True, "Check the rules on rank 0 and report findings")
    every: int = setting(10, "Steps between checks; validations and non-finite losses are checked immediately", ge=1)
    rules: list[str] = setting([], "Custom rule lists, each path.py:LIST or package.module:LIST")
    stop_on: list[str] = setting([], "Rules whose warning or alarm saves a checkpoint and stops the run")
    limits: HealthLimits = section(HealthLimits)

    def check(self) -> None:
        """Rules stop a run only where they are checked."""
        if self.stop_on and not self.enabled:
            raise UserError("health.stop_on has no effect with health.enabled=false; set it to true")
