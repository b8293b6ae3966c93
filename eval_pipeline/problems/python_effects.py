"""What a Python source would do, as far as that shows without running it."""

from __future__ import annotations

import ast

from eval_pipeline.problems.python_source import SourceParser, outside_functions


def gives_a_value(body: list[ast.stmt]) -> bool:
    """Whether a function with this body returns or yields, functions inside it left aside."""
    kinds = (ast.Return, ast.Yield, ast.YieldFrom)
    return any(isinstance(node, kinds) for node in outside_functions(body, ast.ClassDef))


def acts(tree: ast.Module) -> bool:
    """Whether running a module does something: it calls or loops outside its functions."""
    kinds = (ast.Call, ast.For, ast.While)
    return any(isinstance(node, kinds) for node in outside_functions(tree.body))


def prints(tree: ast.Module) -> bool:
    """Whether running a module does something, and somewhere in it there is something that writes output."""
    return acts(tree) and any(
        (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, (ast.Attribute, ast.alias)) and (_name(node) in ("write", "writelines", "stdout")))
        for node in ast.walk(tree)
    )


def is_blank(source: str, parser: SourceParser) -> bool:
    """Whether a source is Python without any statement but constants, as comments, docstrings and `42` are."""
    tree = parser.tree(source)
    return tree is not None and all(_is_idle(statement) for statement in tree.body)


def _is_idle(statement: ast.stmt) -> bool:
    """Whether it does nothing in any program. `Answer: 42` is an annotation."""
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return _is_constant(statement.annotation)
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and _is_constant(statement.value))


def _is_constant(expression: ast.expr) -> bool:
    return not any(isinstance(node, (ast.Name, ast.Call)) for node in ast.walk(expression))


def _name(node: ast.Attribute | ast.alias) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.name
