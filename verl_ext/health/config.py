"""The configuration of the health rules."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.config.schema import section, setting
from verl_ext.errors import UserError


@dataclass(kw_only=True)
class HealthLimits:
    """`health.limits`: thresholds of the rules."""

    trend_epochs: int = setting(10, "Epochs over which trends are measured", gt=0)
    stuck_epochs: int = setting(20, "Epochs without progress", gt=0)
    trend_p: float = setting(1e-3, "p-value of a trend for a warning", gt=0, lt=0.5)
    trend_p_alarm: float = setting(1e-4, "The same for an alarm", gt=0, lt=0.5)
    improvement_p: float = setting(0.01, "p-value of an improvement", gt=0, lt=0.5)
    window: int = setting(20, "Recent steps to check", ge=3, le=256)
    nonfinite_steps: int = setting(3, "Consecutive non-finite losses for an alarm", gt=0)
    initial_loss_max: float = setting(5.0, "Maximum initial loss of pretrained weights, nat/token", gt=0)
    final_loss_min: float = setting(0.1, "Minimum final loss, nat/token", gt=0)
    final_val_loss_max: float = setting(2.0, "Maximum final validation loss, nat/token", gt=0)
    loss_min_change: float = setting(0.1, "Smallest relevant loss change, nat/token", gt=0)
    loss_jitter_max: float = setting(0.5, "Maximum fluctuation of recent losses, relative to their level", gt=0)
    policy_loss_max: float = setting(10.0, "Maximum absolute policy loss", gt=0)
    val_margin: float = setting(0.02, "Maximum relative rise of the validation loss", gt=0)
    val_min_change: float = setting(0.01, "Smallest relevant rise, nat/token", gt=0)
    grad_norm_min: float = setting(0.1, "Smallest usual gradient norm", gt=0)
    grad_norm_max: float = setting(10.0, "Largest usual gradient norm", gt=0)
    grad_norm_alarm: float = setting(100.0, "Exploding gradient norm", gt=0)
    grad_norm_vanished: float = setting(0.001, "Vanished gradient norm", gt=0)
    step_time_factor: float = setting(3.0, "Maximum step time, as a multiple of the usual one", gt=0)
    step_time_growth: float = setting(0.5, "Maximum relative growth of step time over the run", gt=0)
    data_share_max: float = setting(0.3, "Maximum fraction of a step spent waiting for data", gt=0)
    throughput_spread_max: float = setting(0.5, "Maximum relative fluctuation of throughput", gt=0)
    lr_tolerance: float = setting(0.02, "Maximum deviation from the schedule, relative to the peak", gt=0)
    adv_mean_max: float = setting(0.1, "Maximum mean advantage, relative to the standard deviation", gt=0)
    adv_std_max: float = setting(3.0, "Maximum standard deviation of advantages", gt=0)
    reward_max: float = setting(10.0, "Maximum absolute mean reward of a step", gt=0)
    reward_std_max: float = setting(5.0, "Maximum standard deviation of rewards in a step", gt=0)
    reward_jitter_max: float = setting(
        1.0, "Maximum fluctuation of the mean reward between steps, relative to its level", gt=0
    )
    eval_drop_max: float = setting(0.1, "Maximum relative fall of the evaluation reward", gt=0)
    eval_min_change: float = setting(0.05, "Smallest relevant fall", gt=0)
    milestone_epochs: int = setting(10, "Epochs between milestones", gt=0)
    reward_milestones: list[float] = setting([-0.5, 0.0, 0.3], "Mean reward at each milestone")
    accuracy_milestones: list[float] = setting([0.0, 0.1, 0.2], "Accuracy at each milestone")
    violation_milestones: list[float] = setting([0.5, 0.3, 0.2], "Violation rate at each milestone")
    reward_failure_share: float = setting(0.05, "Maximum reward failures per sample before a warning", gt=0)
    reward_failure_share_alarm: float = setting(0.5, "The same for an alarm", gt=0)
    violation_alarm: float = setting(0.5, "Lasting violation rate for an alarm", gt=0)
    violation_goal: float = setting(0.05, "Violation rate of a trained controller", gt=0)
    latency_share_min: float = setting(0.5, "Minimum fraction of the budget that the mean latency uses", gt=0)
    entropy_share_min: float = setting(0.05, "Minimum fraction of the initial entropy", gt=0)
    length_share_min: float = setting(0.5, "Minimum fraction of the initial completion length", gt=0)
    logprob_gap: float = setting(0.05, "Log-probability difference of engine and trainer for a warning, nat", gt=0)
    logprob_gap_alarm: float = setting(0.2, "The same for an alarm", gt=0)
    disk_saves_left: float = setting(5.0, "Saves for which the disk must have room", gt=0)


@dataclass(kw_only=True)
class HealthConfig:
    """`health`: the rules that check a run's metrics."""

    enabled: bool = setting(True, "Check the rules")
    every: int = setting(10, "Steps between checks", ge=1)
    rules: list[str] = setting([], "Your rules, path.py:LIST or package.module:LIST")
    stop_on: list[str] = setting([], "Rules that stop the run")
    limits: HealthLimits = section(HealthLimits)

    def check(self) -> None:
        """Refuse `stop_on` if the rules are not checked."""
        if self.stop_on and not self.enabled:
            raise UserError("health.stop_on has no effect with health.enabled=false; set it to true")
