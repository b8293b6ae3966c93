"""The documentation's pages, and the example at the beginning of docs/guides/grpo.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""The documentation's pages."""
STEPS = re.compile(r"^step \d+/\d+ \| loss .*$", re.MULTILINE)
"""Lines on training steps, as a run prints them."""


def link_repository(directory: Path) -> None:
    """Set up a clone without data and checkpoints, by links to everything else."""
    directory.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("data", "checkpoints") and not path.name.startswith("."):
            (directory / path.name).symlink_to(path)


class GRPOExample:
    """The files and the two commands at the beginning of docs/guides/grpo.md."""

    def __init__(self) -> None:
        page = (ROOT / "docs/guides/grpo.md").read_text()
        section = page.partition("\n## Your own prompts")[2].partition("\n## ")[0]
        self.files = dict(re.findall(r"`(\w+\.\w+)` [a-z]+ [^`]*\n\n```\w+\n(.*?)```", section, re.DOTALL))
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        [commands] = [text.replace("\\\n", " ") for language, text in blocks if language == "bash"]
        self.make_model, self.train = map(shlex.split, commands.splitlines())
        self.settings = dict(word.split("=", 1) for word in self.train if "=" in word)
        [self.printed] = [text for language, text in blocks if not language]

    def copy_to(self, directory: Path) -> None:
        """Save the files in a new `link_repository`."""
        link_repository(directory)
        for name, text in self.files.items():
            (directory / name).write_text(text)

    def run_dir(self, directory: Path) -> Path:
        """Where the run writes, in such a clone."""
        return directory / "checkpoints/grpo" / self.settings["trainer.experiment_name"]
