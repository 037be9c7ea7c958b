"""Failures of one kind differ in nothing but values; one line and one place tell most of an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from services.cases import cases

import shadho_celery
from shadho_celery.core.failures import Failure, headline, read_failure
from shadho_celery.objective.call import call
from shadho_celery.objective.context import LocalContext

TRACE = """Traceback (most recent call last):
  File "{folder}/shadho_celery/objective/call.py", line 107, in call
    returned = objective(params)
  File "{folder}/study.py", line {line}, in objective
    raise {error}
{error}
"""


def traced(error: str, line: int = 3, folder: str = "/home/a") -> Failure:
    return read_failure(TRACE.format(folder=folder, line=line, error=error))


def test_a_cause_is_the_exception_and_the_place_and_neither_the_folder_nor_the_words() -> None:
    one = traced("ValueError: x is 0.5").cause
    assert one == traced("ValueError: nothing is known", folder="/mnt/b").cause
    assert one != traced("ValueError: x is 0.5", line=4).cause
    assert one != traced("KeyError: 'x'").cause
    assert read_failure("'loss' is nan").cause == read_failure("'other' is nan").cause
    assert read_failure("exit code 3").cause == read_failure("exit code 4").cause
    assert read_failure(None).cause == read_failure("").cause == "no reason"


@cases(
    ("one", "other"),
    [
        ("ValueError: x is 0.5", "ValueError: x is -1e-05"),
        ("ValueError: shape (3, 4), not [[1. 2.], [3. 4.5]]", "ValueError: shape (3, 4, 5), not [[1.]]"),
        ("KeyError: 'lr'", "KeyError: 'decay'"),
        ("OSError: can't open 'a.csv'", "OSError: can't open 'folder/b.csv'"),
        ("ValueError: loss is nan", "ValueError: loss is -inf"),
        ("TypeError: <A object at 0x7f01>, got None", "TypeError: <A object at 0x7f9c>, got 7.0"),
        ("TypeError: {'a': 1, 'b': [2]} is too long", "TypeError: {'c': 1} is too long"),
    ],
)
def test_failures_of_a_kind_differ_in_values_only_and_their_shared_text_has_none(one: str, other: str) -> None:
    first, second = traced(one), traced(other)
    assert first.kind == second.kind == str(first.shared(second)) == str(second.shared(first))
    assert "…" in first.kind
    assert str(first.shared(first)) == str(first), "equal values are shown"


@cases(
    ("one", "other"),
    [
        ("TypeError: SVC() got an argument 'x'", "TypeError: RandomForestClassifier() got an argument 'x'"),
        ("ValueError: the batch is too large", "ValueError: the batch is too small"),
        ("ValueError: 1", "KeyError: 1"),
    ],
)
def test_messages_that_differ_in_words_are_of_two_kinds(one: str, other: str) -> None:
    assert traced(one).kind != traced(other).kind
    assert traced(one, line=5).kind != traced(one).kind


def test_what_failures_of_one_cause_share_is_the_exception_and_the_line() -> None:
    one, other = traced("TypeError: SVC() got 1"), traced("TypeError: Forest() got 1")
    assert one.cause == other.cause
    assert str(one.shared(other)) == "TypeError (study.py:3)"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TRACE.format(folder="/a", line=3, error="ValueError: x is 0.5"), "ValueError: x is 0.5"),
        (
            "the command ended with exit code 2; it last printed:\nusage: t.py\nt.py: error: \x1b[1mno --lr\n",
            "the command ended with exit code 2: t.py: error: \\x1b[1mno --lr",
        ),
        (
            "the trial's process was killed by signal 9; it last printed:\nsome words",
            "the trial's process was killed by signal 9",
        ),
        ("", "no reason given"),
        (None, "no reason given"),
    ],
)
def test_of_a_traceback_the_exception_tells_most_and_of_other_errors_the_first_line(
    error: str | None, line: str
) -> None:
    assert headline(error) == line


def test_the_last_line_of_a_command_tells_apart_failures_of_one_cause() -> None:
    one, same, other = (f"the command ended with exit code 2; it last printed:\nno {each}" for each in ("3", "4", "x"))
    assert read_failure(one).kind == read_failure(same).kind != read_failure(other).kind
    assert read_failure(one).cause == read_failure(other).cause == "the command ended with exit code …"


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


@pytest.mark.parametrize(
    "module", ["objective/call", "ranks/launch", "runner/child", "scheduler/executors", "simulation/executor"]
)
def test_a_line_of_a_module_that_calls_the_users_code_is_not_the_users(module: str) -> None:
    path = Path(shadho_celery.__file__).with_name(module.partition("/")[0]) / f"{module.partition('/')[2]}.py"
    assert path.exists()
    error = TRACE.format(folder="/a", line=3, error="ValueError: no").replace("/a/study.py", f"/a/{path}")
    assert str(read_failure(error)) == "ValueError: no"


def test_of_a_chain_of_exceptions_the_last_one_is_told() -> None:
    first, second = (TRACE.format(folder="/a", line=n, error=e) for n, e in ((3, "KeyError: 'x'"), (5, "OSError: y")))
    both = f"{first}\nThe above exception was the direct cause of the following exception:\n\n{second}"
    assert str(read_failure(both)) == "OSError: y (study.py:5)"


def test_the_error_of_a_real_call_names_the_line_of_the_objective() -> None:
    def objective(params: object) -> float:
        raise ValueError("first\nsecond")

    failure = read_failure(call(objective, dict, LocalContext()).error)
    assert failure.headline == "ValueError: first"
    assert failure.location.startswith("test_failures.py:")


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
