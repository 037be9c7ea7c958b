"""Params of a family of simulated trials: their distributions, and expressions that compute a time from them.

An expression such as ``20 + 400 * width`` is arithmetic only, never Python's `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from hyperopt import hp
from msgspec import Meta, Struct

from shadho_celery.core.checks import misfit_at

#: a param's value, or the value of an expression
Value = float | str

#: maximum absolute value of a distribution's bounds
LARGEST = 1e15

L = TypeVar("L", bound=Struct)
_End = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_Whole = Annotated[int, Meta(ge=-(2**31), le=2**31)]


class Param(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag=str.lower):
    """Distribution of one param. The class's name in lower case is the value of `law` in the file."""

    def node(self, label: str) -> Any:
        """Return the node of hyperopt for the distribution."""
        raise NotImplementedError

    def quantile(self, mass: float) -> Value:
        """Return the quantile at `mass`, from 0 to 1, as the value that expressions see."""
        raise NotImplementedError

    def value(self, drawn: float) -> Value:
        """Convert a trial's raw draw to the value that expressions see."""
        return drawn


class Uniform(Param, frozen=True, kw_only=True):
    """Uniform distribution of a number between two bounds."""

    low: _End
    high: _End

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise misfit_at("high", "it must be above low")

    def node(self, label: str) -> Any:
        return hp.uniform(label, self.low, self.high)

    def quantile(self, mass: float) -> Value:
        return self.low + mass * (self.high - self.low)


class LogUniform(Uniform, frozen=True, kw_only=True):
    """Log-uniform distribution between two bounds above 0. In hyperopt, the bounds are their logarithms."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low > 0:
            raise misfit_at("low", "it must be above 0: the ends are values, not logarithms as in hyperopt")

    def node(self, label: str) -> Any:
        return hp.loguniform(label, math.log(self.low), math.log(self.high))

    def quantile(self, mass: float) -> Value:
        return float(self.low * (self.high / self.low) ** mass)


class Integer(Param, frozen=True, kw_only=True):
    """Uniform distribution of a whole number from `low` to `high`, both included."""

    low: _Whole
    high: _Whole

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise misfit_at("high", "it must be at least low")

    def node(self, label: str) -> Any:
        return hp.randint(label, self.low, self.high + 1)

    def quantile(self, mass: float) -> Value:
        return min(self.low + int(mass * (self.high + 1 - self.low)), self.high)


class Choice(Param, frozen=True, kw_only=True):
    """Uniform choice of one of the options, which are texts or numbers."""

    options: Annotated[list[str | float], Meta(min_length=1, max_length=1000, description='write options = ["a", "b"]')]

    def node(self, label: str) -> Any:
        return hp.choice(label, self.options)

    def quantile(self, mass: float) -> Value:
        return self.options[min(int(mass * len(self.options)), len(self.options) - 1)]

    def value(self, drawn: float) -> Value:
        return self.options[int(drawn)]


def by_name(*laws: type[L]) -> Mapping[str, type[L]]:
    """Return classes of distributions, by their names in the file (`law`)."""
    return {str(law.__struct_config__.tag): law for law in laws}


PARAMS = by_name(Uniform, LogUniform, Integer, Choice)

#: compiled part of an expression: returns its value for the params
Part = Callable[[Mapping[str, Value]], Value]

_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Value, Value], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "abs": abs,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sqrt": math.sqrt,
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
}
#: maximum length and nesting of an expression; for greater ones, Python's own parser fails in unexpected ways
MOST_CHARACTERS, MOST_DEPTH = 2000, 150


class Expression:
    """An arithmetic expression of named params. It is checked and compiled once, and then computed for each trial."""

    def __init__(self, text: str, names: Iterable[str]) -> None:
        """Compile `text`, an expression of the params called `names`.

        Raises ValueError for another name, or for syntax that is not allowed.
        """
        self.text = text
        self._names = frozenset(names)
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, RecursionError, MemoryError, ValueError):
            raise ValueError("it is not an expression") from None
        try:
            self._compute = self._compiled(tree.body, 0)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[type[Expression], tuple[str, frozenset[str]]]:
        # Compiled parts cannot be pickled, so another process compiles them again.
        return Expression, (self.text, self._names)

    def __call__(self, params: Mapping[str, Value]) -> float:
        """Return the expression's value for the params of a trial. Raises ValueError if it is not a finite number."""
        try:
            value = self._compute(params)
            number = value if isinstance(value, str) else float(value)
        except (ArithmeticError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"it cannot be computed for {dict(params)}: {error}") from None
        if isinstance(number, str) or not math.isfinite(number):
            raise ValueError(f"it gives {number} for {dict(params)}")
        return number

    def _compiled(self, node: ast.expr, depth: int) -> Part:
        if depth > MOST_DEPTH:
            raise ValueError("it is nested too deeply")
        below = depth + 1
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return lambda params: value
            case ast.Name(id=name) if name in self._names:
                return lambda params: params[name]
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
                sign, signed = (1 if isinstance(op, ast.UAdd) else -1), self._compiled(operand, below)
                return lambda params: sign * _number(signed(params))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._binary(_BINARY[type(op)], self._compiled(left, below), self._compiled(right, below))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                compare, first, second = (
                    _COMPARISONS[type(op)],
                    self._compiled(left, below),
                    self._compiled(right, below),
                )
                return lambda params: compare(first(params), second(params))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                asked, yes, no = (self._compiled(part, below) for part in (test, body, orelse))
                return lambda params: yes(params) if asked(params) else no(params)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                function, parts = FUNCTIONS[name], [self._compiled(part, below) for part in args]
                return lambda params: function(*(_number(part(params)) for part in parts))
            case ast.Subscript(value=ast.Dict(keys=keys, values=values), slice=key):
                return self._lookup(keys, values, self._compiled(key, below), below)
        raise ValueError(self._refusal(node))

    @staticmethod
    def _binary(function: Callable[[float, float], float], left: Part, right: Part) -> Part:
        return lambda params: function(_number(left(params)), _number(right(params)))

    def _lookup(self, keys: list[ast.expr | None], values: list[ast.expr], key: Part, depth: int) -> Part:
        table: dict[Value, Part] = {}
        for name, value in zip(keys, values, strict=True):
            if not isinstance(name, ast.Constant) or not isinstance(name.value, (str, int, float)):
                raise ValueError("the keys of a table must be texts or numbers")
            table[name.value] = self._compiled(value, depth)
        return lambda params: table[key(params)](params)

    def _refusal(self, node: ast.expr) -> str:
        known = f"the params {', '.join(sorted(self._names))}" if self._names else "no params: the family has none"
        if isinstance(node, ast.Name):
            return f"there is no param {node.id!r}; there are {known}"
        return (
            f"{ast.unparse(node)[:60]!r} is not allowed; use {known}, numbers, + - * / // % **, comparisons, "
            f"a if b else c, {{'key': 1}}[param], and {', '.join(FUNCTIONS)}"
        )


def _number(value: Value) -> float:
    if isinstance(value, str):
        raise TypeError(f"{value!r} is not a number")
    return value
