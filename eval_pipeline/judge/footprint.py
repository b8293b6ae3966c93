"""Tells which tests leave nothing behind in their process, so that the next test may run in the same one.

Tests are the problem set's own and not hostile; what counts is what they do by the way. Whatever is not known to be
without trace is taken to leave one.
"""

from __future__ import annotations

import ast
import builtins

from eval_pipeline.judge.inside.preloaded import MODULES

_MODULES = frozenset((*MODULES["tester"], "__future__"))
_BUILTINS = frozenset(
    "abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict divmod enumerate filter float "
    "format frozenset hash hex id int isinstance issubclass iter len list map max min next object oct ord pow print "
    "property range repr reversed round set slice sorted staticmethod str sum super tuple type zip".split()
)


def leaves_nothing(tree: ast.AST) -> bool:
    """Whether code changes nothing but its own variables, random numbers aside, which every test starts anew."""
    return all(map(_is_harmless, ast.walk(tree)))


def _is_harmless(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return all(name.name in _MODULES for name in names)
        case ast.ImportFrom(module=module, level=level):
            return level == 0 and module in _MODULES
        case ast.Attribute(attr=name, ctx=context):
            return isinstance(context, ast.Load) and not name.startswith("_")
        case ast.Name(id=name):
            return not name.startswith("__") and (name in _BUILTINS or not _is_builtin_function(name))
    return True


def _is_builtin_function(name: str) -> bool:
    value = getattr(builtins, name, None)
    return value is not None and not (isinstance(value, type) and issubclass(value, BaseException))
