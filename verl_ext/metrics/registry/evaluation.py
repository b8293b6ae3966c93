"""Metrics of an evaluation, and of that of a budget controller."""

from __future__ import annotations

from verl_ext.metrics.registry.metric import Metric

EVAL_PREFIX = "eval/<dataset>/"
ADAPTIVE_PREFIX = "eval/adaptive/"
_ERROR_TYPES = ("success", "wrong_answer", "syntax_error", "runtime_error", "timeout", "api_error")
_JUDGED = "one evaluation process"

_EVAL_FIGURES: dict[str, tuple[str, str]] = {
    "num_problems": ("problem", "Problems asked."),
    "exec_success_rate": ("1", "Share of the answers that ran: `success` and `wrong_answer`."),
    "accepted_at_1": ("1", "Share of the answers that solve their problem."),
    "num_samples": ("answer", "Answers to each problem, where there are several."),
    "pass_at_<k>": ("1", "Chance that one of k answers to a problem solves it, unbiased; with several answers alone."),
    "pass_ratio_mean": ("1", "Mean over the problems of the share of tests passed."),
    "pass_ratio_p50": ("1", "Median over the problems of the share of tests passed."),
    "pass_ratio_p90": ("1", "90th percentile over the problems of the share of tests passed."),
    "avg_gen_tokens": ("token", "Mean length of an answer."),
    "avg_judge_time": ("s", "Mean time to judge an answer."),
    "throughput": ("problem/s", "Problems generated and judged per second."),
    "truncation_rate": ("1", "Share of the answers cut at the largest number of new tokens."),
    "cost_per_solved_tokens": ("token", "Generated tokens of all answers per solved problem."),
    "cost_per_solved_judge_time": ("s", "Judging time of all answers per solved problem."),
}

EVALUATION: dict[str, Metric] = {
    **{EVAL_PREFIX + name: Metric(unit, text, _JUDGED) for name, (unit, text) in _EVAL_FIGURES.items()},
    **{
        f"{EVAL_PREFIX}{kind}_rate": Metric("1", f"Share of the answers whose error type is `{kind}`.", _JUDGED)
        for kind in _ERROR_TYPES
    },
    f"{EVAL_PREFIX}<rate>_low": Metric("1", "Lower bound of a rate's 95 % confidence interval.", _JUDGED),
    f"{EVAL_PREFIX}<rate>_high": Metric("1", "Upper bound of a rate's 95 % confidence interval.", _JUDGED),
}

METHOD_FIGURES: dict[str, tuple[str, str]] = {
    "accuracy": ("1", "Mean accuracy of the answers, from 0 to 1."),
    "latency_ms_mean": ("ms", "Mean latency, of the controller with what deciding took."),
    "latency_ms_p50": ("ms", "Median of the same."),
    "latency_ms_p95": ("ms", "95th percentile of the same."),
    "violation_rate": ("1", "Share of the questions whose latency is above the budget."),
    "complexity": ("1", "Mean share of the model that ran."),
}
_SUMMARY_FIGURES: dict[str, tuple[str, str]] = {
    "controller_minus_lookup_table": ("1", "Accuracy of the controller less the lookup table's; mean over budgets."),
    "controller_minus_lookup_table_low": ("1", "Lower bound of its 95 % confidence interval."),
    "controller_minus_lookup_table_high": ("1", "Upper bound of its 95 % confidence interval."),
    "gap_closed": ("1", "Share of the accuracy between lookup table and oracle that the controller has."),
    "num_gap_budgets": ("budget", "Budgets with at least a point between the two, over which that is the mean."),
    "worst_violation_rate": ("1", "The controller's greatest violation rate over the budgets."),
    "worst_violation_budget_ms": ("ms", "The budget where that is."),
    "decision_ms": ("ms", "Mean of what deciding adds to a latency."),
    "features_ms": ("ms", "Mean of pooling image and question for the controller, a part of it."),
    "network_ms": ("ms", "Mean of the controller's forward pass, a part of it."),
    "choice_ms": ("ms", "Mean of taking the likeliest configuration, a part of it."),
    "full_ms": ("ms", "Mean latency of all of the model, as measured."),
    "network_share": ("1", "`network_ms` / `full_ms`."),
    "measured_again": ("1", "Measurements made again, because something else had the processor, over all runs."),
}

ADAPTIVE: dict[str, Metric] = {
    f"{ADAPTIVE_PREFIX}budget_ms": Metric("ms", "Latency budget, the axis of the figures of methods.", _JUDGED),
    **{
        f"{ADAPTIVE_PREFIX}<method>_{name}": Metric(unit, text, _JUDGED)
        for name, (unit, text) in METHOD_FIGURES.items()
    },
    **{ADAPTIVE_PREFIX + name: Metric(unit, text, _JUDGED) for name, (unit, text) in _SUMMARY_FIGURES.items()},
}
