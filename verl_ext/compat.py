"""Patches that keep verl 0.7.0 working with current libraries; each names the release that made it necessary.

verl's files are not modified. `verl_ext/__init__.py` calls `repair_imports`, which applies each patch when the module
that needs it is imported, so commands that do not import it pay nothing. Scripts must import `verl_ext` before verl.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from verl_ext.console import restrict_transformers_bars


def restore_transformers_names() -> None:
    """Restore names in transformers that verl expects.

    - transformers 5.0 removed `AutoModelForVision2Seq` in favor of `AutoModelForImageTextToText`. The property is on
      the module's class, because transformers replaces its own module while it is being imported.
    - transformers 5.0 removed the default of `tie_word_embeddings`, which `apply_fsdp2` reads from every model.
    """
    import transformers
    from transformers.utils.import_utils import _LazyModule

    alias: Any = property(lambda module: module.AutoModelForImageTextToText)
    _LazyModule.AutoModelForVision2Seq = alias
    default: Any = False
    transformers.PreTrainedConfig.tie_word_embeddings = default


def hide_trl(import_utils: ModuleType) -> None:
    """trl 0.29 removed `AutoModelForCausalLMWithValueHead`, which `apply_monkey_patch` imports if trl is installed."""
    import_utils.is_trl_available = lambda: False  # type: ignore[attr-defined]


def count_tokens(chat_template: ModuleType) -> None:
    """In transformers 5.0, `apply_chat_template` returns a mapping, whose length verl's datasets would use.

    They would drop and mask two tokens, the number of keys in the mapping, instead of the template's own tokens.
    """
    for name in ("initialize_system_prompt", "extract_system_prompt_and_generation"):
        setattr(chat_template, name, _with_lists(getattr(chat_template, name)))


def _with_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_lists(tokenizer: Any, **kwargs: Any) -> Any:
        apply = functools.partial(tokenizer.apply_chat_template, return_dict=False)
        return function(SimpleNamespace(apply_chat_template=apply), **kwargs)

    return with_lists


def list_layer_classes(fsdp_utils: ModuleType) -> None:
    """transformers 5.0 made `_no_split_modules` a set, but `apply_fsdp2` takes its first item."""
    apply_fsdp2 = fsdp_utils.apply_fsdp2

    @functools.wraps(apply_fsdp2)
    def with_a_list(model: Any, fsdp_kwargs: Any, config: Any) -> None:
        model._no_split_modules = sorted(model._no_split_modules or ())
        apply_fsdp2(model, fsdp_kwargs, config)

    fsdp_utils.apply_fsdp2 = with_a_list  # type: ignore[attr-defined]


BEFORE: dict[str, Callable[[], None]] = {
    "verl": restore_transformers_names,
    "transformers.modeling_utils": restrict_transformers_bars,
}
"""Patches to apply before a module is executed."""
AFTER: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.import_utils": hide_trl,
    "verl.utils.chat_template": count_tokens,
    "verl.utils.fsdp_utils": list_layer_classes,
}
"""Patches to apply to a module of verl after it has been executed."""


class RepairingFinder:
    """Finds the modules that need a patch through the other finders, and patches them when they are executed."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that needs a patch; None leaves other modules to the other finders."""
        if name not in BEFORE and name not in AFTER:
            return None
        finders = [finder for finder in sys.meta_path if finder is not cls]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None:
            loader: Any = spec.loader
            loader.exec_module = _with_repairs(loader.exec_module)
        return spec


def _with_repairs(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        if module.__name__ in BEFORE:
            BEFORE[module.__name__]()
        execute(module)
        if module.__name__ in AFTER:
            AFTER[module.__name__](module)

    return exec_module


def repair_imports() -> None:
    """Apply the patches to future imports."""
    if RepairingFinder not in sys.meta_path:
        sys.meta_path.insert(0, RepairingFinder)
