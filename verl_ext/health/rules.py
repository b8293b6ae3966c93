"""The table of health rules, and the rules that users add to it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from verl_ext.errors import UserError
from verl_ext.health import checks
from verl_ext.health.context import LANGUAGE, REWARDED, STAGES
from verl_ext.health.families import bounds, epoch_trend, largest, median, past_best, plateau, share_of_limit, shrunk
from verl_ext.health.rule import ADV_STD, CORRECT, EVAL_REWARD, LOSS, REWARD, VAL_LOSS, VIOLATION, Level, Rule
from verl_ext.plugins import Plugin

GRPO, BUDGET = frozenset({"grpo"}), frozenset({"budget"})
NOTICE, WARNING, ALARM = Level.NOTICE, Level.WARNING, Level.ALARM
COMPLETION_LENGTH = "train/seq_completion_len_mean"

# fmt: off
RULES: tuple[Rule, ...] = (
    # Loss
    Rule("loss_not_finite", checks.loss_not_finite,
         "The loss is NaN, infinite or beyond 1e30; alarm after nonfinite_steps in a row.",
         "lower optim.lr, or look at the batches of those steps"),
    Rule("loss_rising", checks.loss_rising,
         "The epoch mean of the loss rises over trend_epochs; that of a policy only counts if the reward falls.",
         "stop, lower optim.lr and resume from an earlier checkpoint"),
    Rule("loss_diverging", checks.loss_diverging,
         "The recent loss is far above the lowest loss; alarm if it exceeds the initial loss or twice the lowest loss.",
         "stop, lower optim.lr and resume from an earlier checkpoint", LANGUAGE),
    Rule("loss_not_falling", checks.loss_not_falling,
         "After 100 steps, neither the loss nor `val/loss` is below its start; not if the loss diverges.",
         "check the learning rate, that answers have loss tokens, and that labels belong to their prompts", LANGUAGE),
    Rule("loss_jitter", checks.loss_jitter,
         "The loss fluctuates by more than loss_jitter_max of its level, or a policy loss exceeds policy_loss_max.",
         "use a larger train_batch_size or rollout.n, a lower or decaying optim.lr, or more epochs; "
         "judge by the mean over an epoch"),
    Rule("loss_zero",
         bounds(checks.policy_loss_size, "the largest recent policy loss is {:.3g}", below={ALARM: 1e-300}),
         "All recent policy losses are exactly 0, but the advantages are not 0.",
         "check rollout.n, and that rewards differ within a group", REWARDED),
    Rule("initial_loss", checks.initial_loss,
         "The first loss is above initial_loss_max or, for untrained weights, that of random guessing.",
         "check the chat template, the tokenizer and that the weights were loaded", LANGUAGE),
    Rule("final_loss", checks.final_loss,
         "Near the end, the loss exceeds the limit of initial_loss, or is below final_loss_min unlike `val/loss`.",
         "compare val/loss, and use an earlier checkpoint or fewer epochs", LANGUAGE),

    # Validation and evaluation
    Rule("val_loss_not_finite", checks.val_loss_not_finite,
         "The last validation loss is NaN, infinite or beyond 1e30.",
         "check the validation data and the dtype of the model", LANGUAGE),
    Rule("overfitting", past_best(VAL_LOSS, LOSS, better=-1, worse_by=checks.val_loss_margin),
         "The validation loss rises by more than val_margin while the training loss falls; otherwise a notice.",
         "stop and use the best checkpoint", LANGUAGE),
    Rule("val_loss_rising", checks.val_loss_rising,
         "The validation loss has risen three times in a row.",
         "stop if it keeps rising, and use the best checkpoint", LANGUAGE),
    Rule("final_val_loss",
         bounds(checks.final_val_loss, "val/loss is {:.3g} near the end of the run",
                above={NOTICE: "final_val_loss_max"}),
         "Near the end, the validation loss is above final_val_loss_max; not for untrained weights.",
         "train longer, or check that the validation data resembles the training data", LANGUAGE),
    Rule("eval_reward_falling", past_best(EVAL_REWARD, REWARD, better=1, worse_by=checks.eval_reward_margin),
         "The evaluation reward falls by more than eval_drop_max and its sampling error while the training reward "
         "rises; otherwise a notice.",
         "stop and use the best checkpoint, or train on more prompts", REWARDED),

    # Gradient and learning rate
    Rule("grad_norm_range",
         bounds(checks.grad_norm_size, "the gradient norm is about {:.3g}",
                above={NOTICE: "grad_norm_max"}, below={NOTICE: "grad_norm_min"},
                advice_below="if the loss does not fall, raise optim.lr and check that the parameters are trained"),
         "The gradient norm is outside grad_norm_min to grad_norm_max.",
         "if the loss is affected too, lower optim.lr or optim.clip_grad"),
    Rule("grad_norm_exploding",
         bounds(checks.share_of_large_norms, "{:.0%} of the last {} gradient norms are above {:g} or not finite",
                above={WARNING: 0.1999, ALARM: 0.4999}),
         "A fifth of recent gradient norms exceed grad_norm_alarm; alarm if half do.",
         "lower optim.lr and set optim.clip_grad"),
    Rule("grad_norm_vanishing",
         bounds(checks.grad_norm_size, "the gradient norm is about {:.3g}", below={WARNING: "grad_norm_vanished"}),
         "The gradient norm is below grad_norm_vanished.",
         "check that the loss has tokens and that parameters are trained"),
    Rule("lr_schedule", checks.lr_schedule,
         "The learning rate deviates from the schedule by more than lr_tolerance.",
         "compare the optim section of config.yaml with what was intended"),

    # Rewards
    Rule("reward_falling", checks.reward_falling,
         "The epoch mean of the reward falls, or the recent reward is far below the best.",
         "stop, and resume from an earlier checkpoint with a lower optim.lr", REWARDED),
    Rule("reward_negative", checks.reward_negative,
         "The reward has been negative for trend_epochs, or 100 steps; notice if it rises.",
         "check the parts of the reward: one of them outweighs the others", REWARDED),
    Rule("reward_not_rising", plateau([REWARD], "the reward"),
         "The reward has not risen for stuck_epochs.",
         "if it should still rise, look at the weights of the reward functions", REWARDED),
    Rule("reward_extreme",
         bounds(largest(REWARD), "the mean reward of a step reached {:.3g}", above={WARNING: "reward_max"}),
         "The mean reward of a step exceeds reward_max.",
         "check the reward functions and their weights", REWARDED),
    Rule("reward_jitter", checks.reward_jitter,
         "The reward fluctuates by more than reward_jitter_max of its level, and does not rise.",
         "use a larger train_batch_size or rollout.n, a lower or decaying optim.lr, or more epochs; "
         "judge by the mean over an epoch", REWARDED),
    Rule("reward_spread",
         bounds(median("train/reward_total_std"), "the standard deviation of rewards in a step is {:.3g}",
                above={WARNING: "reward_std_max"}),
         "The standard deviation of rewards in a step exceeds reward_std_max.",
         "check the reward functions, their weights and the temperature", REWARDED),
    Rule("reward_failures",
         bounds(checks.reward_failure_share, "reward functions failed {1:.3g} times in a step of {2} samples",
                above={WARNING: "reward_failure_share", ALARM: "reward_failure_share_alarm"}),
         "Reward calls fail on more than reward_failure_share of the samples; alarm above reward_failure_share_alarm.",
         "fix the reward function: the output of the run shows the first failure of each cause", GRPO),
    Rule("accuracy_zero", checks.accuracy_zero,
         "No answer has been right for stuck_epochs, or 100 steps.",
         "compare the answers in samples.jsonl with their references", REWARDED),
    Rule("accuracy_not_rising", plateau(CORRECT, "the accuracy"),
         "The accuracy has not risen for stuck_epochs.",
         "if it should still rise, train longer or adjust optim.lr", REWARDED),
    Rule("nothing_improves", checks.nothing_improves,
         "None of reward, accuracy and violation rate improves.",
         "raise optim.lr, and check that parameters are trained and that rewards differ within a group", REWARDED),

    # Advantages
    Rule("advantages_not_centered",
         bounds(checks.advantage_offset, "advantages have a mean of {1:.3g} and a standard deviation of {2:.3g}",
                above={ALARM: "adv_mean_max"}),
         "The mean advantage exceeds adv_mean_max of the standard deviation.",
         "groups are mixed up: the advantages of a group sum to 0, so check sample_id and rollout.n", REWARDED),
    Rule("advantages_flat",
         bounds(largest(ADV_STD), "the standard deviation of advantages is at most {:.3g}", below={ALARM: checks.FLAT}),
         "All recent advantages are 0.",
         "rewards do not differ within groups: raise rollout.n or the temperature, or use other prompts", REWARDED),
    Rule("advantages_extreme",
         bounds(median(ADV_STD), "the standard deviation of advantages is {:.3g}", above={WARNING: "adv_std_max"}),
         "The standard deviation of advantages exceeds adv_std_max.",
         "check how samples are grouped, and algorithm.norm_adv_by_std_in_grpo", REWARDED),

    # Language models
    Rule("format_without_correctness", checks.format_without_correctness,
         "The format reward rises, but the correctness reward does not.",
         "lower the weight of the format in reward.functions, or check the verdicts in samples.jsonl", GRPO),
    Rule("entropy_collapse", shrunk("train/entropy", "entropy_share_min", "the entropy went from {:.3g} to {:.3g} nat"),
         "The entropy is below entropy_share_min of its initial value; notice if the reward rose.",
         "raise actor.entropy_coeff or the temperature, or lower optim.lr", GRPO),
    Rule("completions_shortening",
         shrunk(COMPLETION_LENGTH, "length_share_min", "completions went from {:.0f} to {:.0f} tokens"),
         "Completions are below length_share_min of their initial length; notice if the reward rose.",
         "read samples.jsonl: short answers may exploit the reward", GRPO),
    Rule("completions_at_limit",
         bounds(share_of_limit(COMPLETION_LENGTH, np.median, lambda run: run.max_response_length, at_least=3),
                "completions have {1:.0f} of at most {2} tokens", above={NOTICE: 0.95}),
         "The mean completion length exceeds 95% of the maximum.",
         "raise data.max_response_length, because answers are truncated", GRPO),
    Rule("prompts_at_limit",
         bounds(share_of_limit("train/seq_prompt_len_max", np.max, lambda run: run.max_prompt_length, at_least=1),
                "the longest prompt has {1:.0f} of at most {2} tokens", above={NOTICE: 0.9999}),
         "The longest prompts reach the maximum length.",
         "raise data.max_prompt_length, because longer prompts are rejected or dropped", GRPO),
    Rule("logprob_gap",
         bounds(median("train/rollout_logprob_diff_mean", at_least=3),
                "rollout engine and trainer differ by {:.3g} nat/token",
                above={WARNING: "logprob_gap", ALARM: "logprob_gap_alarm"}),
         "Log-probabilities of engine and trainer differ by more than logprob_gap; alarm above logprob_gap_alarm.",
         "use the same dtype in both, or set algorithm.rollout_correction.rollout_is", GRPO),

    # Budget controllers
    Rule("violation_high", checks.violation_high,
         "The violation rate stays above violation_goal (notice) or violation_alarm (alarm).",
         "raise reward.budget_violation, or start with larger budgets", BUDGET),
    Rule("violation_rising",
         epoch_trend(VIOLATION, 1, "the violation rate went from {:.2f} to {:.2f} over {} epochs", worst=WARNING,
                     matters_above="violation_goal"),
         "The epoch mean of the violation rate rises.",
         "raise reward.budget_violation", BUDGET),
    Rule("latency_off_budget",
         bounds(checks.latency_share, "the latency is {1:.1f} ms, {0:.0%} of the budget",
                above={WARNING: 1.0}, below={NOTICE: "latency_share_min"}),
         "The mean latency is above the budget, or below latency_share_min of it.",
         "compare reward.budget_violation and latency_penalty with the gain in accuracy", BUDGET),
    Rule("accuracy_falling",
         epoch_trend("train/accuracy_mean", -1, "the accuracy went from {:.3g} to {:.3g} over {} epochs",
                     worst=WARNING),
         "The epoch mean of the accuracy falls.",
         "raise reward.accuracy, or check what the controller skips", BUDGET),
    Rule("milestones", checks.milestones,
         "Reward, accuracy or violation rate misses a milestone.",
         "compare the trends, and adjust optim.lr or the weights of the reward if they are flat", BUDGET),

    # Time, throughput and disk
    Rule("step_time_high", checks.step_time_high,
         "Steps of the last minute (grpo: tokens) take more than step_time_factor times as long as usual.",
         "check the parts of the step (time/train/...), and other programs on the machine"),
    Rule("step_time_rising", checks.step_time_rising,
         "Time per step (grpo: per token) rises by more than step_time_growth.",
         "find what grows with the run, such as memory, logs or a data cache"),
    Rule("waiting_for_data",
         bounds(checks.waiting_share, "{:.0%} of a step is waiting for data", above={WARNING: "data_share_max"}),
         "Waiting for data takes more than data_share_max of a step.",
         "raise data.num_workers, or look at the disk that holds the data"),
    Rule("throughput_unstable",
         bounds(checks.throughput_spread, "throughput fluctuates by at least {:.0%} around {:.4g}",
                above={WARNING: "throughput_spread_max"}),
         "The throughput fluctuates by more than throughput_spread_max over 200 steps.",
         "look for other jobs on the machine, slow disks, or batches of very different sizes"),
    Rule("disk_filling", checks.disk_filling,
         "The disk has room for at most disk_saves_left more saves.",
         "free space, or set a smaller trainer.max_ckpt_to_keep"),
)
# fmt: on


def load_rules(plugins: Iterable[str], key: str) -> tuple[Rule, ...]:
    """Return the rules of the table and the user's rules.

    Args:
        plugins: each `path.py:LIST` or `package.module:LIST`, a list of `Rule`.
        key: the setting or option that names them, for messages.

    Raises:
        UserError: a list cannot be loaded, is not a list of rules, or repeats the name of a rule.
    """
    rules = [*RULES, *(rule for text in plugins for rule in _rules_of(Plugin.parse(text, key)))]
    names = [each.name for each in rules]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{key}: two rules are named {repeated[0]}; rename yours")
    return tuple(rules)


def _rules_of(plugin: Plugin) -> list[Rule]:
    found = plugin.load()
    if not isinstance(found, list | tuple) or not found or not all(isinstance(each, Rule) for each in found):
        raise UserError(f"{plugin.key}: {plugin} is not a list of rules; see docs/guides/extending.md")
    for each in found:
        if not each.stages or not each.stages <= STAGES:
            raise UserError(
                f"{plugin.key}: the rule {each.name} is for the stages {', '.join(sorted(each.stages)) or '(none)'}; "
                f"use some of {', '.join(sorted(STAGES))}"
            )
    return list(found)
