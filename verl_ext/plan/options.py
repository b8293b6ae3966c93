"""The words of the command: its own settings, and overrides of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl_ext.config.recipes import RECIPES, default_recipe
from verl_ext.errors import UserError
from verl_ext.plan.hardware import Hardware, find_hardware
from verl_ext.plan.workload import Lengths
from verl_ext.suggestions import meant_key


@dataclass(frozen=True)
class Options:
    """What was asked.

    Attributes:
        command: sft or grpo, whose recipes are meant.
        gpus: numbers of GPUs, a plan each.
        gpus_per_node: GPUs that share a node.
        hardware: the kind, with `mfu` in it where given.
        lengths: of the data.
        overrides: of the configuration, `recipe=` among them.
    """

    command: str
    gpus: tuple[int, ...]
    gpus_per_node: int
    hardware: Hardware
    lengths: Lengths
    overrides: list[str]


MOST = 1_000_000
"""GPUs, beyond which a plan says nothing."""
OWN = {
    "gpus": "numbers of GPUs, such as 8 or 8,64,512 (default: 8)",
    "hardware": "h100, h200, a100, or cpu for one core of a Xeon a rank (default: h100)",
    "gpus_per_node": "GPUs that share a node (default: 8)",
    "stage": "sft or grpo, where recipes of both have the name (default: the first that has it)",
    "mfu": "share of the GPU's peak that compute reaches, in place of the assumption for the hardware",
    "mean_length": "tokens of a sample in the mean (default: the longest there can be)",
    "learnt_share": "share of a sample's tokens that are in the loss (default: 1)",
}
TOP_LEVEL = ("recipe", "prepare", "use_remove_padding", "ulysses_sequence_parallel_size")
"""Keys of the configuration that are in no section."""


def read_words(words: list[str]) -> Options:
    """Tell the command's own settings from overrides.

    Raises:
        UserError: a setting whose value cannot be.
    """
    pairs = [word.partition("=") for word in words]
    own = {key: value for key, equals, value in pairs if equals and key in OWN}
    overrides = [word for word, (key, _, _) in zip(words, pairs) if key not in own]
    for key, equals, value in pairs:
        meant = meant_key(key, OWN) if equals and "." not in key and key not in (*OWN, *TOP_LEVEL) else None
        if meant is not None:
            raise UserError(f"there is no setting '{key}'; did you mean {meant}={value}?")
    gpus = tuple(whole(text, "gpus") for text in own.get("gpus", "8").strip("[]").split(","))
    hardware = find_hardware(own.get("hardware", "h100"))
    if "mfu" in own:
        hardware = replace(hardware, compute_share=share(own["mfu"], "mfu"))
    mean = number(own["mean_length"], "mean_length") if "mean_length" in own else None
    lengths = Lengths(mean, share(own.get("learnt_share", "1"), "learnt_share"))
    per_node = whole(own.get("gpus_per_node", "8"), "gpus_per_node")
    return Options(stage_of(own.get("stage"), overrides), gpus, per_node, hardware, lengths, overrides)


def known_words(words: Sequence[str]) -> list[str]:
    """The command's own settings and the keys of the configuration, for suggestions."""
    from verl_ext.trainer.stages import known_keys  # imports hydra, which takes a second

    words = [word for word in words if word.startswith(("recipe=", "stage="))]
    named = next((word.removeprefix("stage=") for word in words if word.startswith("stage=")), None)
    return [*OWN, *known_keys(stage_of(named, words), words)]


def stage_of(named: str | None, overrides: list[str]) -> str:
    """sft or grpo: as asked, or the first that has the recipe."""
    if named is not None:
        if named not in ("sft", "grpo"):
            raise UserError(f"stage={named} is none that the plan knows; take stage=sft or stage=grpo")
        return named
    names = [text.removeprefix("recipe=") for text in overrides if text.startswith("recipe=")]
    recipe = names[-1] if names else default_recipe("sft")
    is_grpo = (RECIPES / "grpo" / f"{recipe}.yaml").is_file() or "grpo" in recipe.split("/")
    return "grpo" if is_grpo and not (RECIPES / "sft" / f"{recipe}.yaml").is_file() else "sft"


def number(text: str, key: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{key}={text} must be a number greater than 0")
    return value


def whole(text: str, key: str) -> int:
    """A positive whole number."""
    value = number(text, key)
    if value != int(value) or value > MOST:
        raise UserError(f"{key}={text} must be a whole number up to {MOST}")
    return int(value)


def share(text: str, key: str) -> float:
    """A number above 0 and up to 1."""
    value = number(text, key)
    if value > 1:
        raise UserError(f"{key}={text} is a share; give a number above 0 and up to 1")
    return value
