"""Fitting recovers the coefficients of a simulated machine, and the reward has the documented components."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.helpers import vlms
from verl_ext.config.schema import keys
from verl_ext.controller.adapters import VLMAdapter, adapter_for
from verl_ext.controller.config import PERCENTILES, BudgetRewardConfig
from verl_ext.controller.execution import Latency, RunResult, RunWorkload
from verl_ext.controller.grpo import REWARD_NAMES, reward_components
from verl_ext.controller.latency import (
    FEATURES,
    LatencyModel,
    ModeledLatency,
    fit_coefficients,
    machine_name,
    measured_on,
    r2_score,
    warn_of_other_machine,
)
from verl_ext.controller.space import ConfigurationSpace
from verl_ext.controller.vlm import fingerprint
from verl_ext.errors import UserError
from verl_ext.trainer.stages import BudgetConfig

SPACE = ConfigurationSpace(("low", "medium", "high"), 8, 3, 8, (1, 2, 4))
TRUTH = {
    "vision_ms": dict(zip(FEATURES["vision_ms"], (1.5, 0.01, 2e-5))),
    "prefill_ms": dict(zip(FEATURES["prefill_ms"], (0.8, 0.003, 0.4, 0.01, 1e-5, 0.05, 0.004))),
    "decode_ms": dict(zip(FEATURES["decode_ms"], (0.5, 0.3, 2e-4, 0.05))),
}


def workloads(count: int, seed: int = 0) -> list[RunWorkload]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        blocks = [True] + [False] * 7
        for place in rng.sample(range(1, 8), rng.randint(2, 7)):
            blocks[place] = True
        tier = rng.randrange(3)
        configuration = SPACE.configuration(tier, blocks, [0] + [rng.choice((1, 2, 4)) for _ in range(7)])
        patches = (36, 144, 324)[tier]
        found.append(RunWorkload(configuration, patches, patches // 4 + rng.randint(5, 30), rng.randint(0, 6)))
    return found


def model(coefficients: dict[str, dict[str, float]]) -> LatencyModel:
    return LatencyModel(coefficients, 1.0, "a machine", "a model")


def test_fit_recovers_coefficients() -> None:
    seen = workloads(300)
    found = model(fit_coefficients(seen, [model(TRUTH).predict(each) for each in seen]))
    for each in workloads(50, seed=1):
        assert found.predict(each).total_ms == pytest.approx(model(TRUTH).predict(each).total_ms, rel=1e-6)


def test_fit_averages_noise_and_stays_non_negative() -> None:
    rng, seen = random.Random(2), workloads(400)
    noisy = []
    for each in seen:
        exact = model(TRUTH).predict(each)
        parts = [getattr(exact, part) * rng.uniform(0.9, 1.1) for part in FEATURES]
        noisy.append(Latency(*parts, each.num_decoded))
    coefficients = fit_coefficients(seen, noisy)
    assert all(value >= 0 for part in coefficients.values() for value in part.values())
    held = workloads(100, seed=3)
    measured = [model(TRUTH).predict(each).total_ms for each in held]
    assert r2_score([model(coefficients).predict(each).total_ms for each in held], measured) > 0.99


def test_r2_is_one_for_truth_and_zero_for_mean() -> None:
    assert r2_score([1.0, 2.0, 6.0], [1.0, 2.0, 6.0]) == 1
    assert r2_score([3.0, 3.0, 3.0], [1.0, 2.0, 6.0]) == pytest.approx(0)


def test_r2_of_equal_measurements_is_finite() -> None:
    assert r2_score([2.0, 2.1], [2.0, 2.0]) == 0
    assert r2_score([2.0, 2.0], [2.0, 2.0]) == 1


def test_one_token_answers_give_zero_decode_coefficients() -> None:
    seen = [RunWorkload(each.configuration, each.num_patches, each.num_prompt_tokens, 0) for each in workloads(50)]
    coefficients = fit_coefficients(seen, [model(TRUTH).predict(each) for each in seen])
    assert set(coefficients["decode_ms"].values()) == {0.0}


def modeled(percentile: int) -> ModeledLatency:
    scattered = replace(model(TRUTH), deciding_ms=2.0, scatter={"50": 1.1, "75": 1.2, "90": 1.5, "95": 1.75})
    return ModeledLatency(scattered, percentile)


@pytest.mark.parametrize(("percentile", "longer"), [(50, 1.0), (90, 1.5), (95, 1.75)])
def test_percentile_scales_all_latencies(percentile: int, longer: float) -> None:
    [workload] = workloads(1)
    outcome = RunResult("", Latency(0.0, 0.0, 0.0, 0), workload)
    assert modeled(percentile).run_ms(outcome) == pytest.approx(longer * model(TRUTH).predict(workload).total_ms)
    assert modeled(percentile).deciding_ms == pytest.approx(longer * 2.0)


def test_recipe_accepts_recorded_percentiles() -> None:
    assert get_args(keys(BudgetConfig)["latency.percentile"].hint) == PERCENTILES


def test_latency_model_without_scatter_rejects_percentile(tmp_path: Path) -> None:
    vlm, processor = vlms.qwen3_vl_moe()
    adapter = adapter_for(vlm, processor, (256,))
    LatencyModel(TRUTH, 1.0, "a machine", fingerprint(vlm)).save(tmp_path / "old.json")
    assert ModeledLatency.load(tmp_path / "old.json", adapter).deciding_ms == 0
    with pytest.raises(
        UserError, match="old.json does not record how far single runs are from its predictions; create it again"
    ):
        ModeledLatency.load(tmp_path / "old.json", adapter, 95)


@pytest.mark.parametrize(
    ("machine", "is_another"),
    [
        (measured_on, False),
        (machine_name, False),  # an old file
        (lambda adapter: machine_name(adapter).rpartition(", ")[0], False),  # a file without the processor's name
        (lambda adapter: f"1{measured_on(adapter)}", True),  # another number of threads
        (lambda adapter: f"{machine_name(adapter)}, bf16", True),
        (lambda adapter: "NVIDIA H100 80GB HBM3", True),
    ],
)
def test_latency_model_of_another_machine_gets_warning(
    machine: Callable[[VLMAdapter], str], is_another: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapter_for(*vlms.qwen3_vl_moe(), (256,))
    warn_of_other_machine(replace(model(TRUTH), machine=machine(adapter)), adapter)
    doubt = capsys.readouterr().err
    assert doubt.startswith("warning: ") if is_another else not doubt
    assert not doubt or all(f"'{name}'" in doubt for name in (machine(adapter), measured_on(adapter)))
    assert is_another == ("calibrate --dtype fp32`" in doubt)


def test_latency_model_round_trips_and_rejects_other_files(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    model(TRUTH).save(path)
    assert LatencyModel.load(path) == model(TRUTH)
    of_no_machine = path.read_text().replace('"a machine"', "null")
    for text in ("{", "[]", '{"coefficients": {}, "r2": 1, "machine": "", "model": ""}', '{"other": 1}', of_no_machine):
        path.write_text(text)
        with pytest.raises(UserError, match=r"latency.json is not a latency model .*calibrate"):
            LatencyModel.load(path)
    with pytest.raises(UserError, match="is not a latency model"):
        LatencyModel.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r2": None}, "its r2 is None, not a finite number"),
        ({"r2": math.nan}, "its r2 is nan"),
        ({"deciding_ms": "1"}, "its deciding_ms is '1', not a finite number of at least 0"),
        ({"deciding_ms": -1.0}, "its deciding_ms is -1.0"),
        ({"deciding_ms": math.inf}, "its deciding_ms is inf"),
        ({"scatter": {"90": -1.0}}, "its scatter of 90 is -1.0"),
        ({"scatter": [1.0]}, ""),
        ({"coefficients": {**TRUTH, "vision_ms": {**TRUTH["vision_ms"], "call": -1.0}}}, "its vision_ms of call is -1"),
        ({"coefficients": {**TRUTH, "vision_ms": {**TRUTH["vision_ms"], "call": "1"}}}, "its vision_ms of call is '1'"),
        ({"model": 3}, "its model is not text"),
    ],
)
def test_damaged_latency_model_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    replace(model(TRUTH), **changes).save(tmp_path / "latency.json")
    with pytest.raises(UserError, match=f"latency.json is not a latency model .*{message}"):
        LatencyModel.load(tmp_path / "latency.json")
    replace(model(TRUTH), r2=-3.0, deciding_ms=2).save(tmp_path / "latency.json")  # a poor fit only causes a warning
    assert LatencyModel.load(tmp_path / "latency.json").r2 == -3


def test_reward_components_match_documentation() -> None:
    weights = BudgetRewardConfig()
    inside = reward_components(weights, accuracy=1.0, latency_ms=50.0, budget_ms=100.0, complexity=0.5)
    assert tuple(inside) == REWARD_NAMES
    assert inside["reward_accuracy"] == 1 and inside["reward_violation"] == 0 and inside["reward_efficiency"] == 0.05
    assert inside["reward_complexity"] == -0.025
    assert inside["reward_latency"] == pytest.approx(-0.5 / (1 + 2.718281828**5))
    at = reward_components(weights, 0.0, 100.0, 100.0, 1.0)
    assert at["reward_latency"] == -0.25 and at["reward_efficiency"] == 0 == at["reward_violation"]
    beyond = reward_components(weights, 0.6, 150.0, 100.0, 1.0)
    assert beyond["reward_violation"] == pytest.approx(-2.5) and beyond["reward_accuracy"] == 0.6
    assert reward_components(weights, 0.0, 1e9, 1.0, 1.0)["reward_latency"] == -0.5
    assert reward_components(weights, 0.0, 0.0, 1.0, 1.0)["reward_latency"] == pytest.approx(-0.5 * 4.5398e-5, rel=1e-4)
