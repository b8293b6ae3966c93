"""A running server that speaks OpenAI's protocol: its key, its models, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType

from eval_pipeline.config import EngineConfig
from eval_pipeline.engines.model_card import ModelCard
from verl_ext.errors import UserError, first_line_of

LOOK_S = 10.0
"""How long a server may take to accept a connection, or to say which models it has."""
NUM_LISTED = 10
"""Models named to a user whose choice the server does not have."""


class OpenAIServer:
    """A connection to the server; leaving the context closes it.

    Args:
        settings: of the engine.

    Raises:
        UserError: the variable with the key holds something that is no key.
    """

    def __init__(self, settings: EngineConfig) -> None:
        import openai

        self.url, self._settings = settings.base_url, settings
        self._key = _key_in(settings.api_key_env)
        # every request has its own limit, retries included, which the package does not know
        self.client = openai.OpenAI(base_url=self.url, api_key=self._key or "EMPTY", max_retries=0)

    def __enter__(self) -> OpenAIServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def card(self, export: Path | None) -> ModelCard:
        """The model to ask.

        Args:
            export: directory that the model must have been loaded from; None takes what `engine.model` names.

        Raises:
            UserError: the server cannot be reached, refuses the key, or does not have the one model that is wanted.
        """
        cards, wanted = self._cards(), self._settings.model
        fitting = [card for card in cards if wanted in (None, card.id) and (export is None or card.serves(export))]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(map(str, cards[:NUM_LISTED])) or "none"
        if fitting:
            raise UserError(f"{self.url} serves several models; set engine.model to one of them: {names}")
        if export is not None and any(wanted in (None, card.id) for card in cards):
            raise UserError(
                f"{self.url} serves {names}, not {export}; start it with the absolute path of that directory, or omit "
                "--checkpoint to evaluate the model that it serves"
            )
        problem = f"does not serve {wanted}" if wanted else "serves no model"
        raise UserError(f"{self.url} {problem}; set engine.model to one of its models: {names}")

    def _cards(self) -> list[ModelCard]:
        import openai

        variable = self._settings.api_key_env
        try:
            # read here, since the package takes any page for a list of models
            reply = self.client.with_options(timeout=LOOK_S, max_retries=2).models.with_raw_response.list()
            return [ModelCard.of(entry) for entry in json.loads(reply.text)["data"]]
        except openai.APIConnectionError as error:
            raise UserError(f"no server answers at {self.url}; start it or correct engine.base_url") from error
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise UserError(f"{self.url} rejects the key; store a valid one in the variable {variable}") from error
        except (openai.APIError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{self.url} does not list its models ({self.say(error)}); correct engine.base_url, which often ends "
                "in /v1"
            ) from error

    def say(self, error: Exception) -> str:
        """An error in one line; some servers repeat the key that they refuse."""
        said = f"{type(error).__name__}: {first_line_of(error)}"
        return said.replace(self._key, "***") if self._key else said


def _key_in(variable: str) -> str:
    key = os.environ.get(variable, "").strip()  # a key that was read from a file ends in a new line
    if not key.isascii() or not key.isprintable():
        raise UserError(f"the variable {variable} holds characters that no key has; store the key alone in it")
    return key


def ask_for_card(settings: EngineConfig, export: Path | None) -> ModelCard:
    """The model of a running server; the arguments and errors are those of `OpenAIServer.card`."""
    with OpenAIServer(settings) as server:
        return server.card(export)
