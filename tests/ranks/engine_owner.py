"""Opens an engine and queries it until it dies. Arguments: the model's directory and the settings as JSON.

Prints one JSON value per line: the large packages that it has imported, the answers to `REQUESTS`, and why the engine
died or could not be opened.
"""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

from eval_pipeline.config import EngineConfig
from eval_pipeline.engines import EngineDied
from eval_pipeline.worker import open_engine
from tests.helpers.engines import GREEDY, LONG, REQUESTS, answer_all
from verl_ext.errors import UserError


def main(export: str, settings: str) -> None:
    """Run until the engine dies."""
    try:
        with open_engine(EngineConfig(**json.loads(settings)), Path(export)) as engine:
            say(sorted({"torch", "vllm", "transformers"} & sys.modules.keys()))
            say([(*key, *astuple(answer)) for key, answer in answer_all(engine, REQUESTS, GREEDY).items()])
            for _ in range(2):  # a dead engine stays dead
                try:
                    while True:
                        answer_all(engine, REQUESTS, LONG)
                except EngineDied as error:
                    say(str(error))
    except UserError as error:
        say(str(error))


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
