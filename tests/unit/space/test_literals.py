"""A constant has a text that is the same in every process, and others that have a value or a name have other texts."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import math
import operator
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from shadho_celery.space.literals import literal_text


@dataclasses.dataclass
class Config:
    rate: float


class Level(enum.Flag):
    LOW = 1
    HIGH = 2


Point = collections.namedtuple("Point", "x y")


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Named({self.name})"

    def method(self) -> None:
        pass


class Tone(enum.Enum):
    HIGH = "high"
    LOW = "low"


class Lines:
    """An object whose repr has several lines, as those of torch's modules and scikit-learn's pipelines."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __repr__(self) -> str:
        return "\n".join(["Lines(", *(f"  {part!r}," for part in self._parts), ")"])


class Bare:
    """An object whose repr has its address."""

    def __init__(self, size: Any) -> None:
        self.size = size


def scaled(by: Any) -> Callable[[float], float]:
    def scale(x: float) -> float:
        return float(x * by)

    return scale


#: each is another value
VALUES: list[list[Any]] = [
    [1, True, 1.0, "1", b"1", np.int64(1), np.int32(1), np.float32(1), np.bool_(True), 1 + 0j, Fraction(1), Decimal(1)],
    [Decimal("1.0"), Decimal("1.00")],
    [0.0, -0.0, 0, False, None, "None", "", math.nan, np.float64(0.0), np.longdouble(0)],
    [np.float32(0.1), np.float64(0.1), 0.1, np.longdouble(1) / 3, np.longdouble(1) / 7],
    [(), [], {}, set(), frozenset(), "()", (1,), [1], {1}, frozenset({1}), ([1],), ((1,),)],
    [{"a": 1}, collections.OrderedDict(a=1), {"a": 1.0}, {1: "a"}],
    [Point(1, 2), Point(1, 3), (1, 2)],
    [Path("a"), Path("b"), PurePosixPath("a"), "a", Path("{a}"), Path("{b}"), Path("0x12345"), Path("0x12346")],
    [
        datetime.date(2020, 1, 1),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
        datetime.timedelta(1),
        datetime.timedelta(2),
    ],
    [
        uuid.UUID(int=1),
        uuid.UUID(int=2),
        range(3),
        range(4),
        slice(1),
        slice(2),
        re.compile("a{1}"),
        re.compile("a{2}"),
    ],
    [np.array([1, 2]), np.array([2, 1]), np.array([1.0, 2.0]), np.array([[1, 2]]), np.array(["1", None], object)],
    [np.array([0.0]), np.array([-0.0]), np.array([math.nan]), np.array(["a"]), np.array([1], "M8[s]")],
    [Level.LOW, Level.HIGH, Level.LOW | Level.HIGH, Tone.LOW, Tone.HIGH, Config(1), Config(2)],
    [Lines(1), Lines(2), Lines("a  b"), Lines("a b"), Lines({})],
    [Lines({"a": 1, "b": 2}), Lines({"a": 1, "b": 3}), Lines(Lines(1), 2), Lines(Lines(2), 2)],
    [Named("a"), Named("b"), Named("a").method, Named],
    [len, max, math.sqrt, np.tanh, np.sin, str.upper, list, list[int], dict[str, int]],
    [operator.itemgetter(1), operator.itemgetter(2), np.dtype("float32"), np.dtype("float64")],
    [functools.partial(max, 1), functools.partial(max, 2), functools.partial(min, 1), functools.partial(max, key=len)],
    [functools.partial(max, [1]), functools.partial(max, (1,)), functools.partial(max, 1, key=len)],
    [scaled, scaled(1), lambda x: x, functools.partial(scaled(1), 2), functools.partial(scaled(1), 3)],
]


@pytest.mark.parametrize("values", VALUES)
def test_two_different_values_have_different_texts(values: list[Any]) -> None:
    for one, other in combinations(values, 2):
        assert literal_text(one) != literal_text(other)


def test_a_text_is_the_same_in_every_process() -> None:
    script = "from tests.unit.space.test_literals import *; print([*map(literal_text, [y for x in VALUES for y in x])])"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    "members",
    [
        {1},
        {"a", "b"},
        frozenset({1}),
        {(1, "a")},
        {Tone.HIGH, Tone.LOW},
        {"a": {Tone.HIGH, Tone.LOW}},
        {1: [{Tone.LOW}]},
    ],
)
def test_the_order_of_a_set_within_an_object_is_no_part_of_its_text(members: Any) -> None:
    """The hash of an enum's member is that of its name."""
    assert literal_text(Lines(members)) == literal_text(Lines({0}))
    assert literal_text(Lines({"a": "{1}", 2: {}, "b": {3: Decimal(1)}})) != literal_text(Lines({0}))


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 2**14_000], ids=["long", "negative", "just too long"])
def test_an_int_that_python_does_not_write_in_decimals_has_a_text(value: int) -> None:
    assert int(literal_text(value), 16) == value


def test_what_has_neither_a_name_nor_a_value_is_told_by_its_type() -> None:
    assert literal_text(x for x in "ab") == "builtins.generator object"
    assert literal_text(Bare(1)) == literal_text(Bare(2)) == f"{__name__}.Bare object"
    recursive: list[Any] = []
    recursive.append(recursive)
    assert literal_text(recursive)


def test_a_function_within_a_function_and_a_lambda_are_told_by_their_names() -> None:
    assert literal_text(scaled(1)) == literal_text(scaled(2)) == f"{__name__}.scaled.<locals>.scale"
    assert literal_text(lambda x: x).endswith("<lambda>")
