"""Composes defaults, a recipe and the command line into a typed configuration; later sources take precedence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString, Transformer, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config.schema import Key, as_dict, build, keys
from verl_ext.config.secrets import masked, require_no_secrets
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import yaml_text
from verl_ext.suggestions import RANKS, meant_key

COMMAND_LINE = "the command line"
_PATH = re.compile(
    r"""(?P<quoted>'[^']*'|"[^"]*")|"""
    r"""(?P<before>[=\[,] *|: +)(?P<path>(?:~|\.{0,2}/)(?:[^'",\[\]{}]*[^\s'",\[\]{}])?) *"""
)
"""A path that starts with `/`, `~`, `./` or `../` and is a value, or an item of a list or mapping of values."""
_NAMED_ITEM = re.compile(
    r"""(?P<quoted>'[^']*'|"[^"]*")|(?P<before>[\[,] *)"""
    r"""(?P<path>[^'",\[\]{}=]+=[^'",\[\]{}]*[^\s'",\[\]{}]) *(?=[,\]])"""
)
"""An item of a list that contains `=`, such as `near=mine.py:near` of `reward.functions`."""


class Composer:
    """Collects values by key and builds the configuration.

    Args:
        others: roots of other stages; their keys are accepted with their default value, without effect.
        extensible: whether `+key=value` may add keys that the root does not have.
    """

    def __init__(self, root: type, others: Iterable[type] = (), extensible: bool = True) -> None:
        self._root, self._keys, self._extensible = root, keys(root), extensible
        self._others = {name: key for other in others for name, key in keys(other).items() if name not in self._keys}
        self._values = OmegaConf.create(as_dict(root()))

    def set_key(self, name: str, value: Any) -> None:
        """Set a key."""
        self._set(name, value, COMMAND_LINE)

    def add_recipe(self, content: Mapping[str, Any], source: str, adds: bool = False) -> None:
        """Set the nested keys of a recipe.

        Args:
            source: name of the recipe in messages.
            adds: whether to add unknown keys; a run's saved configuration has keys that `+key=value` added.
        """
        for name, value in self._leaves(content, ""):
            if adds and name not in self._others and self._is_free(name):
                OmegaConf.update(self._values, name, value, force_add=True)
            else:
                self._set(name, value, source)

    def add_overrides(self, words: Iterable[str]) -> None:
        """Apply Hydra overrides: `key=value` sets, `+key=value` and `++key=value` add, `~key` sets to null."""
        for text in words:
            override = parse_override(text)
            name, value = override.key_or_group, value_set_by(override, text)
            if (override.is_add() or override.is_force_add()) and self._is_free(name):
                OmegaConf.update(self._values, name, value, force_add=True)
                continue
            for leaf, of_leaf in self._leaves_of(name, value):
                self._set(leaf, of_leaf, COMMAND_LINE)

    @property
    def values(self) -> dict[str, Any]:
        """Nested values with unresolved interpolations."""
        return cast("dict[str, Any]", OmegaConf.to_container(self._values, resolve=False))

    def build(self, source: str) -> Any:
        """Resolve all interpolations and build the configuration; `source` names the recipe's file in messages.

        Raises:
            UserError: an interpolation has no target, or a value is invalid or a secret.
        """
        try:
            values = cast("dict[str, Any]", OmegaConf.to_container(self._values, resolve=True))
        except OmegaConfBaseException as error:
            reason = masked(first_line_of(error))
            raise UserError(f"the configuration cannot be resolved ({reason}); correct that key in {source}") from error
        require_no_secrets(values)
        return build(self._root, values)

    def _set(self, name: str, value: Any, source: str) -> None:
        key = self._keys.get(name)
        if key is None:
            if self._is_in_open_mapping(name):
                OmegaConf.update(self._values, name, value, force_add=True)
                return
            other = self._others.get(name)
            if other is None:
                raise UserError(f"{source} sets '{name}', which is not a configuration key; {self._suggestion(name)}")
            if value != other.default:
                stage = self._keys["stage"].default  # only stages have `others`
                raise UserError(f"{source} sets {name}, which has no effect in the stage {stage}; remove it")
            return
        if key.is_list and isinstance(value, str) and "${" not in value:
            value = [value]  # as in verl's common trainer.logger=console
        check_type(key, value, source)
        OmegaConf.update(self._values, name, value, merge=key.is_open)

    def _suggestion(self, name: str) -> str:
        meant = meant_key(name, [each for each, key in self._keys.items() if not key.setting.unused])
        if meant == RANKS:
            return "pass the number of ranks as the first argument of the command"
        if meant is not None:
            return f"did you mean '{meant}'?"
        sections = ", ".join(dict.fromkeys(each.partition(".")[0] for each in self._keys))
        how_to_add = f" (+{name}=... adds one on purpose)" if self._extensible else ""
        return f"known keys begin with {sections}{how_to_add}"

    def _is_free(self, name: str) -> bool:
        """Whether a key can be added: neither the key nor a parent or child of it exists."""
        return self._extensible and not any(
            f"{name}.".startswith(f"{known}.") or known.startswith(f"{name}.") for known in self._keys
        )

    def unknown_keys_added_by(self, words: Iterable[str]) -> list[str]:
        """Keys that `+key=value` adds and that no setting reads, each with a similar key in parentheses, if any."""
        added = self.keys_set_by(word for word in words if word.startswith("+"))
        unknown = sorted(name for name in added if self._is_free(name) and name not in self._others)
        similar = {name: meant_key(name, [*self._keys]) for name in unknown}
        return [f"{name} (did you mean {similar[name]}?)" if similar[name] else name for name in unknown]

    def _is_in_open_mapping(self, name: str) -> bool:
        return any(key.is_open and name.startswith(f"{known}.") for known, key in self._keys.items())

    def keys_set_by(self, words: Iterable[str]) -> set[str]:
        """The dotted keys that overrides set, including keys inside a mapping."""
        found = set()
        for text in words:
            override = parse_override(text)
            found |= {name for name, _ in self._leaves_of(override.key_or_group, value_set_by(override, text))}
        return found

    def _leaves(self, mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in mapping.items():
            yield from self._leaves_of(f"{prefix}{name}", value)

    def _leaves_of(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value and name not in self._keys and not self._is_in_open_mapping(name):
            yield from self._leaves(value, f"{name}.")
        else:
            yield name, value


def check_type(key: Key, value: Any, source: str) -> None:
    """Refuse a value that does not have the key's type.

    Interpolations are checked when they are resolved, and keys without effect by `check_value`.

    Raises:
        UserError: the value has the wrong type; the message names the source, the key, and the allowed values.
    """
    if (isinstance(value, str) and "${" in value) or key.fits(value) or key.setting.unused:
        return
    if value is None:
        raise UserError(
            f"{source} sets '{key.name}' to null, but it needs a value; remove it to use the default {key.default!r}"
        )
    raise UserError(
        f"{source} sets '{key.name}' to {key.shown(value)}, but it must be {key.takes} (like the default, "
        f"{key.default!r})"
    )


# The command line


def parse_override(text: str) -> Override:
    """Parse an override of the command line.

    Raises:
        UserError: the text is not an override.
    """
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        try:  # Hydra allows ~, =, parentheses and non-ASCII letters only in quotes, and no shell expands ~ after `key=`
            override = parser.parse_override(_PATH.sub(_quoted, _NAMED_ITEM.sub(_quoted, text)))
        except HydraException:
            shown = masked(text)  # if it holds a secret, omit the parser's message too, which repeats it
            why = f" ({first_line_of(error)})" if shown == text else ""
            raise UserError(
                f"'{shown}' is not an override of the form key=value{why}; correct it, or quote the value inside "
                "shell quotes, as in \"key='value'\""
            ) from error
    if not override.key_or_group:
        raise UserError(f"'{text}' is not an override of the form key=value; specify the key")
    return override


def _quoted(found: re.Match[str]) -> str:
    return found["quoted"] or f"{found['before']}'{found['path']}'"


def value_set_by(override: Override, text: str) -> Any:
    """The value that an override sets; `key=a,b`, a sweep in Hydra, is treated as a list."""
    if override.is_delete():
        return None
    if not override.is_sweep_override():
        return override.value()
    if not override.is_choice_sweep() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"'{masked(text)}' is a sweep, but a run takes one value; set one value, or a list [a, b]")
    items = override.sweep_iterator(Transformer.identity)
    return [item.text if isinstance(item, QuotedString) else item for item in items]


# Files


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a recipe without resolving its interpolations.

    Raises:
        UserError: the file is not a YAML mapping.
    """
    try:
        content = OmegaConf.load(StringIO(yaml_text(path)))
    except Exception as error:  # PyYAML and OmegaConf raise errors of separate hierarchies
        raise UserError(f"{path} is not valid YAML ({' '.join(str(error).split())}); correct it") from error
    if not isinstance(content, DictConfig):
        raise UserError(f"{path} must hold a YAML mapping of configuration keys")
    return cast("dict[str, Any]", OmegaConf.to_container(content, resolve=False))
