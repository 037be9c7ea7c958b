"""Whatever an objective does or returns short of ending the process is an outcome."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shadho_celery.clock import ManualClock
from shadho_celery.context import MAX_ERROR, LocalContext, Outcome, call, read, wants_context
from shadho_celery.trial import TrialState

HUGE = 10**400


class Tensor:
    """Stands in for a torch tensor: a number that `item` gives, with `size` a method."""

    def __repr__(self) -> str:
        return f"Tensor({self._number})"

    def __init__(self, number: Any, ndim: int = 0) -> None:
        self._number = number
        self.ndim = ndim

    def size(self) -> tuple[int, ...]:
        return (1,) * self.ndim

    def item(self) -> Any:
        return self._number


# Reading what came back


@pytest.mark.parametrize(
    ("returned", "loss"),
    [
        (0.25, 0.25),
        (-0.0, 0.0),
        (3, 3.0),
        (2**60, float(2**60)),
        (True, 1.0),
        (False, 0.0),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int8(-3), -3.0),
        (np.uint64(2**63), float(2**63)),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array(7), 7.0),
        (Decimal("0.125"), 0.125),
        (Fraction(1, 4), 0.25),
        (Tensor(0.5), 0.5),
        (Tensor(3), 3.0),
        (5e-324, 5e-324),
        (1.7e308, 1.7e308),
    ],
    ids=repr,
)
def test_every_kind_of_number_is_a_loss(returned: Any, loss: float) -> None:
    for value in (returned, {"loss": returned}, OrderedDict(status="ok", loss=returned)):
        found, _ = read(value)
        assert type(found) is float
        assert found == loss


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        math.inf,
        -math.inf,
        np.float64("nan"),
        np.float32("inf"),
        np.array(np.nan),
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("Infinity"),
        Tensor(math.nan),
        None,
        "0.5",
        b"0.5",
        0.5 + 0j,
        np.complex128(0.5),
        [0.5],
        (0.5,),
        {0.5},
        np.array([0.5]),
        np.array([0.5, 0.6]),
        np.array([]),
        np.array("text"),
        np.array(None),
        Tensor(0.5, ndim=1),
        HUGE,
        -HUGE,
        10**5000,
        Decimal("1e400"),
        Fraction(HUGE),
        object(),
        lambda: 0.5,
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_what_is_no_finite_number_is_refused_by_name(returned: Any) -> None:
    with pytest.raises(ValueError, match="return value"):
        read(returned)
    with pytest.raises(ValueError, match="'loss'"):
        read({"loss": returned})


def test_a_message_about_a_bad_loss_stays_short() -> None:
    for returned in (HUGE, "x" * 10_000, np.zeros(100_000)):
        with pytest.raises(ValueError, match="the objective") as caught:
            read(returned)
        assert len(str(caught.value)) < 400


def test_a_dict_without_a_loss_is_refused_naming_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"without 'loss'.*'accuracy'"):
        read({"accuracy": 0.9})
    with pytest.raises(ValueError, match="without 'loss'"):
        read({})


def test_hyperopts_status_fail_is_a_failure_even_beside_a_loss() -> None:
    with pytest.raises(ValueError, match="status 'fail'"):
        read({"status": "fail", "loss": 0.1})
    assert read({"status": "ok", "loss": 0.1}) == (0.1, {"status": "ok"})


def test_what_json_can_carry_is_kept_beside_the_loss_and_the_rest_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    loss, metrics = read(
        {
            "loss": 1.0,
            "accuracy": 0.9,
            "nested": {"a": [1, None, True, "ü"]},
            7: "seven",
            "model": object(),
            "cyclic": cyclic,
            "deep": deep,
            "nan": math.nan,
            "function": print,
            "bytes": b"x",
            "complex": 1j,
            "keys": {(1, 2): 3},
            "longer than Python prints": 10**5000,
        }
    )
    assert loss == 1.0
    assert metrics == {"accuracy": 0.9, "nested": {"a": [1, None, True, "ü"]}, "7": "seven"}
    json.dumps(metrics, allow_nan=False)
    for dropped in ("model", "cyclic", "deep", "nan", "function", "bytes", "complex", "keys", "longer"):
        assert dropped in caplog.text


@pytest.mark.parametrize(
    ("value", "kept"),
    [(np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (np.array(2.5), 2.5), (Tensor(0.25), 0.25)],
    ids=repr,
)
def test_a_numpy_number_is_a_metric_like_any_other(value: Any, kept: Any) -> None:
    _, metrics = read({"loss": 1.0, "metric": value})
    assert metrics == {"metric": kept}
    assert type(metrics["metric"]) is type(kept)


# Calling


def call_it(objective: Callable[..., Any], params: Any = 0.5, **options: Any) -> Outcome:
    return call(objective, lambda: params, LocalContext(**options), ManualClock())


def raising(error: BaseException) -> Callable[[Any], Any]:
    def objective(params: Any) -> Any:
        raise error

    return objective


def test_a_loss_is_a_complete_outcome() -> None:
    outcome = call_it(lambda params: {"loss": params, "extra": [1]})
    assert (outcome.state, outcome.loss, outcome.metrics, outcome.error) == (
        TrialState.COMPLETE,
        0.5,
        {"extra": [1]},
        None,
    )


def test_the_memory_is_for_others_to_measure() -> None:
    assert call_it(lambda params: 0.0).memory is None


def test_a_bad_return_value_is_a_failed_outcome_in_one_line() -> None:
    outcome = call_it(lambda params: None)
    assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
    assert outcome.error == "the objective's return value is no number but NoneType: None"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        MemoryError(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        StopIteration(),
        AssertionError("bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_is_a_failed_outcome_with_its_traceback(error: BaseException) -> None:
    outcome = call_it(raising(error))
    assert (outcome.state, outcome.loss, outcome.metrics) == (TrialState.FAILED, None, {})
    assert "Traceback" in str(outcome.error)
    assert type(error).__name__ in str(outcome.error)
    assert "raise error" in str(outcome.error)


def test_endless_recursion_is_a_failed_outcome() -> None:
    def objective(params: Any) -> Any:
        return objective(params)

    outcome = call_it(objective)
    assert outcome.state is TrialState.FAILED
    assert "RecursionError" in str(outcome.error)


def test_ctrl_c_passes_through_because_it_is_meant_for_the_process() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_it(raising(KeyboardInterrupt()))


def test_params_that_cannot_be_built_are_a_failed_outcome() -> None:
    def make_params() -> Any:
        raise ZeroDivisionError("1 / 0 in the space")

    outcome = call(lambda params: 0.0, make_params, LocalContext(), ManualClock())
    assert outcome.state is TrialState.FAILED
    assert "1 / 0 in the space" in str(outcome.error)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class RudeError(Exception):
    """Cannot even be formatted: its own attributes raise."""

    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no cause")


@pytest.mark.parametrize("error", [UnprintableError(), RudeError()], ids=lambda error: type(error).__name__)
def test_an_exception_that_cannot_be_printed_is_still_named(error: Exception) -> None:
    outcome = call_it(raising(error))
    assert outcome.state is TrialState.FAILED
    assert type(error).__name__ in str(outcome.error)


def test_of_a_long_error_the_end_is_kept() -> None:
    outcome = call_it(raising(ValueError("x" * 10 * MAX_ERROR + "the end")))
    assert outcome.error is not None
    assert len(outcome.error) <= MAX_ERROR + 10
    assert outcome.error.strip().endswith("the end")


def test_an_objective_that_returns_after_its_stop_flag_was_cancelled_whatever_it_returns() -> None:
    for objective in (lambda params: 0.5, lambda params: None):
        outcome = call_it(objective, stopped=lambda: True)
        assert (outcome.state, outcome.loss) == (TrialState.CANCELLED, None)


def test_the_seconds_are_those_of_the_objective() -> None:
    clock = ManualClock(100.0)

    def objective(params: Any) -> float:
        clock.sleep(2.5)
        return 0.0

    assert call(objective, lambda: None, LocalContext(), clock).seconds == 2.5
    failing = call(lambda params: clock.sleep(1.5), lambda: None, LocalContext(), clock)
    assert (failing.state, failing.seconds) == (TrialState.FAILED, 1.5)


# One parameter or two


class Model:
    def loss(self, params: Any) -> float:
        return 1.0

    def loss_with_context(self, params: Any, context: Any) -> float:
        return 1.0

    def __call__(self, params: Any, context: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("objective", "wants"),
    [
        (lambda params: 0.0, False),
        (lambda params, context: 0.0, True),
        (lambda params, ctx: 0.0, True),
        (lambda params, context=None: 0.0, True),
        (lambda params, depth=3: 0.0, False),
        (lambda params, *rest: 0.0, False),
        (lambda params, **rest: 0.0, False),
        (lambda params, *, depth=3: 0.0, False),
        (Model().loss, False),
        (Model().loss_with_context, True),
        (Model(), True),
        (functools.partial(lambda data, params: 0.0, "data"), False),
        (functools.partial(lambda data, params, context: 0.0, "data"), True),
        (float, False),
        (abs, False),
    ],
)
def test_an_objective_gets_its_context_where_it_takes_one(objective: Callable[..., Any], wants: bool) -> None:
    assert wants_context(objective) is wants
    assert call_it(objective).state is TrialState.COMPLETE


def test_the_context_tells_of_the_trial_and_takes_its_reports() -> None:
    reports: list[tuple[int, float]] = []
    seen: dict[str, Any] = {}

    def objective(params: Any, context: Any) -> float:
        for step in range(2):
            context.report(np.int64(step), np.float32(0.5))
        seen.update(vars(context), stop=context.should_stop())
        return 0.0

    call_it(
        objective,
        trial=3,
        attempt=2,
        seed=9,
        budget=0.5,
        checkpoint_dir=Path("/c/3"),
        device="cuda",
        compute_class="gpu",
        slot=1,
        on_report=lambda step, loss: reports.append((step, loss)),
    )
    assert reports == [(0, 0.5), (1, 0.5)]
    assert [type(part) for part in reports[0]] == [int, float]
    expected = {"trial": 3, "attempt": 2, "seed": 9, "budget": 0.5, "checkpoint_dir": Path("/c/3"), "device": "cuda"}
    assert seen.items() >= {**expected, "compute_class": "gpu", "slot": 1, "stop": False}.items()


@pytest.mark.parametrize(("step", "loss"), [("first", 0.5), (1, "low"), (1, None), (None, 0.5)])
def test_a_report_that_is_no_number_fails_the_trial(step: Any, loss: Any) -> None:
    def objective(params: Any, context: Any) -> float:
        context.report(step, loss)
        return 0.0

    assert call_it(objective).state is TrialState.FAILED
