"""The chat templates that are shipped for training, and the setting `data.chat_template`.

Imports nothing heavy: the launcher checks the setting with it.
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
    """The template that `data.chat_template` gives: one of `TEMPLATE_NAMES`, a Jinja file, or the text itself.

    Raises:
        UserError: there is no such name and no such file, or the file cannot be read.
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
            f"take one of {', '.join(TEMPLATE_NAMES)}, or the path of a Jinja file"
        )
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = first_line_of(error)
        raise UserError(
            f"data.chat_template names {path.absolute()}, which cannot be read ({why}); restore it"
        ) from error


def parse_chat_template(text: str) -> None:
    """Parse a template as transformers does, with its tag `generation`; nothing is rendered.

    Raises:
        UserError: it has a syntax error, or cannot be compiled.
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
        with rendering():  # Jinja computes constant expressions when it compiles
            Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).from_string(text)
    except EndlessTemplate as error:
        raise UserError(
            "data.chat_template cannot be compiled: one of its constant expressions takes too long; correct it"
        ) from error
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f"line {line}: "
        raise UserError(
            f"data.chat_template is not a Jinja template ({where}{first_line_of(error)}); correct it"
        ) from error


def marks_generation(template: str) -> bool:
    """Whether a template marks the text of the assistant with `{% generation %}`."""
    return any(found[2] == "generation" for found in _MARK.finditer(template))


def without_date(text: str) -> str:
    """A rendered chat without the current date, which SmolLM3's own template writes."""
    return re.sub(r"Today Date: [^\n]*", "", text)


def without_marks(template: str) -> str:
    """The template for renderers that do not know `{% generation %}`; comments keep the white space control."""
    return _MARK.sub(r"{#\1 \2 \3#}", template)
