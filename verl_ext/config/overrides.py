"""Merges recipes and Hydra overrides into a configuration of known keys and types; a mistyped key is an error."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString, Transformer, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.config.checks import WITHOUT_EFFECT
from verl_ext.config.plain import as_dict
from verl_ext.config.secrets import masked
from verl_ext.errors import UserError, first_line_of
from verl_ext.suggestions import RANKS, meant_key

TEXT_OR_LIST = ("data.train_files", "data.val_files", "model.target_modules")  # one or several, as in verl
# Where users may put keys of their own: what is passed on to a function or a class.
OPEN_MAPPINGS = (
    "data.apply_chat_template_kwargs",
    "data.datasets",
    "optim.override_optimizer_config",
    "datasets",
    "engine.vllm",
    "rollout.vllm",
)

_PATH = re.compile(
    r"""(?P<quoted>'[^']*'|"[^"]*")|"""
    r"""(?P<before>[=\[,] *|: +)(?P<path>(?:~|\.{0,2}/)(?:[^'",\[\]{}]*[^\s'",\[\]{}])?) *"""
)
"""A path from the root, a home or the working directory that is a value, or an item of a list or mapping of values."""


def merge_known(config: DictConfig, update: DictConfig, source: str, nullable: Collection[str]) -> None:
    """Merge `update` into `config` in place.

    Args:
        config: the configuration with every known key.
        update: nested keys to set.
        source: the file `update` came from, for the message.
        nullable: keys that may be null.

    Raises:
        UserError: a key that `config` does not have, or a value of another type.
    """
    for key, value in leaves(update).items():
        set_known(config, key, value, source, nullable)


def apply_overrides(config: DictConfig, overrides: list[str], nullable: Collection[str]) -> None:
    """Apply Hydra overrides in place: `key=value` sets, `+key=value` and `++key=value` add, `~key` sets to null.

    Args:
        config: the configuration with every known key.
        overrides: in Hydra's grammar.
        nullable: keys that may be null.

    Raises:
        UserError: an override that does not parse, an unknown key, or a value of another type.
    """
    for text in overrides:
        override = parsed(text)
        key, value = override.key_or_group, value_set_by(override, text)
        known = leaves(config)
        if (override.is_add() or override.is_force_add()) and not any(
            f"{key}.".startswith(f"{old}.") or old.startswith(f"{key}.") for old in known
        ):
            OmegaConf.update(config, key, value, force_add=True)
        else:
            set_known(config, key, value, "the command line", nullable)


def parsed(text: str) -> Override:
    """An override of the command line.

    Raises:
        UserError: it is none.
    """
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        try:  # Hydra takes ~, parentheses and letters beyond ASCII in quotes only, and behind `key=` no shell expands ~
            override = parser.parse_override(_PATH.sub(_quoted, text))
        except HydraException:
            shown = masked(text)  # with a secret in it, the parser's words are not shown either: they repeat it
            why = f" ({first_line_of(error)})" if shown == text else ""
            raise UserError(
                f"'{shown}' is not an override of the form key=value{why}; correct it, or quote its value inside the "
                "quotes of the shell, as in \"key='value'\""
            ) from error
    if not override.key_or_group:
        raise UserError(f"'{text}' is not an override of the form key=value; name the key")
    return override


def _quoted(found: re.Match[str]) -> str:
    return found["quoted"] or f"{found['before']}'{found['path']}'"


def keys_set_by(overrides: Iterable[str]) -> set[str]:
    """The dotted keys of overrides, those inside a mapping too."""
    keys = set()
    for text in overrides:
        override = parsed(text)
        value = value_set_by(override, text)
        keys |= (
            set(leaves(nested(override.key_or_group, value))) if isinstance(value, dict) else {override.key_or_group}
        )
    return keys


def value_set_by(override: Override, text: str) -> Any:
    """The value that an override sets; `key=a,b`, Hydra's sweep over values, is the list of them here."""
    if override.is_delete():
        return None
    if not override.is_sweep_override():
        return override.value()
    if not override.is_choice_sweep() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"'{masked(text)}' sweeps over values, but one run has one; give one value, or a list [a, b]")
    items = override.sweep_iterator(Transformer.identity)
    return [item.text if isinstance(item, QuotedString) else item for item in items]


def leaves(config: DictConfig) -> dict[str, Any]:
    """Dotted key to value of everything that is not a non-empty mapping; interpolations stay text."""
    return dict(flatten(as_dict(config, resolve=False), ""))


def flatten(mapping: dict, prefix: str) -> Iterator[tuple[str, Any]]:
    """The dotted keys and values of a plain nested mapping."""
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in OPEN_MAPPINGS:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def set_known(config: DictConfig, key: str, value: Any, source: str, nullable: Collection[str]) -> None:
    """Set one dotted key that must exist; see `merge_known` for what is raised."""
    known = leaves(config)
    if isinstance(value, dict) and value and key not in OPEN_MAPPINGS:
        return merge_known(config, nested(key, value), source, nullable)
    if key not in known and not key.startswith(tuple(f"{open_key}." for open_key in OPEN_MAPPINGS)):
        raise UserError(f"{source} sets '{key}', which is not a configuration key; {suggestion(key, list(known))}")
    if value is None and key in known and key not in nullable:
        raise UserError(
            f"{source} sets '{key}' to null, but it needs a value; leave it out for the default {known[key]!r}"
        )
    if isinstance(known.get(key), list) and isinstance(value, str) and "${" not in value:
        value = [value]  # trainer.logger=console, as verl's users write it
    check_type(key, known.get(key), value, source)
    OmegaConf.update(config, key, value, force_add=True)


def nested(key: str, value: Any) -> DictConfig:
    """`a.b` and a value as the mapping {a: {b: value}}."""
    config = OmegaConf.create()
    OmegaConf.update(config, key, value, force_add=True)
    return config


def suggestion(key: str, known: list[str]) -> str:
    """The key that was probably meant, or how to add a key on purpose."""
    meant = meant_key(key, [name for name in known if name not in WITHOUT_EFFECT])
    if meant == RANKS:
        return "give the number of ranks as the first word of the command"
    if meant is not None:
        return f"did you mean '{meant}'?"
    sections = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known))
    return f"known keys begin with {sections} (+{key}=... adds one on purpose)"


def check_type(key: str, old: Any, new: Any, source: str) -> None:
    """Refuse a value whose type differs from the default's; null defaults take anything, interpolations too."""
    if old is None or new is None or any(isinstance(item, str) and "${" in item for item in (old, new)):
        return
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list [a, b]"}
    wanted = next((kind for kind in kinds if isinstance(old, kind)), None)
    if wanted is None:
        return
    fits = isinstance(new, wanted)
    if wanted is float or (wanted is int and isinstance(old, int)):
        fits = isinstance(new, (int, float) if wanted is float else int) and not isinstance(new, bool)
    if wanted is str and not isinstance(new, (list, dict, ListConfig)):
        fits = True  # a name such as `experiment_name=7b` or `=2024` is text all the same
    if key in TEXT_OR_LIST and isinstance(new, list):
        fits = all(isinstance(item, str) for item in new)
    if not fits:
        shown = masked(f"{key}={new!r}").partition("=")[2]
        raise UserError(f"{source} sets '{key}' to {shown}, but it must be {kinds[wanted]} (like the default, {old!r})")
