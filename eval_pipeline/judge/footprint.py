"""Tells which tests leave nothing behind in their process, so that the next test may run in the same one.

Tests are the problem set's own and not hostile; what counts is what they do by the way. Whatever is not known to be
without trace is taken to leave one. It looks at compiled code, since a syntax tree takes longer to make than to judge
by.
"""

from __future__ import annotations

import builtins
import dis
import types

from eval_pipeline.judge.inside.preloaded import MODULES

_MODULES = frozenset((*MODULES["tester"], "__future__"))
_BUILTINS = frozenset(
    "abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict divmod enumerate filter float "
    "format frozenset hash hex id int isinstance issubclass iter len list map max min next object oct ord pow print "
    "property range repr reversed round set slice sorted staticmethod str sum super tuple type zip".split()
)
_TELLING = frozenset(
    name
    for name, value in vars(builtins).items()
    if name not in _BUILTINS and not (isinstance(value, type) and issubclass(value, BaseException))
)
_CHANGE_ATTRIBUTES = frozenset((dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]))
_IMPORT = dis.opmap["IMPORT_NAME"]


def leaves_nothing(code: types.CodeType) -> bool:
    """Whether code changes nothing but its own variables, random numbers aside, which every test starts anew."""
    operations = frozenset(code.co_code[::2])
    if operations & _CHANGE_ATTRIBUTES or any(map(_tells, code.co_names)):
        return False
    if _IMPORT in operations and not _MODULES.issuperset(_imported(code)):
        return False
    return all(leaves_nothing(part) for part in code.co_consts if isinstance(part, types.CodeType))


def _tells(name: str) -> bool:
    """Whether a global or an attribute of this name may lead further than to plain values."""
    return name in _TELLING or (name.startswith("_") and name != "_")


def _imported(code: types.CodeType) -> list[str]:
    return [step.argval for step in dis.get_instructions(code) if step.opcode == _IMPORT]
