"""Typed configuration: a dataclass field gives a key its default, type, limits, choices and description.

Each component defines its dataclass next to the code that reads it, and a stage's root is composed of components
(`verl_ext.trainer.stages`). Everything else is derived from the fields: errors, suggestions, `--print-config` and
`docs/reference/configuration.md`. This module imports no component.
"""

from __future__ import annotations

import copy
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from verl_ext.config.secrets import HIDDEN, masked
from verl_ext.errors import UserError

LARGEST = 2**31 - 1
"""Default upper bound for integers: products of two counts must fit into 64 bits."""
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Properties of a key beyond its type and default.

    Attributes:
        doc: description for users, one sentence without a period; for an unused key, what to set instead.
        ge: minimum.
        gt: exclusive lower bound.
        le: maximum.
        lt: exclusive upper bound.
        also: a valid value outside the limits with its meaning, such as `(-1, "all")`.
        null: meaning of null, such as "all".
        finite: whether infinity is refused.
        nonempty: whether empty text is refused.
        path: whether `~` is expanded.
        quoted: whether text that looks like a number must be in quotes.
        hidden: whether messages omit the value, which may be a secret.
        unused: whether the key exists only for compatibility with verl's recipes; only the default is valid.
        needs: keys of which one must differ from its default, or have the value after `=`, for this key to have an
            effect; empty if it always has one.
    """

    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[Any, str] | None = None
    null: str = ""
    finite: bool = True
    nonempty: bool = False
    path: bool = False
    quoted: bool = False
    hidden: bool = False
    unused: bool = False
    needs: tuple[str, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether a number is within the limits; other values always are."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        if self.also is not None and value == self.also[0]:
            return True
        return (
            not math.isnan(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
            and (not self.finite or not math.isinf(value))
            and not (isinstance(value, int) and self.le is None and self.lt is None and value > LARGEST)
        )

    @property
    def limits(self) -> str:
        """The limits as text, such as `of at least 1`; empty without limits."""
        if self.ge is not None and self.le is not None:
            return f"from {self.ge:.10g} to {self.le:.10g}"
        bounds = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        words = " and ".join(f"{word} {bound:.10g}" for word, bound in bounds.items() if bound is not None)
        return f"of {words}" if words.startswith("at") else words


def setting(default: Any, doc: str, **limits: Any) -> Any:
    """Declare a configuration key.

    Args:
        default: value, or text with an interpolation such as `${data.eval_every_steps}`.
        doc: see `Setting`.
        limits: the other attributes of `Setting`. Limits apply to each item of a list.
    """
    metadata = {"setting": Setting(doc, **limits)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def unused(default: Any, instead: str) -> Any:
    """Declare a key without effect in this stage; any value but the default is refused with the advice `instead`."""
    return setting(default, instead, unused=True)


def section(component: type[T], **defaults: Any) -> T:
    """Declare a nested component; `defaults` override some of its defaults."""
    return field(default_factory=lambda: component(**copy.deepcopy(defaults)))


@dataclass(frozen=True)
class Key:
    """A key of a root.

    Attributes:
        name: dotted name.
        hint: type annotation.
        default: default value, possibly with an interpolation.
        setting: properties of the key.
    """

    name: str
    hint: Any
    default: Any
    setting: Setting

    @property
    def is_open(self) -> bool:
        """Whether the key is a mapping to which users can add keys."""
        return _is_mapping(self.hint)

    @property
    def is_list(self) -> bool:
        """Whether the key is a list, for which a single value is accepted too."""
        return get_origin(self.hint) is list

    @property
    def is_text(self) -> bool:
        """Whether the key takes one text, and a number only as its text."""
        return not self.setting.quoted and set(_members(self.hint)) <= {str, types.NoneType}

    @property
    def is_list_of_text(self) -> bool:
        """Whether the key takes a list of texts, and numbers only as their text."""
        members = set(_members(self.hint))
        return not self.setting.quoted and list[str] in members and members <= {list[str], str, types.NoneType}

    @property
    def takes(self) -> str:
        """The allowed values as text, such as `an integer of at least 1, or null for all`."""
        words = [word for each in alternatives(self.hint) for word in _words(each)]
        if not words:
            return "null"
        text = f"{_listed(words)} {self.setting.limits}".rstrip()
        quotes = ", in quotes if it looks like a number" if self.setting.quoted else ""
        return f"{text}{quotes}{self.exceptions}"

    @property
    def exceptions(self) -> str:
        """The valid values outside the limits, as the end of a sentence."""
        found = []
        if self.setting.also is not None:
            value, meaning = self.setting.also
            found.append(f"{_yaml(value)} for {meaning}")
        if types.NoneType in _members(self.hint):
            found.append(f"null for {self.setting.null}" if self.setting.null else "null")
        return "".join(f", or {each}" for each in found)

    def fits(self, value: Any) -> bool:
        """Whether a value has the key's type."""
        return fits(value, self.hint, self.setting.quoted)

    def shown(self, value: Any) -> str:
        """A value as text for messages, with secrets masked."""
        return HIDDEN if self.setting.hidden else masked(f"{self.name}={value!r}").partition("=")[2]


def keys(root: type) -> dict[str, Key]:
    """All keys of a root by dotted name, in field order."""
    return dict(_keys(root))


@cache
def _keys(root: type) -> tuple[tuple[str, Key], ...]:
    return tuple((key.name, key) for key in _walk(root(), ""))


def _walk(defaults: Any, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(type(defaults))
    for each in fields(defaults):
        name, default = f"{prefix}{each.name}", getattr(defaults, each.name)
        if is_dataclass(default):
            yield from _walk(default, f"{name}.")
        else:
            yield Key(name, hints[each.name], default, each.metadata["setting"])


# Types


def fits(value: Any, hint: Any, quoted: bool = False) -> bool:
    """Whether a value from YAML or the command line has a field's type.

    Args:
        quoted: whether to refuse a number where text is expected.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each, quoted) for each in arguments)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is list:
        return isinstance(value, list) and all(fits(item, arguments[0], quoted) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(name, str) for name in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str and not quoted:
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


def as_text(value: Any, hint: Any, written: Any = None) -> Any:
    """Convert numbers to text where the hint expects text, as in `experiment_name=2024`.

    Args:
        written: the value with its text in the file instead of each number, if it is known: `2026_11_27`.
    """
    members = _members(hint)
    if isinstance(value, list):
        items = [get_args(each)[0] for each in members if get_origin(each) is list]
        texts = written if isinstance(written, list) else [written] * len(value)
        return [as_text(item, items[0], text) for item, text in zip(value, texts)] if items else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or str not in members or any(fits(value, each) for each in members if each is not str):
        return value
    return written if isinstance(written, str) else str(value)


def _listed(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def alternatives(hint: Any) -> list[Any]:
    """The types of a union, except None."""
    return [each for each in _members(hint) if each is not types.NoneType]


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Any) -> list[str]:
    """The alternatives of a type without None, as text."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return list(map(_yaml, arguments))
    if hint is bool:
        return ["true", "false"]
    if origin is list:
        item = _listed([word for each in _members(arguments[0]) for word in _words(each)])
        article, _, noun = item.partition(" ")
        return [f"a list [a, b] of {f'{noun}s' if article in ('a', 'an') else item}"]
    if origin is dict:
        return ["a mapping of names"]
    return [{int: "an integer", float: "a number", str: "a string"}.get(hint, "anything")]


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _is_mapping(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(map(_is_mapping, get_args(hint)))
    return get_origin(hint) is dict


# Values


def build(root: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass from resolved nested values, and check it from the leaves up.

    A key that was added with `+` becomes an attribute of its section.

    Args:
        values: nested values for every field.

    Raises:
        UserError: a value has the wrong type or is outside its limits, or a component's `check` method refuses values
            that contradict each other.
    """
    return _build(root(), values, "", keys(root))


def _build(built: Any, values: Mapping[str, Any], prefix: str, known: Mapping[str, Key]) -> Any:
    """Replace the defaults of a component with `values`."""
    names = [each.name for each in fields(built)]
    for name in names:
        key = known.get(f"{prefix}{name}")
        if key is None:
            _build(getattr(built, name), values[name], f"{prefix}{name}.", known)
        else:
            value = as_text(values[name], key.hint)
            expanded = expand_home(key.name, value)  # refuses the home of an unknown user in any key
            value = expanded if key.setting.path else value
            check_value(key, value)
            setattr(built, name, value)
    for name in [name for name in values if name not in names]:
        setattr(built, name, values[name])
    if hasattr(built, "check"):
        built.check()
    return built


def check_value(key: Key, value: Any) -> None:
    """Refuse an invalid value of a key.

    Raises:
        UserError: the value is invalid; the message names the key, the value, and the allowed values.
    """
    name, says = key.name, key.setting
    if says.unused and value != key.default:
        raise UserError(f"{name} has no effect here; leave it at {_yaml(key.default)}: {says.doc}")
    shown = key.shown(value)
    if not key.fits(value):
        raise UserError(f"{name} is {shown}; it must be {key.takes}")
    if says.nonempty and not str(value).strip():
        raise UserError(f"{name} is empty; set it ({says.doc})")
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and item > LARGEST and not says.allows(item):
            raise UserError(f"{name} is {shown}; it must be at most {LARGEST}{key.exceptions}")
        if not says.allows(item):
            is_infinite = isinstance(item, float) and math.isinf(item)
            finite = key.takes.replace("a number", "a finite number").replace("of numbers", "of finite numbers")
            takes = finite if is_infinite else key.takes
            raise UserError(f"{name} is {shown}; it must be {takes}")


def without_effect(config: Any) -> list[str]:
    """A sentence for each key that is set, but has no effect because of the values of other keys.

    Args:
        config: an instance of a root.
    """
    known = keys(type(config))

    def is_met(need: str) -> bool:
        name, _, wanted = need.partition("=")
        value = value_at(config, name)
        return _yaml(value) == wanted if wanted else value != known[name].default

    return [
        f"{name}={_yaml(value)} has no effect without {' or '.join(key.setting.needs)}"
        for name, key in known.items()
        if key.setting.needs
        and (value := value_at(config, name)) != key.default
        and not any(map(is_met, key.setting.needs))
    ]


def flat(section: Any) -> dict[str, Any]:
    """Values of a component by dotted key; mappings are not flattened."""
    found: dict[str, Any] = {}
    for name, value in vars(section).items():
        if is_dataclass(value):
            found |= {f"{name}.{key}": item for key, item in flat(value).items()}
        else:
            found[name] = value
    return found


def value_at(section: Any, name: str) -> Any:
    """The value of a dotted key; None if the section does not have it."""
    for part in name.split("."):
        section = vars(section).get(part)
        if section is None:
            return None
    return section


def set_at(section: Any, name: str, value: Any) -> None:
    """Set an existing dotted key."""
    *parents, last = name.split(".")
    for part in parents:
        section = getattr(section, part)
    assert hasattr(section, last), f"{name} is not a key"
    setattr(section, last, value)


def to_yaml(section: Any) -> str:
    """The values of a component as YAML."""
    from omegaconf import OmegaConf  # here, because processes such as the judge's do not need it

    return OmegaConf.to_yaml(OmegaConf.create(as_dict(section)))


def expand_home(name: str, value: Any) -> Any:
    """Replace `~` with the home directory in a path or a list of paths; return other values unchanged.

    Raises:
        UserError: a path begins with `~NAME/`, and this machine has no user of that name; or with `~/` without HOME.
    """
    if isinstance(value, list):
        return [expand_home(name, item) for item in value]
    if not (isinstance(value, str) and value.startswith("~") and "{" not in value and (value == "~" or "/" in value)):
        return value
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        user, _, rest = value.partition("/")
        if user == "~":
            raise UserError(f"{name} is '{value}', but HOME is not set; set it, or write the absolute path")
        raise UserError(f"{name} is '{value}', but there is no user {user[1:]}; write ~/{rest} or the absolute path")
    return expanded


def as_dict(section: Any) -> dict[str, Any]:
    """Plain nested values of a component, including added keys."""
    return {
        name: as_dict(value) if is_dataclass(value) else copy.deepcopy(value) for name, value in vars(section).items()
    }
