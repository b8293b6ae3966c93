"""The thresholds of the rules: each with its default and one sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """A recipe sets any of them under `health.limits`.

    Attributes:
        trend_epochs: epochs over which loss or reward may go the wrong way.
        stuck_epochs: epochs over which accuracy may be 0 and the violation rate high.
        window: steps that are "recent".
        nonfinite_steps: steps in a row without a finite loss that are an alarm.
        initial_loss_max: nat/token; a first loss above it points at data or model, unless the weights are untrained.
        final_loss_min: nat/token; a last loss below it points at overfitting.
        loss_min_change: nat/token; smaller changes of a loss are nobody's concern.
        loss_jitter_max: spread of the recent losses over their level.
        policy_loss_max: a policy loss beyond it, either way, is extreme.
        val_margin: share by which a validation loss must be above its best to count as risen.
        val_min_change: nat/token; a smaller rise of it is nobody's concern.
        grad_norm_min: least of the usual range.
        grad_norm_max: greatest of the usual range.
        grad_norm_alarm: gradient norm that must not last.
        grad_norm_vanished: gradient norm below which nothing is learnt.
        step_time_factor: times the usual step time.
        step_time_growth: share by which step times may grow over a run.
        data_share_max: share of a step that waiting for data may take.
        throughput_spread_max: spread of the throughput over its median, in each part of the recent steps.
        lr_tolerance: share of the peak by which the learning rate may differ from its schedule.
        adv_mean_max: mean of the advantages over their spread.
        reward_failure_share: failures of reward functions per sample that are a warning.
        reward_failure_share_alarm: failures of reward functions per sample that are an alarm.
        violation_alarm: violation rate that must not last.
        violation_goal: violation rate that a trained controller keeps.
        latency_share_min: share of the budget below which latency leaves it unused.
        entropy_share_min: share of the first entropy below which it has collapsed.
        length_share_min: share of the first completion length below which completions are short.
        logprob_gap: nat; mean distance of the engine's and the trainer's log-probabilities.
        logprob_gap_alarm: nat; the same, where updates go wrong.
        disk_saves_left: further saves that the disk should have room for.
    """

    trend_epochs: int = 10
    stuck_epochs: int = 20
    window: int = 20
    nonfinite_steps: int = 3
    initial_loss_max: float = 5.0
    final_loss_min: float = 0.1
    loss_min_change: float = 0.1
    loss_jitter_max: float = 0.5
    policy_loss_max: float = 10.0
    val_margin: float = 0.02
    val_min_change: float = 0.01
    grad_norm_min: float = 0.1
    grad_norm_max: float = 10.0
    grad_norm_alarm: float = 100.0
    grad_norm_vanished: float = 0.001
    step_time_factor: float = 3.0
    step_time_growth: float = 0.5
    data_share_max: float = 0.3
    throughput_spread_max: float = 0.5
    lr_tolerance: float = 0.02
    adv_mean_max: float = 0.1
    reward_failure_share: float = 0.05
    reward_failure_share_alarm: float = 0.5
    violation_alarm: float = 0.5
    violation_goal: float = 0.05
    latency_share_min: float = 0.5
    entropy_share_min: float = 0.05
    length_share_min: float = 0.5
    logprob_gap: float = 0.05
    logprob_gap_alarm: float = 0.2
    disk_saves_left: float = 5.0
