"""Compares formulas in LaTeX or plain notation by value, as MATH and AIME need it.

Two expressions are equal if they have the same value at fixed points (Schwartz-Zippel lemma). Points at which one is
undefined do not count, but at least `MIN_DEFINED` must. Besides expressions, a formula may be an equation, an
inequality, a list, tuple, set, interval, union, ratio or matrix.

Formulas may be hostile: their length and depth, the size of numbers and therefore the time are limited. Only the
standard library is imported, because small server processes use this module.
"""

from __future__ import annotations

import cmath
import math
import operator
import re
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from eval_pipeline.judge.formula_parser import IMAGINARY, PROSE, Parser, normalize
from eval_pipeline.judge.formula_values import (
    NUM_POINTS,
    Collection,
    Expression,
    Formula,
    NotAFormula,
    Number,
    Relation,
    apply,
    constant,
    intersection,
    is_infinite,
    reals_without,
    subtract,
)

MAX_FORMULA_CHARS = 400
MIN_DEFINED = 3
_ZERO = constant(Fraction(0))

RATIO = re.compile(r"^([0-9]+) ?: ?([0-9]+)$")
"""A ratio of two numbers: `9:14`."""


def equal_formulas(one: str, other: str) -> bool:
    """Whether two formulas have the same value; False if one cannot be parsed.

    `a/bc` may mean `(a/b)c` and `a/(bc)`, and is equal to both; `1,234` may be a number and a list. Units behind a
    number are ignored if the other formula has none, and percent and degree signs always. `x > 2 and x < 5` is `(2,
    5)`. A formula equals `x = formula`, `1 \\pm 2` equals the list of both values, and `x < 3` equals `(-\\infty, 3)`.
    `0.1666...` is 1/6. A list equals `x = 3, y = 5` in this order only.

    Args:
        one: an answer.
        other: the reference.
    """
    texts, texts_of_variables = ([normalize(text, with_units) for text in (one, other)] for with_units in (True, False))
    return _equal_texts(texts) or (texts != texts_of_variables and _equal_texts(texts_of_variables))


def _equal_texts(texts: list[str]) -> bool:
    if any(len(text) > MAX_FORMULA_CHARS or PROSE.search(text) for text in texts):
        return False
    if any("/" in text or "\\frac" in text for text in texts):  # a ratio equals a quotient, and no decimal
        texts = [RATIO.sub(r"\1/\2", text) for text in texts]
    is_complex = any(IMAGINARY.search(text) for text in texts)
    lefts, rights = (_readings(text, is_complex) for text in texts)
    return any(_equal_readings(left, right) for left, right in product(lefts, rights))


def is_rounded(exact: str, decimal: str) -> bool:
    """Whether a decimal is the rounded or cut off value of a formula without variables: `1.41` of `\\sqrt{2}`."""
    text = normalize(exact)
    if not decimal.strip("-.") or len(text) > MAX_FORMULA_CHARS:
        return False
    unit = Fraction(1, 10 ** len(decimal.partition(".")[2]))
    for formula in (reading.formula for reading in _readings(text, is_complex=False)):
        values = set(formula.values) if isinstance(formula, Expression) and not formula.is_word else set()
        if len(values) == 1 and isinstance(value := values.pop(), Fraction | float) and math.isfinite(value):
            return abs(Fraction(value) - Fraction(decimal)) < unit
    return False


# Readings


@dataclass(frozen=True)
class _Reading:
    """One meaning of a text."""

    formula: Formula
    units: dict[str, int]


def _readings(text: str, is_complex: bool) -> list[_Reading]:
    """The meanings of a normalized text; none if it is not a formula."""
    found = []
    for tight, joins in product((False, True) if "/" in text else (False,), (True, False) if "," in text else (True,)):
        parser = Parser(text, is_complex, tight, joins)
        with suppress(NotAFormula):
            found.append(_Reading(parser.parse(), {unit: power for unit, power in parser.units.items() if power}))
    return found


# Comparison

_UNORDERED = frozenset({"list", "set", "union", "or"})


def _equal_readings(left: _Reading, right: _Reading) -> bool:
    has_same_units = not left.units or not right.units or left.units == right.units
    return has_same_units and _equal(left.formula, right.formula)


def _equal(left: Formula, right: Formula) -> bool:
    if isinstance(left, Relation) and isinstance(right, Relation):
        return _equal_relations(left, right)
    if isinstance(left, Relation):
        result = _result(left)
        return result is not None and _equal(result, right)
    if isinstance(right, Relation):
        # the right side of `x^2 + y^2 = 4` is not the result
        if set(right.operators) == {"="} and isinstance(right.sides[0], Expression) and not right.sides[0].name:
            return False
        result = _result(right)
        return result is not None and _equal(left, result)
    if isinstance(left, Expression) and isinstance(right, Expression):
        return _equal_values(left, right)
    left, right = (_without_signs(_without_and(side)) for side in (left, right))
    if not (isinstance(left, Collection) and isinstance(right, Collection)):
        return False
    kinds = {left.kind, right.kind}
    if (kinds <= _UNORDERED and not _needs_order(left, right)) or kinds in ({"and"}, {"and", "list"}):
        found = [[_equal(item, other) for other in right.items] for item in left.items]
        return all(map(any, found)) and (all(map(any, zip(*found, strict=True))) if found else not right.items)
    left, right = (_without_rows(side) for side in (left, right))
    kinds = {left.kind, right.kind}
    if len(left.items) != len(right.items) or not (len(kinds) == 1 or kinds == {"list", "()"}):
        return False
    lefts, rights = left.items, right.items
    if kinds == {"list", "()"}:
        lefts, rights = _by_name(lefts), _by_name(rights)
    return all(map(_equal, lefts, rights))


def _needs_order(answer: Collection, reference: Collection) -> bool:
    """Whether the reference names its values, `x = 3, y = 5`, and the answer does not."""
    return reference.kind == "list" and len(set(_names(reference.items))) > 1 and not _names(answer.items)


def _names(items: tuple[Formula, ...]) -> list[str]:
    """The names of variables that equations set."""
    firsts = [item.sides[0] for item in items if isinstance(item, Relation) and set(item.operators) == {"="}]
    return [first.name for first in firsts if isinstance(first, Expression) and first.name]


def _by_name(items: tuple[Formula, ...]) -> tuple[Formula, ...]:
    """The equations of `y = 1, x = 2` in the order of a tuple, `(2, 1)`."""
    names = _names(items)
    return (
        tuple(item for _, item in sorted(zip(names, items), key=operator.itemgetter(0)))
        if len(names) == len(items)
        else items
    )


def _without_rows(formula: Collection) -> Collection:
    """The tuple of a matrix with one column."""
    rows = [item.items for item in formula.items if isinstance(item, Collection)]
    is_column = formula.kind == "matrix" and all(len(row) == 1 for row in rows)
    return Collection("()", tuple(row[0] for row in rows)) if is_column else formula


def _without_and(formula: Formula) -> Formula:
    """The set of `x > 2 and x < 5`, if it is one of real numbers; another formula as it is."""
    if not isinstance(formula, Collection) or formula.kind != "and":
        return formula
    relations = [item for item in formula.items if isinstance(item, Relation)]
    names = {side.name for relation in relations for side in relation.sides if isinstance(side, Expression)} - {""}
    sets = [found for relation in relations if (found := _result(relation)) is not None]
    common = intersection(sets) if len(names) == 1 and len(sets) == len(relations) else None
    return formula if common is None else common


def _without_signs(formula: Formula) -> Formula:
    """The list of both values of an expression with `\\pm`."""
    if not isinstance(formula, Expression):
        return formula
    upper, lower = formula.values[:NUM_POINTS], formula.values[NUM_POINTS:]
    return formula if upper == lower else Collection("list", (Expression(upper * 2), Expression(lower * 2)))


def _equal_values(left: Expression, right: Expression) -> bool:
    halves = [(side.values[:NUM_POINTS], side.values[NUM_POINTS:]) for side in (left, right)]
    (upper, lower), (other_upper, other_lower) = halves
    return (_agree(upper, other_upper) and _agree(lower, other_lower)) or (
        _agree(upper, other_lower) and _agree(lower, other_upper)
    )


def _agree(left: tuple[Number | None, ...], right: tuple[Number | None, ...]) -> bool:
    pairs = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    return len(pairs) >= MIN_DEFINED and all(_is_close(one, other) for one, other in pairs)


def _is_close(one: Number, other: Number) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    try:
        return cmath.isclose(complex(one), complex(other), rel_tol=1e-11)
    except OverflowError:  # an exact number beyond the range of floats
        return False


def _result(relation: Relation) -> Formula | None:
    """The last side of equations, or the set of `x < 3`, `1 \\le x < 3` or `x \\ne 3`; None for another form."""
    operators, sides = relation.operators, relation.sides
    if set(operators) == {"="}:
        # `0 = x^2 + 1` is an equation, and has no result
        return None if sides[0] == _ZERO and sides[-1] != _ZERO else sides[-1]
    if set(operators) <= {">", "ge"}:
        operators = tuple({">": "<", "ge": "le"}[each] for each in reversed(operators))
        sides = tuple(reversed(sides))
    names = [isinstance(side, Expression) and bool(side.name) for side in sides]
    if operators == ("ne",) and names == [True, False]:
        return reals_without(sides[1:])
    if not set(operators) <= {"<", "le"}:
        return None
    opening = {"<": "(", "le": "["}[operators[0]]
    closing = {"<": ")", "le": "]"}[operators[-1]]
    if names == [True, False]:
        return Collection("(" + closing, (constant(-math.inf), sides[1]))
    if names == [False, True]:
        return Collection(opening + ")", (sides[0], constant(math.inf)))
    if names == [False, True, False]:
        return Collection(opening + closing, (sides[0], sides[2]))
    return None


def _equal_relations(left: Relation, right: Relation) -> bool:
    """Whether two equations or inequalities differ by a factor only; chains must have equal sides."""
    if len(left.operators) == len(right.operators) == 1:
        return _proportional(left, right)
    return any(
        left.operators == relation.operators and all(map(_equal, left.sides, relation.sides))
        for relation in (right, _reversed(right))
    )


def _reversed(relation: Relation) -> Relation:
    swapped = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
    operators = tuple(swapped.get(each, each) for each in reversed(relation.operators))
    return Relation(operators, tuple(reversed(relation.sides)))


def _proportional(left: Relation, right: Relation) -> bool:
    if left.operators[0] in (">", "ge"):
        left = _reversed(left)
    if right.operators[0] in (">", "ge"):
        right = _reversed(right)
    if left.operators != right.operators:
        return False
    if not all(isinstance(side, Expression) and not side.is_word for side in (*left.sides, *right.sides)):
        return all(map(_equal, left.sides, right.sides))
    differences = [apply(subtract, *relation.sides) for relation in (left, right)]
    if any(map(is_infinite, (value for difference in differences for value in difference.values))):
        return all(map(_equal, left.sides, right.sides))
    ratios = [ratio for ratio in apply(operator.truediv, *differences).values if ratio is not None]
    is_directed = left.operators[0] in ("<", "le")
    return (
        len(ratios) >= MIN_DEFINED
        and all(_is_close(ratio, ratios[0]) for ratio in ratios)
        and ratios[0] != 0
        and (not is_directed or (not isinstance(ratios[0], complex) and ratios[0] > 0))
    )
