"""A constant has a text, whatever it is, and the same text in every process."""

from __future__ import annotations

import pytest

from shadho_celery.space.describe import literal_text


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 2**14_000], ids=["long", "negative", "just too long"])
def test_an_int_that_python_does_not_write_in_decimals_has_a_text(value: int) -> None:
    assert int(literal_text(value), 16) == value


def test_what_has_a_name_and_no_module_is_told_by_its_type() -> None:
    assert literal_text(x for x in "ab") == "builtins.generator"
