"""Failures that differ in nothing but their words are of one kind, and one line tells most of an error."""

from __future__ import annotations

import pytest

from shadho_celery.core.failures import headline, kind_of

TRACE = """Traceback (most recent call last):
  File "{folder}/shadho_celery/objective/call.py", line 107, in call
    returned = objective(params)
  File "{folder}/study.py", line {line}, in objective
    raise {error}
{error}
"""


def test_a_kind_is_the_exception_and_the_place_and_neither_the_folder_nor_the_words() -> None:
    one = kind_of(TRACE.format(folder="/home/a", line=3, error="ValueError: x is 0.5"))
    assert one == kind_of(TRACE.format(folder="/mnt/b", line=3, error="ValueError: x is 0.7"))
    assert one != kind_of(TRACE.format(folder="/home/a", line=4, error="ValueError: x is 0.5"))
    assert one != kind_of(TRACE.format(folder="/home/a", line=3, error="KeyError: 'x'"))
    assert kind_of("'loss' is nan") == kind_of("'other' is nan")
    assert kind_of("exit code 3") == kind_of("exit code 4")
    assert kind_of(None) == kind_of("") == "no reason"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TRACE.format(folder="/a", line=3, error="ValueError: x is 0.5"), "ValueError: x is 0.5"),
        (
            "the trial's process ended with exit code 3; it last printed:\nsome words",
            "the trial's process ended with exit code 3; it last printed:",
        ),
        ("", "no reason given"),
        (None, "no reason given"),
    ],
)
def test_of_a_traceback_the_last_line_tells_most_and_of_other_errors_the_first(error: str | None, line: str) -> None:
    assert headline(error) == line
