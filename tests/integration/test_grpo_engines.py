"""After each update, both rollout engines sample from the updated weights, on two ranks."""

from __future__ import annotations

from pathlib import Path


def test_engines_sample_from_updated_weights(quickstart: Path, tmp_path: Path) -> None:
    from tests.helpers.grpo_reference import assert_engines_follow_weights

    assert_engines_follow_weights(quickstart, tmp_path, ["plain", "lora"])
