"""Failures that differ in nothing but their words are of one kind; one line and one place tell most of an error."""

from __future__ import annotations

import pytest

from shadho_celery.core.failures import headline, kind_of, read_failure
from shadho_celery.objective.call import call
from shadho_celery.objective.context import LocalContext

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
            "the trial's process ended with exit code 3",
        ),
        ("", "no reason given"),
        (None, "no reason given"),
    ],
)
def test_of_a_traceback_the_exception_tells_most_and_of_other_errors_the_first_line(
    error: str | None, line: str
) -> None:
    assert headline(error) == line


def test_of_a_message_of_several_lines_the_first_is_shown() -> None:
    error = TRACE.format(folder="/a", line=3, error="ValueError: x is 0.5") + "  it must not be\nsee the manual"
    assert headline(error) == "ValueError: x is 0.5"


@pytest.mark.parametrize("folder", ["/home/me", "/home/me/shadho_celery", "C:\\study"])
@pytest.mark.parametrize(
    "library",
    ["/usr/lib/python3.11/json/decoder.py", "/x/.venv/lib/python3.12/site-packages/a.py", "<frozen importlib>"],
)
def test_the_place_is_the_innermost_line_of_the_users_own_code(folder: str, library: str) -> None:
    inner = f'  File "{library}", line 9, in call\n    raise ValueError\nValueError: no'
    error = TRACE.format(folder=folder, line=3, error="ValueError: no").replace("ValueError: no", inner, 1)
    assert str(read_failure(error)) == "ValueError: no (study.py:3)"


def test_of_a_chain_of_exceptions_the_last_one_is_told() -> None:
    first, second = (TRACE.format(folder="/a", line=n, error=e) for n, e in ((3, "KeyError: 'x'"), (5, "OSError: y")))
    both = f"{first}\nThe above exception was the direct cause of the following exception:\n\n{second}"
    assert str(read_failure(both)) == "OSError: y (study.py:5)"


def test_the_error_of_a_real_call_names_the_line_of_the_objective() -> None:
    def objective(params: object) -> float:
        raise ValueError("first\nsecond")

    failure = read_failure(call(objective, dict, LocalContext()).error)
    assert failure.headline == "ValueError: first"
    assert failure.place.startswith("test_failures.py:")


def test_of_an_exception_group_the_group_is_told() -> None:
    error = """  + Exception Group Traceback (most recent call last):
  |   File "/a/study.py", line 3, in objective
  |     raise ExceptionGroup("several", [ValueError("a")])
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: a
    +------------------------------------"""
    assert str(read_failure(error)) == "ExceptionGroup: several (1 sub-exception) (study.py:3)"


def test_a_long_traceback_whose_beginning_was_cut_off_is_one_all_the_same() -> None:
    error = TRACE.format(folder="/a", line=3, error="ValueError: x")
    assert str(read_failure("..." + error[60:])) == "ValueError: x (study.py:3)"
