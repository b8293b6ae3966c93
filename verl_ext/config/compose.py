"""Composes defaults, a recipe and the command line into a typed configuration; later sources take precedence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, Transformer, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from verl_ext.config.schema import Key, as_dict, as_text, build, keys
from verl_ext.config.secrets import masked, require_no_secrets
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import yaml_text
from verl_ext.suggestions import RANKS, meant_key

COMMAND_LINE = "the command line"
_QUOTED = r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|"""
_PATH = re.compile(
    rf"""{_QUOTED}(?P<before>[=\[,] *|: +)(?P<text>(?:~|\.{{0,2}}/)(?:[^'",\[\]{{}}]*[^\s'",\[\]{{}}])?) *"""
)
"""A path that starts with `/`, `~`, `./` or `../` and is a value, or an item of a list or mapping of values."""
_ITEM = re.compile(
    rf"""{_QUOTED}(?P<before>(?:^|[\[,]) *)(?P<text>(?!(?:null|true|false) *(?:[,\]]|$))[^\s'",\[\]{{}}\\]"""
    r"""(?:[^'",\[\]{}\\]*[^\s'",\[\]{}\\])?) *(?=[,\]]|$)""",
    re.IGNORECASE,
)
"""An unquoted item of a list of texts, or a single text in place of the list."""
_LEFT_TO_HYDRA = re.compile(r"""['"]|(?:null|true|false|\[.*\]|\{.*\})$|.*\\""", re.DOTALL | re.IGNORECASE)
"""The value of a key that takes text, if it is quoted or another type, or has Hydra's escapes."""
_CALL = re.compile(r"\w+\(.*\)")
"""A function of Hydra's grammar, such as `choice(a,b)`."""


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
        self._sources: dict[str, str] = {}  # of the values that replace defaults

    def set_key(self, name: str, value: Any) -> None:
        """Set a key."""
        self._set(name, value, COMMAND_LINE)

    def add_recipe_file(self, path: Path) -> None:
        """Set the keys of a recipe; keys that take text get the file's text, also where YAML reads a number.

        Raises:
            UserError: see `load_yaml`; or a key is unknown, or its value has the wrong type.
        """
        content, texts = load_yaml(path), dict(self._leaves(load_texts(path), ""))
        for name, value in self._leaves(content, ""):
            key = self._keys.get(name)
            if key is not None and (key.is_text or key.is_list_of_text):
                value = as_text(value, key.hint, texts.get(name))
            self._set(name, value, str(path))

    def add_config(self, values: Mapping[str, Any], source: str) -> None:
        """Set the nested keys of a run's saved configuration, which may have keys that `+key=value` added.

        Args:
            source: name of the configuration in messages.
        """
        for name, value in self._leaves(values, ""):
            if name not in self._others and self._is_free(name):
                self._update(name, value, source, force_add=True)
            else:
                self._set(name, value, source)

    def add_overrides(self, words: Iterable[str]) -> None:
        """Apply Hydra overrides: `key=value` sets, `+key=value` and `++key=value` add, `~key` sets to null."""
        for text in words:
            override = parse_override(text, self._keys)
            name, value = override.key_or_group, value_set_by(override, text)
            if (override.is_add() or override.is_force_add()) and self._is_free(name):
                self._update(name, value, COMMAND_LINE, force_add=True)
                continue
            for leaf, of_leaf in self._leaves_of(name, value):
                self._set(leaf, of_leaf, COMMAND_LINE)

    @property
    def values(self) -> dict[str, Any]:
        """Nested values with unresolved interpolations."""
        return cast("dict[str, Any]", OmegaConf.to_container(self._values, resolve=False))

    def build(self) -> Any:
        """Resolve all interpolations and build the configuration.

        Raises:
            UserError: an interpolation has no target, or a value is invalid or a secret.
        """
        try:
            values = cast("dict[str, Any]", OmegaConf.to_container(self._values, resolve=True))
        except OmegaConfBaseException as error:
            name, reason = self._unresolved_key() or str(error.full_key), masked(first_line_of(error))
            raise UserError(
                f"{self._sources.get(name, 'the configuration')} sets '{name}', which cannot be resolved ({reason}); "
                "correct it"
            ) from error
        require_no_secrets(values)
        return build(self._root, values)

    def _set(self, name: str, value: Any, source: str) -> None:
        key = self._keys.get(name)
        if key is None:
            if self._is_in_open_mapping(name):
                self._update(name, value, source, force_add=True)
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
        self._update(name, value, source, merge=key.is_open)

    def _update(self, name: str, value: Any, source: str, **how: bool) -> None:
        self._sources[name] = source
        try:
            OmegaConf.update(self._values, name, value, **how)
        except GrammarParseError as error:
            reason = masked(first_line_of(error))
            raise UserError(f"{source} sets '{name}' to a malformed interpolation ({reason}); correct it") from error

    def _unresolved_key(self) -> str | None:
        """The key with an invalid interpolation, and not another key that refers to it; None if it is a default."""
        texts = {name: str(value) for name, value in self._leaves(self.values, "")}
        failing = [name for name in self._sources if not self._is_resolvable(name)]
        for name in failing:
            if not any(f"${{{other}}}" in texts.get(name, "") for other in failing if other != name):
                return name
        return None

    def _is_resolvable(self, name: str) -> bool:
        try:
            value = OmegaConf.select(self._values, name)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException:
            return False
        return True

    def _suggestion(self, name: str) -> str:
        if re.match(r"hydra[./]", name):
            return "Hydra's own keys have no effect here, so remove it"
        meant = meant_key(name, [each for each, key in self._keys.items() if not key.setting.unused])
        if meant == RANKS:
            return "pass the number of ranks as the first argument of the command"
        if meant is not None:
            return f"did you mean '{meant}'?"
        section = name.rpartition(".")[0]
        siblings = [each.rpartition(".")[2] for each in self._keys if section and each.rpartition(".")[0] == section]
        if siblings:
            return f"known keys of '{section}' are {', '.join(siblings)}"
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
            override = parse_override(text, self._keys)
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


def parse_override(text: str, known: Mapping[str, Key]) -> Override:
    """Parse an override of the command line.

    Args:
        known: keys by name.

    Raises:
        UserError: the text is not an override.
    """
    parser, quoted = OverridesParser.create(), _with_quoted_text(text, known)
    try:
        override = parser.parse_override(quoted)
    except HydraException as error:
        try:  # Hydra allows ~, =, parentheses and non-ASCII letters only in quotes, and no shell expands ~ after `key=`
            override = parser.parse_override(_PATH.sub(_quoted, quoted))
        except HydraException:
            shown = masked(text)  # if it holds a secret, omit the parser's message too, which repeats it
            why = f" ({first_line_of(error)})" if shown == text else ""
            example = "'key=\"value\"'" if "'" in text else "\"key='value'\""
            raise UserError(
                f"'{shown}' is not an override of the form key=value{why}; correct it, or quote the value inside "
                f"shell quotes, as in {example}"
            ) from error
    if not override.key_or_group:
        raise UserError(f"'{text}' is not an override of the form key=value; specify the key")
    if override.package is not None:
        raise UserError(f"'{text}' has the Hydra package '@{override.package}', which has no effect here; remove it")
    return override


def _with_quoted_text(text: str, known: Mapping[str, Key]) -> str:
    """Quote the value of a key that takes text, or each item of a list of texts, so that Hydra does not convert it.

    Hydra would convert `1e-5` and `2026_11_27` to numbers, split `a,b`, and refuse `#` and non-ASCII letters.
    """
    before, equals, value = text.partition("=")
    key, value = known.get(before.strip().lstrip("+")), value.strip()
    if key is None or not equals:
        return text
    if key.is_text and not _LEFT_TO_HYDRA.match(value):
        return f"{before}={_in_quotes(value)}"
    if key.is_list_of_text and not _CALL.fullmatch(value):
        return f"{before}={_ITEM.sub(_quoted, value)}"
    return text


def override_of(name: str, value: str) -> str:
    """The override that gives a text to a key that takes text."""
    return f"{name}={_in_quotes(value) if _LEFT_TO_HYDRA.match(value) else value}"


def _in_quotes(text: str) -> str:
    return QuotedString(text, Quote.double).with_quotes()


def _quoted(found: re.Match[str]) -> str:
    return found["quoted"] or f"{found['before']}'{found['text']}'"


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


def load_texts(path: Path) -> dict[str, Any]:
    """Read a recipe with every value as its text in the file; without keys that are merged from an anchor."""
    content = yaml.load(yaml_text(path), Loader=yaml.BaseLoader)
    return content if isinstance(content, dict) else {}
