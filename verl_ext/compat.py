"""What keeps verl 0.7.0 working on today's libraries; each entry names the release that made it necessary.

verl's own files are not edited. `prepare_for_verl` is called by `verl_ext/__init__.py`, so what is here holds
before the first import of verl, and costs nothing in a command that does not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class BeforeVerl:
    """Runs `restore_names` when verl is first imported: importing transformers any earlier would cost seconds."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """No spec: the search goes on with the other finders."""
        if name == "verl":
            sys.meta_path.remove(cls)
            restore_names()
        return None


def prepare_for_verl() -> None:
    """Have `restore_names` run before the first import of verl."""
    if BeforeVerl not in sys.meta_path and "verl" not in sys.modules:
        sys.meta_path.insert(0, BeforeVerl)


def restore_names() -> None:
    """Give libraries the older names that verl imports.

    - transformers 5.0 removed `AutoModelForVision2Seq` in favour of `AutoModelForImageTextToText`. The property is on
      the module's class, since transformers replaces its own module while it is being imported.
    """
    import transformers
    from transformers.utils.import_utils import _LazyModule

    if not hasattr(transformers, "AutoModelForVision2Seq"):
        alias: Any = property(lambda module: module.AutoModelForImageTextToText)
        _LazyModule.AutoModelForVision2Seq = alias
