"""Questions about Python sources, answered without running them."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Iterator

PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions of `ast.parse`: the last three are raised for null bytes, thousands of digits and deep nesting."""
MAX_SOURCE_CHARS = 1 << 15
"""Longer sources are not parsed: no model writes such a program, and some take quadratic time."""
MAX_PARSED_CHARS = 6 * MAX_SOURCE_CHARS
"""Maximum total length of the sources that are parsed for one answer."""
MAX_CUTS = 8
"""One or two find the end of a program in prose; without a limit, hostile text would be parsed once per line."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WRITERS = ("write", "writelines", "stdout")
_NAMES = (ast.Name, ast.Attribute)
_UNITTEST_RUNNERS = frozenset(("TextTestRunner", "TestLoader", "defaultTestLoader", "TestSuite"))
_UNITTEST_RESULTS = frozenset(("wasSuccessful", "failures", "errors"))
_LOOKUPS = frozenset(("globals", "locals", "vars", "dir", "eval", "exec", "__subclasses__"))
"""With these, code may use a definition without its name."""


def parse(source: str) -> ast.Module:
    """`ast.parse` without warnings about the source, for example of an invalid escape. Raises `PARSE_ERRORS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


class SourceParser:
    """Parses candidates for the program in one answer, each source once, and `max_chars` characters in total."""

    def __init__(self, max_chars: int = MAX_PARSED_CHARS) -> None:
        self._chars_left = max_chars
        self._results: dict[str, ast.Module | Exception] = {}

    def parse(self, source: str) -> ast.Module:
        """The syntax tree.

        Raises:
            PARSE_ERRORS: it is not Python, or too long, or the limit is reached.
        """
        if len(source) > min(MAX_SOURCE_CHARS, self._chars_left) and source not in self._results:
            raise ValueError("too much to parse")
        if source not in self._results:
            self._chars_left -= len(source)
            try:
                self._results[source] = parse(source)
            except PARSE_ERRORS as error:
                self._results[source] = error
        result = self._results[source]
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result

    def tree(self, source: str) -> ast.Module | None:
        """The result of `parse`, or None if it raises."""
        try:
            return self.parse(source)
        except PARSE_ERRORS:
            return None


def parsing_beginning(lines: list[str], parser: SourceParser) -> str:
    """The longest beginning of some lines that is a program, cut between top-level statements only.

    A function cut off in the middle would run, and its answer would not get the verdict `syntax_error`.

    Returns:
        The program with a newline at its end; empty if there is none, or none is found in `MAX_CUTS` cuts of at most
        `MAX_SOURCE_CHARS` characters.
    """
    if sum(map(len, lines)) > MAX_SOURCE_CHARS:
        return ""
    for _ in range(MAX_CUTS):
        program = "\n".join(lines).rstrip("\n") + "\n"
        try:
            parser.parse(program)
        except SyntaxError as error:
            end = min((error.lineno or 1) - 1, len(lines) - 1)  # later lines cannot fix the error
            while end > 0 and not lines[end][:1].strip():
                end -= 1
            lines = lines[:end]
        except PARSE_ERRORS:
            return ""
        else:
            return program if lines else ""
    return ""


def find_definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """The last top-level function or class of this name."""
    return next((node for node in reversed(tree.body) if isinstance(node, _DEFINITIONS) and node.name == name), None)


def defined_names(tree: ast.Module) -> dict[str, bool]:
    """Names that a module defines or assigns at its top level, also inside `try`, `if` and the like.

    Returns:
        For each name whether it is a class.
    """
    names: dict[str, bool] = {}
    for node in outside_functions(tree.body, ast.ClassDef):
        if isinstance(node, _DEFINITIONS):
            names[node.name] = isinstance(node, ast.ClassDef)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            names.update({name: False for name in _stored_names(node)})
    return names


def imported_names(tree: ast.Module) -> set[str]:
    """Names that the top level of a module imports."""
    imports = (node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    return {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def outside_functions(body: list[ast.stmt], *also_left: type[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of these statements except those inside functions, or inside nodes of the other given kinds."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *also_left)
    nodes: list[ast.AST] = list(body)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, inner):
            nodes.extend(ast.iter_child_nodes(node))


def called_names(tree: ast.AST) -> list[str]:
    """The names that are called, in the order of the source."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [name.id for name in sorted(calls, key=lambda name: (name.lineno, name.col_offset))]


def unknown_names(tree: ast.Module) -> set[str]:
    """Names that a module reads but neither defines nor imports, and that are not built in."""
    nodes = list(ast.walk(tree))
    known = set(dir(builtins)) | _stored_names(tree) | {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, _DEFINITIONS):
            known.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            known.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            known.add(node.name)
    return {node.id for node in nodes if isinstance(node, ast.Name)} - known


def looks_defined(source: str, name: str) -> bool:
    """Whether the top level of a source defines or assigns `name`, even if the source does not parse."""
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*(?::[^=\n]+)?=(?!=)"
    return re.search(pattern, source, re.MULTILINE) is not None


def defines(source: str, name: str, parser: SourceParser) -> bool:
    """Whether the top level of a source defines or assigns `name`; inside `try`, `if` and the like if it parses."""
    if looks_defined(source, name):
        return True
    if re.search(rf"\b{re.escape(name)}\b", source) is None:
        return False
    tree = parser.tree(source)
    return tree is not None and name in defined_names(tree)


def _stored_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


# What a source does when it runs


def returns_a_value(body: list[ast.stmt]) -> bool:
    """Whether a function with this body returns or yields, not counting functions inside it."""
    kinds = (ast.Return, ast.Yield, ast.YieldFrom)
    return any(isinstance(node, kinds) for node in outside_functions(body, ast.ClassDef))


def acts(tree: ast.Module) -> bool:
    """Whether running a module does something: it calls or loops outside its functions."""
    kinds = (ast.Call, ast.For, ast.While)
    return any(isinstance(node, kinds) for node in outside_functions(tree.body))


def prints(tree: ast.Module) -> bool:
    """Whether running a module does something, and the module mentions something that writes output."""
    return acts(tree) and any(
        (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, ast.Attribute) and node.attr in _WRITERS)
        or (isinstance(node, ast.alias) and node.name in _WRITERS)
        for node in ast.walk(tree)
    )


def fault_of_test(tree: ast.Module, needs_assert: bool = True) -> str | None:
    """Why a test would pass every answer; None if it may fail one.

    Args:
        tree: the test.
        needs_assert: whether the test must have an assert statement; other tests may raise, or call the answer.

    Returns:
        The rest of a sentence that begins with the test's name.
    """
    running, unused = running_nodes(tree.body)
    if _ignores_unittest(tree):
        return "runs unittest but ignores the result; assert that its wasSuccessful() is true"
    if any(isinstance(node, ast.Assert) for node in running):
        return None
    if needs_assert:
        unused = [node for node in unused if any(isinstance(part, ast.Assert) for part in ast.walk(node))]
    elif can_fail(running):
        names = {node.id for node in running if isinstance(node, ast.Name)}
        if names & (unknown_names(tree) | _LOOKUPS):  # it uses the answer
            return None
    if not unused:
        return "asserts nothing; write an assert statement" if needs_assert or is_idle(tree) else None
    first = unused[0]
    if isinstance(first, _DEFINITIONS):
        return f"defines {first.name} but never calls it; call it, or write the asserts at the top level"
    return "asserts only if __name__ is '__main__', which it is not; write the asserts at the top level"


def _ignores_unittest(tree: ast.Module) -> bool:
    """Whether a test runs unittest's tests, but neither reads their result nor asserts anything outside of classes."""
    nodes = [*ast.walk(tree)]
    names = {node.attr if isinstance(node, ast.Attribute) else node.id for node in nodes if isinstance(node, _NAMES)}
    outside_classes = (part for each in tree.body if not isinstance(each, ast.ClassDef) for part in ast.walk(each))
    if names & _UNITTEST_RESULTS or any(isinstance(node, (ast.Assert, ast.Raise)) for node in outside_classes):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    options = {ast.unparse(option) for call in calls for option in call.keywords}
    called = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    return ("run" in called and bool(names & _UNITTEST_RUNNERS)) or ("main" in called and "exit=False" in options)


def can_fail(nodes: list[ast.AST]) -> bool:
    """Whether one of these nodes asserts, raises, or calls something that may."""
    return any(isinstance(node, (ast.Assert, ast.Raise, ast.Call)) for node in nodes)


def running_nodes(body: list[ast.stmt], *used_names: str) -> tuple[list[ast.AST], list[ast.stmt]]:
    """The nodes that may run when these statements run, and the statements that never do, in the order of the source.

    Code behind `if __name__ == "__main__"` does not run. A function or a method runs only if code that runs uses the
    name of the function or of the class.

    Args:
        body: the statements.
        used_names: names that other code uses.
    """
    running: list[ast.AST] = []
    waiting: list[tuple[str, ast.stmt, list[ast.AST]]] = []
    guarded: list[ast.stmt] = []
    imported, used = imported_names(ast.Module(body, [])), {*used_names}
    nodes: list[ast.AST] = list(body)
    while nodes:
        node = nodes.pop()
        running.append(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        if isinstance(node, _DEFINITIONS):
            decorators = [each for each in node.decorator_list if _root_name(each) not in imported]
            nodes.extend(decorators)
            if decorators:  # may call it
                used.add(node.name)
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
                nodes.extend(part for part in node.body if part not in methods)
                inner = [*node.bases, *(part for method in methods for part in (method.args, *method.body))]
            else:
                nodes.append(node.args)
                inner = list(node.body)
            waiting.append((node.name, node, inner))
        elif isinstance(node, ast.If) and _is_main_guard(node.test):
            guarded.append(node)
            nodes.extend(node.orelse)
        else:
            nodes.extend(ast.iter_child_nodes(node))
        if not nodes:
            may_use_all = bool(used & _LOOKUPS)
            nodes = [part for name, _, inner in waiting if may_use_all or name in used for part in inner]
            waiting = [each for each in waiting if not may_use_all and each[0] not in used]
    unused = [*(definition for _, definition, _ in waiting), *guarded]
    return running, sorted(unused, key=lambda statement: statement.lineno)


def _root_name(expression: ast.expr) -> str:
    """`pytest` of `@pytest.mark.parametrize("x", [1])`; empty if the expression does not begin with a name."""
    node: ast.AST = expression
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_main_guard(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Eq)
        and {ast.unparse(side) for side in (test.left, *test.comparators)} == {"__name__", "'__main__'"}
    )


def is_idle(tree: ast.Module) -> bool:
    """Whether a module has no statements except constants, such as docstrings and `42`."""
    return all(_is_idle(statement) for statement in tree.body)


def is_blank(source: str, parser: SourceParser) -> bool:
    """Whether a source is Python with no statements except constants, such as docstrings and `42`."""
    tree = parser.tree(source)
    return tree is not None and is_idle(tree)


def _is_idle(statement: ast.stmt) -> bool:
    """Whether a statement never does anything. `Answer: 42` is an annotation."""
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return _is_constant(statement.annotation)
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and _is_constant(statement.value))


def _is_constant(expression: ast.expr) -> bool:
    return not any(isinstance(node, (ast.Name, ast.Call)) for node in ast.walk(expression))
