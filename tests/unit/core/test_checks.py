"""What comes from outside is a declared record, or is refused in words that name the key and say what is wrong."""

from __future__ import annotations

import json
import re
from enum import Enum
from fractions import Fraction
from numbers import Real
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct, field
from services.cases import cases

from shadho_celery.core.checks import (
    as_record,
    check_name,
    check_seconds,
    check_whole,
    decoder,
    encoded,
    mask,
    mask_in,
    misfit_at,
    one_line,
    plain,
    printable,
    printable_json,
    short,
)
from shadho_celery.errors import UsageError


class Inner(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1, le=9)] = 1
    parts: Annotated[list[Annotated[float, Meta(gt=0)]], Meta(description="write parts = [1.0]")] = []


class Outer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    inner: Inner = Inner()
    kind: str = field(name="class", default="")

    def __post_init__(self) -> None:
        if self.name == self.kind:
            raise misfit_at("class", "it must not be the name")


class Leaf(Inner, frozen=True, kw_only=True, tag_field="kind", tag="leaf"):
    limit: Annotated[float, Meta(le=1e15)] = 1.0

    def __post_init__(self) -> None:
        if self.limit == self.size:
            raise misfit_at("limit", "it must not be the size")


def refusal(value: Any, *words: str) -> str:
    with pytest.raises(UsageError) as caught:
        as_record(value, Outer, *words)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_plain_values_that_fit_are_a_record() -> None:
    plain = {"name": "n", "inner": {"size": 2, "parts": [1, 0.5]}, "class": "c"}
    assert as_record(plain, Outer) == Outer(name="n", inner=Inner(size=2, parts=[1.0, 0.5]), kind="c")
    assert as_record({"name": "n"}, Outer) == Outer(name="n")


@cases(
    "value, message",
    [
        ({}, "name: it is missing"),
        ({"name": "n", "size": 1}, "size: there is no such key; known are name, inner, class"),
        ({"name": "n", "inner": {"sizes": 1}}, "inner.sizes: there is no such key"),
        ({"name": "n", "inner": {"size": 0}}, "inner.size: 0 is not allowed; it must be at least 1"),
        ({"name": "n", "inner": {"size": 10}}, "inner.size: 10 is not allowed; it must be at most 9"),
        ({"name": "n", "inner": {"size": 1.5}}, "inner.size: 1.5 is not a whole number"),
        ({"name": "n", "inner": {"size": True}}, "inner.size: True is not a whole number"),
        ({"name": "n", "inner": {"parts": [1, -2.5]}}, "inner.parts.1: -2.5 is not allowed; it must be above 0"),
        ({"name": "n", "inner": {"parts": [1, "x"]}}, "inner.parts.1: 'x' is not a number"),
        ({"name": "n", "inner": {"parts": {}}}, "inner.parts: this is not a list but a table"),
        ({"name": "n", "inner": 5}, "inner: this is not a table but a number"),
        ({"name": "n", "class": "n"}, "class: 'n' is not allowed; it must not be the name"),
    ],
)
def test_what_does_not_fit_is_refused_naming_the_key_and_what_is_wrong(value: Any, message: str) -> None:
    assert refusal(value).startswith(message)


def test_the_key_is_named_under_where_it_stands_and_with_what_would_be_right() -> None:
    assert refusal({}, "families.net", "--example shows the form") == (
        "families.net.name: it is missing; --example shows the form"
    )
    assert refusal([], "top", "give a dict") == "top: this is not a table but a list; give a dict"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"parts": 5}, "parts: this is not a list but a number; write parts = [1.0]; see the form"),
        ({"parts": [0]}, "parts.0: 0 is not allowed; it must be above 0; write parts = [1.0]; see the form"),
        (
            {"part": 5},
            "part: there is no such key; did you mean parts? known are kind, size, parts, limit; see the form",
        ),
        ({"limit": 1}, "limit: 1 is not allowed; it must not be the size; see the form"),
        ({"limit": 10**300}, "limit: 1e+300 is not allowed; it must be at most 1e+15; see the form"),
        ({"limit": 10**400}, f"limit: 1{'0' * 59}... is more than a float can hold; see the form"),
        ({"size": 10**300}, "size: 1e+300 is not allowed; it must be at most 9; see the form"),
    ],
)
def test_a_refusal_has_the_cause_and_the_fields_own_remedy(value: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        as_record(value, Leaf, form="see the form")
    assert str(caught.value) == message


class Key(str, Enum):
    NAME = "name"


class Unconvertible:
    """Counts as a number, and is none."""

    def __float__(self) -> float:
        raise RuntimeError("no")


Real.register(Unconvertible)


def test_a_key_may_be_a_text_of_numpys_or_of_an_enum() -> None:
    assert as_record({np.str_("name"): "n"}, Outer) == as_record({Key.NAME: "n"}, Outer) == Outer(name="n")


def test_plain_values_within_themselves_or_too_deep_are_cut_off() -> None:
    within: dict[str, Any] = {}
    within["all"] = within
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    for value in (within, deep):
        assert len(repr(plain(value))) < 200
        assert refusal({"name": "n", "inner": {"size": value}}).startswith("inner.size: ")


@pytest.mark.parametrize("value", [Fraction(10**400), Unconvertible()], ids=["fraction", "raises"])
def test_a_number_that_no_float_can_be_made_of_is_refused(value: Any) -> None:
    assert refusal({"name": "n", "inner": {"parts": [value]}}).startswith("inner.parts.0: ")


def test_a_key_that_is_no_text_is_named_with_its_escapes() -> None:
    assert refusal({"name": "n", "\ud800": 1}).startswith("\\ud800: there is no such key; known are name")


def test_a_name_that_is_no_text_is_refused_as_an_unknown_one() -> None:
    with pytest.raises(UsageError, match=r"^there is no sampler \['tpe'\]; choose one of random, tpe$"):
        check_name("sampler", ["tpe"], {"random": 1, "tpe": 2})


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    check_name("policy", "cost", ("cost", "fifo"))
    with pytest.raises(UsageError, match=r"^there is no policy 'best'; choose one of cost, fifo$"):
        check_name("policy", "best", ("cost", "fifo"))
    with pytest.raises(UsageError, match=r"^there is no policy 'cots'; did you mean cost\? choose one of cost, fifo$"):
        check_name("policy", "cots", ("cost", "fifo"))


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    ["x" * 5000, ["a\nb"] * 1000, 10**400, 10**5000, Unprintable(), ValueError("a\n\nb" * 900), {1: {2: {}}}],
    ids=["long", "lines", "digits", "too many digits", "unprintable", "error", "nested"],
)
def test_any_value_is_shown_in_one_short_line(value: Any) -> None:
    shown = short(value, 60)
    assert len(shown) <= 60 + len("...")
    assert "\n" not in shown
    assert len(short(value)) <= 200 + len("...")


def test_a_short_value_is_shown_as_it_is() -> None:
    assert [short(value) for value in ("a", 1.5, [1, "b"], None)] == ["'a'", "1.5", "[1, 'b']", "None"]
    assert short(ValueError("its message")) == "its message"


def test_text_of_several_lines_becomes_one_that_is_cut_off() -> None:
    assert one_line("a \n  b\tc") == "a b c"
    assert one_line("abcdefgh", 6) == "abc..."
    assert one_line("abcdef", 6) == "abcdef"
    assert one_line(ValueError("a\nb")) == "a b"


# Passwords

#: where a password may stand, and all that may be shown of such a URL, whatever the password is
PLACES = {
    "redis://:PASSWORD@host:6379/0": {"redis://:***@host:6379/0", "redis://:***"},
    "https://PASSWORD@host/path": {"https://***@host/path", "https://***"},
    "amqp://me:PASSWORD@host/vhost": {"amqp://me:***@host/vhost", "amqp://me:***"},
    "redis://host:6379/0?password=PASSWORD": {"redis://host:6379/0?password=***", "redis://host:***"},
    "redis://host/0?db=1&password=PASSWORD&ssl=1": {"redis://host/0?db=1&password=***"},
    "postgresql://me@host/db?password=PASSWORD": {"postgresql://me@host/db?password=***"},
    "unix:///run/redis.sock?password=PASSWORD": {"unix:///run/redis.sock?password=***"},
    "amqp://a:PASSWORD@one//;amqp://b:PASSWORD@two//": {"amqp://a:***@two//", "amqp://a:***"},
    "redis://h:1/0?password=PASSWORD;redis://h:2/0?password=PASSWORD": {"redis://h:1/0?password=***", "redis://h:***"},
}
PRINTABLE = "".join(map(chr, range(32, 127)))
PASSWORDS = st.lists(
    st.text(PRINTABLE, min_size=1, max_size=6)
    | st.sampled_from(["@", ":", "://", ";", ";amqp://", "?password=", "&password=", "/", "#", "%40", "pass", "***"])
).map("".join)


@pytest.mark.parametrize("place", PLACES)
@given(password=PASSWORDS)
def test_what_is_shown_of_a_url_does_not_depend_on_the_characters_of_its_password(place: str, password: str) -> None:
    assert mask(place.replace("PASSWORD", password)) in PLACES[place]


@pytest.mark.parametrize("place", PLACES)
def test_a_password_may_have_any_printable_character(place: str) -> None:
    for character in PRINTABLE:
        password = f"s3{character}cr3t"
        url = place.replace("PASSWORD", password)
        assert mask(url) in PLACES[place]
        # A driver may have taken a part of it for the port or for the host.
        for text in (url, f"no integer value: {password!r}", re.split(r"\W", password)[-1] + ":1 refuses"):
            assert "cr3t" not in mask_in(text, url)
        assert mask_in("Error 111: Connection refused.", url) == "Error 111: Connection refused."


STRANGE = "\x1b]0;title\x07\x1b[2J\x9b31m\x85\r\b\u202egpj.exe\u2066\u2028\ud800\U000e0041\x7f"


def test_a_text_is_printable_and_nothing_of_it_is_lost() -> None:
    """C0, C1, marks of direction, tags and halves of pairs are escapes; lines, tabs and joined emojis stay."""
    assert (
        printable("a line\n\tand a tab, Ünïcode 漢字 👩‍👩‍👧 می‌خواهم")
        == "a line\n\tand a tab, Ünïcode 漢字 👩‍👩‍👧 می‌خواهم"
    )
    assert printable(STRANGE).isascii()
    assert printable(STRANGE).isprintable()
    assert printable("\x1b[31m") == "\\x1b[31m"
    assert printable("\u202e\x9b") == "\\u202e\\x9b"
    assert one_line(ValueError(STRANGE), 1000).isprintable()
    assert short(ValueError(STRANGE)).isprintable()


class Told(Struct, frozen=True, omit_defaults=True):
    value: Any = None
    other: float | None = None


@cases("value", [0.1, 2**60, float("inf"), None, "null", "größe\u2028\0\n", "a\ud800b", {"a": [None, float("-inf")]}])
def test_a_record_is_read_as_it_was_encoded_in_one_line(value: Any) -> None:
    text = encoded(Told(value))
    assert decoder(Told)(text) == Told(value)
    assert b"\n" not in text


def test_a_number_that_is_none_does_not_become_null() -> None:
    assert encoded(Told(other=float("nan"))) == b'{"other": NaN}'


def test_json_is_printable_and_has_the_same_values() -> None:
    text = printable_json(json.dumps({"a": STRANGE}, ensure_ascii=False))
    assert text.isprintable()
    assert json.loads(text) == {"a": STRANGE}


@cases(
    ("bounds", "value", "says"),
    [
        ((), 1.0, "n is 1.0; give a whole number, or None"),
        ((1,), True, "n is True; give a whole number from 1 up, or None"),
        ((1,), 0, "n is 0; give a whole number from 1 up, or None"),
        ((0, 3), 4, "n is 4; give a whole number from 0 to 3, or None"),
    ],
)
def test_a_number_that_is_not_whole_or_out_of_its_bounds_is_refused_with_them(
    bounds: tuple[int, ...], value: object, says: str
) -> None:
    check_whole(*bounds, fits=3, absent=None)
    with pytest.raises(UsageError, match=f"^{re.escape(says)}$"):
        check_whole(*bounds, other="or None", n=value)


def test_seconds_are_above_0_and_such_as_timers_take() -> None:
    check_seconds(short=0.001, long=1e8, none=None)
    for value in (0, -1.0, 1e9, float("inf"), float("nan")):
        with pytest.raises(UsageError, match=re.escape(f"wait is {value!r}; give a number of seconds above 0")):
            check_seconds(wait=value)
