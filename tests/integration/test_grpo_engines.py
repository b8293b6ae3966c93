"""After each update, both rollout engines sample from the updated weights: tied embeddings and LoRA on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_engines_follow_the_weights(kind: str, quickstart: Path, tmp_path: Path) -> None:
    from tests.helpers.grpo_reference import assert_engines_follow_weights

    assert_engines_follow_weights(kind, quickstart, tmp_path)
