"""The questions about images that a configuration names, before any rank starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_ext.data.image_questions import require_rows
from verl_ext.errors import UserError
from verl_ext.launch.prepare import is_within
from verl_ext.trainer.stages import BudgetConfig, VLMSFTConfig


def check_questions(config: BudgetConfig | VLMSFTConfig, needed: Sequence[str], awaited: Sequence[Path] = ()) -> None:
    """Each data set is known or has files, and there is something for each split that is needed.

    Args:
        config: the resolved configuration.
        needed: splits.
        awaited: directories whose files are still to be prepared.

    Raises:
        UserError: which is wrong and how to mend it.
    """
    sources = config.data.sources()
    for split in ("train", "val"):
        if split in needed and not any(source.size(split) for source in sources.values()):
            raise UserError(f"there is no question for {split}; give data.datasets.NAME.{split} a size, or -1 for all")
        for name, source in sources.items():
            if source.size(split) and not is_within(source.source, awaited):
                require_rows(name, source, split)
