"""MkDocs hook: navigation from docs/README.md, and plain text for links to files outside docs/."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^]]+)\]\(([^)\s]+)\)")


def on_config(config: Any) -> None:
    """Build the navigation: one group for each section of the index, and a subgroup for an item with several links."""
    config.nav = [{"Home": "README.md"}]
    for section in (Path(config.docs_dir) / "README.md").read_text().split("\n## ")[1:]:
        title, *items = section.split("\n- ")
        group: list[dict[str, Any]] = []
        for item in items:
            links = [{name: target} for name, target in LINK.findall(item)]
            group += [links[0]] if item.startswith("[") else [{item.partition(":")[0]: links}]
        config.nav.append({title.strip(): group})


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files outside the site by their text."""
    docs, directory = Path(config.docs_dir).resolve(), Path(page.file.abs_src_path).resolve().parent

    def is_inside(target: str) -> bool:
        return "://" in target or (directory / target.partition("#")[0]).resolve().is_relative_to(docs)

    return LINK.sub(lambda link: link[0] if is_inside(link[2]) else link[1], markdown)
