"""What a server says of a model that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelCard:
    """One entry of a server's `/v1/models`: it tells a served model from another, wherever the server listens."""

    id: str
    """The name that requests ask for."""
    root: str | None
    """What was loaded: a directory or a name on the hub. vLLM's server says it; OpenAI's own does not."""
    max_model_len: int | None
    """Tokens of prompt and answer together; vLLM's server says it."""

    @staticmethod
    def of(entry: Mapping[str, Any]) -> ModelCard:
        """From the server's JSON.

        Raises:
            AttributeError, KeyError: it is no entry.
        """
        root, length = entry.get("root"), entry.get("max_model_len")
        return ModelCard(
            str(entry["id"]),
            root if isinstance(root, str) else None,
            length if isinstance(length, int) else None,
        )

    def serves(self, export: Path) -> bool:
        """Whether it says that this very directory was loaded; of a relative path nobody knows where it begins."""
        named = [Path(name) for name in (self.id, self.root) if name is not None]
        return any(path.is_absolute() and path.resolve() == export.resolve() for path in named)

    def __str__(self) -> str:
        return self.id if self.root in (None, self.id) else f"{self.id} (loaded from {self.root})"
