"""One row of a data set, read with checks that name the row and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext.errors import UserError


@dataclass(frozen=True)
class Record:
    """One row. Where a method takes several keys they are names of the same thing; the first one present is read."""

    where: str
    """The row's place for a message, such as `mbpp.jsonl, line 3`."""
    number: int
    """Lines or rows from the top, the first is 1."""
    fields: Mapping[str, Any]

    def text(self, *keys: str) -> str:
        """A string that is not blank; `UserError` otherwise."""
        value = self.first(*keys)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{_either(keys)} must be a string that is not empty")
        return self._encodable(value, keys)

    def optional_text(self, *keys: str) -> str | None:
        """Like `text`, or None where the key is missing or null."""
        return None if self.first(*keys) is None else self.text(*keys)

    def optional_code(self, key: str) -> str:
        """Source text that may be blank; a missing key or null is blank too."""
        value = self.fields.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.error(f"{key!r} must be a string")
        return self._encodable(value, (key,))

    def texts(self, key: str) -> list[str]:
        """A list of strings, which may be empty; a missing key or null is an empty list."""
        value = self.fields.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key!r} must be a list of strings")
        return [self._encodable(item, (key,)) for item in value]

    def identifier(self, *keys: str) -> str:
        """A name of the row: a string that is not blank, or a whole number as published."""
        value = self.first(*keys)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value.strip():
            return self._encodable(value, keys)
        raise self.error(f"{_either(keys)} must be a string that is not empty or a whole number")

    def first(self, *keys: str) -> Any:
        """The value of the first of `keys` that is there and not null, unchecked; None if none is."""
        return next((self.fields[key] for key in keys if self.fields.get(key) is not None), None)

    def error(self, what: str) -> UserError:
        """The error to raise about this row."""
        return UserError(f"{self.where}: {what}")

    def _encodable(self, value: str, keys: tuple[str, ...]) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer takes
            raise self.error(
                f"{_either(keys)} is not valid Unicode ({error.reason}); correct the \\u escape"
            ) from error
        return value


def _either(keys: tuple[str, ...]) -> str:
    return " or ".join(repr(key) for key in keys)
