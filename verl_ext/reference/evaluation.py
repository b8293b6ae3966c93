"""The keys of an evaluation's recipe."""

from __future__ import annotations

from eval_pipeline.recipe.kinds import KINDS
from eval_pipeline.recipe.load import DEFAULTS
from eval_pipeline.recipe.values import CHOICES
from verl_ext.config.compose import load_yaml
from verl_ext.config.overrides import leaves
from verl_ext.reference.comments import comments_of
from verl_ext.reference.entry import Entry, shown


def evaluation_entries() -> dict[str, Entry]:
    """By key what there is to say of it.

    Raises:
        KeyError: a key has no sentence, or no kind.
    """
    sentences = comments_of(DEFAULTS)
    return {
        key: Entry(key, _kind(key), shown(default), sentences[key])
        for key, default in leaves(load_yaml(DEFAULTS)).items()
    }


def _kind(key: str) -> str:
    if key in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[key])
    return KINDS[key].removeprefix("a ")
