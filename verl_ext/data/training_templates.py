"""The included chat templates for training, and the setting `data.chat_template`.

Imports nothing heavy, because the launcher checks the setting with this module.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from verl_ext.errors import UserError, first_line_of
from verl_ext.plugins import find_file

DIRECTORY = Path(__file__).with_name("templates")
TEMPLATE_NAMES = tuple(sorted(path.stem for path in DIRECTORY.glob("*.jinja")))
SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")
_MARK = re.compile(r"\{%([-+]?)\s*((?:end)?generation)\s*([-+]?)%\}")


def read_chat_template(setting: str) -> str:
    """Read the template for `data.chat_template`: one of `TEMPLATE_NAMES`, a Jinja file, or the template text.

    Raises:
        UserError: no template or file has this name, or the file cannot be read.
    """
    if "{" in setting:
        return setting
    if setting in TEMPLATE_NAMES:
        path = DIRECTORY / f"{setting}.jinja"
    elif "/" in setting or Path(setting).suffix in SUFFIXES or Path(setting).is_file():
        path = find_file(setting, "data.chat_template")
    else:
        near = difflib.get_close_matches(setting, TEMPLATE_NAMES, n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"data.chat_template is '{setting}', which is neither a template nor a file{guess}; "
            f"use one of {', '.join(TEMPLATE_NAMES)}, or the path of a Jinja file"
        )
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = first_line_of(error)
        raise UserError(
            f"data.chat_template names {path.absolute()}, which cannot be read ({why}); restore it"
        ) from error


def parse_chat_template(text: str) -> None:
    """Parse a template like transformers, with its tag `generation`, without rendering it.

    Raises:
        UserError: the template has a syntax error, or cannot be compiled.
    """
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from verl_ext.rendering import EndlessTemplate, rendering

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        with rendering():  # Jinja evaluates constant expressions at compile time
            Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).from_string(text)
    except EndlessTemplate as error:
        raise UserError(
            "data.chat_template cannot be compiled: a constant expression takes too long; correct it"
        ) from error
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f"line {line}: "
        raise UserError(
            f"data.chat_template is not a Jinja template ({where}{first_line_of(error)}); correct it"
        ) from error


def marks_generation(template: str) -> bool:
    """Whether a template marks the assistant's text with `{% generation %}`."""
    return any(found[2] == "generation" for found in _MARK.finditer(template))


def without_date(text: str) -> str:
    """Remove the current date, which SmolLM3's own template writes, from a rendered chat."""
    return re.sub(r"Today Date: [^\n]*", "", text)


def without_marks(template: str) -> str:
    """Replace `{% generation %}` tags, for renderers without them, by comments with the same white space control."""
    return _MARK.sub(r"{#\1 \2 \3#}", template)
