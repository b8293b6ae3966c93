"""verl's own configuration: every key exists in SFT, with verl's default unless listed here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl_ext.config.schema import keys
from verl_ext.trainer.stages import SFTConfig

DIFFERENT = {
    "trainer.seed": (1, 42),
    "trainer.device": ("cuda", "auto"),
    "trainer.checkpoint.save_contents": (
        ["model", "optimizer", "extra"],
        ["model", "optimizer", "extra", "hf_model"],
    ),
}
"""verl's default and ours. `trainer.seed` has no effect in verl's trainer."""


def leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in keys(SFTConfig):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def test_sft_keys_and_defaults_match_verl() -> None:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    directory = Path(spec.submodule_search_locations[0]) / "trainer/config"
    with initialize_config_dir(str(directory), version_base=None):
        content = OmegaConf.to_container(compose("sft_trainer"), resolve=False)
    assert isinstance(content, dict)
    verls, ours = dict(leaves(content)), keys(SFTConfig)
    assert verls.keys() <= ours.keys()
    different = {name: (value, ours[name].default) for name, value in verls.items() if value != ours[name].default}
    assert different == DIFFERENT
