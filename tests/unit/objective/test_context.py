"""Whatever an objective does or returns short of ending the process is an outcome."""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import hyperopt
import numpy as np
import pytest
from services.cases import cases
from services.clocks import MachineTime

from shadho_celery.core.failures import read_failure
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Memory, Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.objective.call import MAX_ERROR, call, wants_context
from shadho_celery.objective.context import MAX_REPORTS, LocalContext, TrialTimeout
from shadho_celery.objective.result import MAX_KEYS, MAX_METRICS, MAX_WARNING, read

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


def parts(returned: Any) -> tuple[float | None, Mapping[str, Any], str | None]:
    """Return loss, metrics and warning of a return value."""
    outcome = read(returned)
    return outcome.loss, outcome.metrics, outcome.warning


@cases(
    "returned, loss",
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
        (np.ma.array([1.0, 2.0]).mean(), 1.5),
        (5e-324, 5e-324),
        (1.7e308, 1.7e308),
    ],
)
def test_every_kind_of_number_is_a_loss(returned: Any, loss: float) -> None:
    for value in (returned, {"loss": returned}, OrderedDict(status="ok", loss=returned)):
        found = read(value).loss
        assert type(found) is float
        assert found == loss


@cases(
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
        np.ma.masked_all(3).mean(),
        object(),
        lambda: 0.5,
    ],
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


class Status(str, Enum):
    OK = "ok"
    FAIL = "fail"


@pytest.mark.parametrize("status", [None, "ok", np.str_("ok"), np.array("ok"), Status.OK])
def test_a_loss_counts_without_a_status_and_with_hyperopts_ok(status: Any) -> None:
    assert parts({"loss": 0.1, "status": status}) == (0.1, {"status": "ok" if status is not None else None}, None)


@pytest.mark.parametrize("status", [*hyperopt.STATUS_STRINGS, Status.FAIL, np.str_("fail"), np.array("fail")])
def test_a_loss_beside_any_other_status_of_hyperopts_is_a_failure(status: Any) -> None:
    if status != hyperopt.STATUS_OK:
        with pytest.raises(ValueError, match=r"returned status '(new|running|suspended|fail)'"):
            read({"loss": 0.1, "status": status})


@cases(
    "status", ["failed", "OK", "Fail", "", b"ok", 0, 200, True, False, math.nan, ["ok"], np.array(["ok", "ok"]), object]
)
def test_an_unknown_status_is_a_failure_that_names_the_known_ones(status: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown status .*; known are ") as caught:
        read({"loss": 0.1, "status": status})
    assert all(known in str(caught.value) for known in hyperopt.STATUS_STRINGS)
    assert "\n" not in str(caught.value)


def test_what_json_can_carry_is_kept_beside_the_loss_and_the_rest_is_dropped_by_name() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    loss, metrics, warning = parts(
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
            "set": {1},
            "longer than Python prints": 10**5000,
        }
    )
    assert loss == 1.0
    assert metrics == {"accuracy": 0.9, "nested": {"a": [1, None, True, "ü"]}, "7": "seven"}
    json.dumps(metrics, allow_nan=False)
    assert warning is not None
    for dropped in ("model", "cyclic", "deep", "nan", "function", "bytes", "complex", "keys", "set"):
        assert f"{dropped!r} (" in warning


class Level(IntEnum):
    LOW = 3


@cases(
    "value, kept",
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (Tensor(0.25), 0.25),
        ([np.float32(0.5), np.int64(3), (np.bool_(False),)], [0.5, 3, [False]]),
        ({"a": {"b": np.float64(0.5)}, np.int64(2): 1}, {"a": {"b": 0.5}, "2": 1}),
        (np.arange(3), [0, 1, 2]),
        (np.ones((2, 1)), [[1.0], [1.0]]),
        ([np.array([True]), np.array(["a"])], [[True], ["a"]]),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (Level.LOW, 3),
        (np.str_("text"), "text"),
        (OrderedDict(a=1), {"a": 1}),
        ([], []),
        (10**400, 10**400),
    ],
)
def test_numbers_of_all_kinds_are_kept_in_a_metric(value: Any, kept: Any) -> None:
    _, metrics, warning = parts({"loss": 1.0, "metric": value})
    assert warning is None
    assert json.dumps(metrics) == json.dumps({"metric": kept})


@pytest.mark.parametrize(
    "value",
    [math.nan, [math.inf], {"a": np.float32("nan")}, np.array([np.nan]), Decimal("NaN"), {1: 1, "1": 2}, {(1,): 1}],
    ids=repr,
)
def test_a_metric_that_holds_what_json_has_no_word_for_is_dropped(value: Any) -> None:
    _, metrics, warning = parts({"loss": 1.0, "metric": value, "other": 1})
    assert metrics == {"other": 1}
    assert str(warning).startswith("metrics dropped: 'metric' (")


def test_of_two_keys_that_json_cannot_tell_apart_the_text_is_kept() -> None:
    for metrics in ({1: "number", "1": "text"}, {"1": "text", 1: "number"}):
        _, kept, warning = parts({"loss": 1.0, **metrics})
        assert kept == {"1": "text"}
        assert "metrics dropped: 1 (" in str(warning)


def test_metrics_that_are_too_large_are_dropped_the_largest_first_until_they_fit() -> None:
    _, kept, warning = parts({"loss": 1.0, "small": 1, "a": "x" * 400_000, "b": "x" * 500_000, "c": "x" * 450_000})
    assert sorted(kept) == ["a", "c", "small"]
    assert "'b'" in str(warning)
    assert f"{MAX_METRICS}" in str(warning)


@pytest.mark.slow
@pytest.mark.parametrize(
    "huge",
    [
        "x" * 100_000_000,
        np.zeros(100_000_000, dtype=np.int8),
        [[0] * 1000] * 100_000,
        dict.fromkeys(range(5_000_000), 0),
        Tensor(0.5, ndim=1),
    ],
    ids=["text", "array", "lists", "dict", "what has no elements"],
)
def test_a_huge_metric_is_dropped_without_being_written_out(huge: Any) -> None:
    """A hundred megabytes of them: each would take seconds and gigabytes as JSON."""
    loss, metrics, warning = parts({"loss": 1.0, "huge": huge, "small": 1})
    assert (loss, metrics) == (1.0, {"small": 1})
    assert "'huge'" in str(warning)


def test_of_very_many_metrics_some_are_dropped_and_the_loss_is_found() -> None:
    loss, metrics, warning = parts({**{f"m{n}": 0 for n in range(MAX_KEYS + 5)}, "loss": 0.5})
    assert loss == 0.5
    assert 0 < len(metrics) <= MAX_KEYS
    assert "all after the first" in str(warning)


@pytest.mark.parametrize("key", ["\n", "x" * 10_000, "a" * 100])
def test_a_warning_is_one_short_line(key: str) -> None:
    _, _, warning = parts({"loss": 1.0, **{f"{key}{n}": object() for n in range(1000)}})
    assert warning is not None
    assert "\n" not in warning
    assert len(warning) < MAX_WARNING + 50


class Liar(Mapping[str, Any]):
    """A mapping of a loss that lies where it is told to."""

    def __init__(self, lie: str, error: BaseException | None = None) -> None:
        self._lie = lie
        self._error = error or RuntimeError("a lie")

    def _tell(self, what: str) -> None:
        if self._lie == what:
            raise self._error

    def __iter__(self) -> Iterator[str]:
        self._tell("iter")
        yield "loss"
        while self._lie == "endless":
            yield "loss"

    def __len__(self) -> int:
        self._tell("len")
        return 10**9

    def __getitem__(self, key: str) -> Any:
        self._tell("getitem")
        return {"loss": 0.5}[key]

    def __contains__(self, key: object) -> bool:
        self._tell("contains")
        return key == "loss"


@pytest.mark.parametrize("lie", ["iter", "getitem", "contains"])
def test_a_mapping_that_cannot_be_read_fails_its_trial(lie: str) -> None:
    outcome = call_it(lambda _: Liar(lie))
    assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
    assert outcome.error == "what the objective returned cannot be read: RuntimeError: a lie"
    outcome = call_it(lambda _: Liar(lie, SystemExit(3)))
    assert outcome.state is TrialState.FAILED
    assert "SystemExit" in str(outcome.error)


@pytest.mark.parametrize("lie", ["len", "endless", "nothing"])
def test_how_long_a_mapping_says_it_is_does_not_matter(lie: str) -> None:
    assert read(Liar(lie)).loss == 0.5


class RudeNumber:
    """Says that it is a number and raises when asked for it."""

    ndim = 0

    def item(self) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_a_loss_that_raises_when_it_is_read_fails_its_trial() -> None:
    for returned in (RudeNumber(), {"loss": RudeNumber()}):
        outcome = call_it(lambda _, returned=returned: returned)
        assert outcome.state is TrialState.FAILED
        assert "CUDA error" in str(outcome.error)
        assert outcome.out_of_memory is Memory.GPU, "an asynchronous device tells it here"
    outcome = call_it(lambda _: {"loss": 0.5, "metric": RudeNumber()})
    assert (outcome.state, outcome.metrics) == (TrialState.COMPLETE, {})
    assert "'metric' (RuntimeError" in str(outcome.warning)


# Calling


def call_it(objective: Callable[..., Any], params: Any = 0.5, **options: Any) -> Outcome:
    return call(objective, lambda: params, LocalContext(**options), ManualClock())


def raising(error: BaseException) -> Callable[[Any], Any]:
    def objective(params: Any) -> Any:
        raise error

    return objective


def test_a_loss_is_a_complete_outcome() -> None:
    outcome = call_it(lambda params: {"loss": params, "extra": [1]})
    assert outcome == Outcome(state=TrialState.COMPLETE, loss=0.5, metrics={"extra": [1]}, seconds=0.0)


def test_a_bad_return_value_is_a_failed_outcome_in_one_line() -> None:
    outcome = call_it(lambda params: None)
    assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
    assert outcome.error == "the objective's return value is None; return its loss, a number, or a dict with 'loss'"


def test_of_a_long_message_head_and_tail_are_kept_and_the_users_line() -> None:
    text = "\n".join(["Error(s) in loading:", *(f"\tsize mismatch for layer {n} of many" for n in range(1000))])
    error = str(call_it(raising(RuntimeError(text))).error)
    assert len(error) < MAX_ERROR + 100
    assert error.strip().endswith("size mismatch for layer 999 of many")
    assert "characters are left out" in error
    failure = read_failure(error)
    assert failure.headline == "RuntimeError: Error(s) in loading:"
    assert failure.location.startswith("test_context.py:")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
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
    assert "shadho_celery/objective" not in str(outcome.error), "the user's own lines come first"


def test_ctrl_c_passes_through_unless_the_caller_lets_nothing_pass() -> None:
    """It is meant for the process."""
    with pytest.raises(KeyboardInterrupt):
        call_it(raising(KeyboardInterrupt()))
    outcome = call(raising(KeyboardInterrupt()), lambda: 0, LocalContext(), ManualClock(), fatal=())
    assert "KeyboardInterrupt" in str(outcome.error)


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


@pytest.mark.parametrize(
    "error",
    [UnprintableError(), RudeError(), ValueError("half a pair: \ud800")],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_that_cannot_be_printed_is_still_named(error: Exception) -> None:
    outcome = call_it(raising(error))
    assert outcome.state is TrialState.FAILED
    assert type(error).__name__.encode() in str(outcome.error).encode()


GPU, HOST = Memory.GPU, Memory.HOST


class Unprintable(MemoryError):
    """Has no message that can be read."""

    def __str__(self) -> str:
        raise ValueError("no")


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


def caused_by(error: BaseException | None) -> BaseException:
    """Return an error with this cause; None for itself."""
    wrapped = ValueError("training failed")
    wrapped.__cause__ = error or wrapped
    return wrapped


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (MemoryError(), HOST),
        (type("_ArrayMemoryError", (MemoryError,), {})("Unable to allocate 8. PiB"), HOST),
        (OutOfMemoryError("Tried to allocate 2 GiB"), GPU),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), GPU),
        (RuntimeError("CUDA error: out of memory"), GPU),
        (RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"), GPU),
        (type("OutOfMemoryError", (MemoryError,), {})("Out of memory allocating 8 bytes"), GPU),
        (MemoryError("std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp"), GPU),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."), HOST),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), GPU),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), HOST),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "/data/cuda out of memory"), HOST),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), HOST),
        (Exception("A worker process was unexpectedly terminated. The exit codes are {SIGKILL(-9)}"), HOST),
        (caused_by(MemoryError()), HOST),
        (caused_by(OutOfMemoryError()), GPU),
        (caused_by(None), None),
        (Unprintable(), HOST),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (Exception("A process in the process pool was terminated abruptly"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (ValueError("bad"), None),
        (KeyError("memory"), None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_want_of_each_memory_is_told_from_other_failures(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, lacking: Memory | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcome = call_it(raising(error))
    assert (outcome.state, outcome.out_of_memory) == (TrialState.FAILED, lacking)
    assert type(error).__name__ in str(outcome.error)


def test_a_library_that_does_not_say_whose_memory_ran_out_means_the_gpu_of_a_slot_that_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    jax = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")
    assert call_it(raising(jax)).out_of_memory is GPU
    assert call_it(raising(MemoryError("out of memory"))).out_of_memory is HOST, "Python's own"


def test_after_its_time_limit_a_loss_still_counts_and_anything_else_timed_out() -> None:
    limit: dict[str, Any] = {"timeout": 90.0, "timed_out": lambda: True}
    outcome = call_it(lambda _: {"loss": 0.5, "bad": object()}, **limit)
    assert (outcome.state, outcome.loss) == (TrialState.COMPLETE, 0.5)
    assert str(outcome.warning).startswith("stopped at its time limit of 90 s; metrics dropped: 'bad'")
    for objective in (raising(TrialTimeout()), lambda _: None):
        outcome = call_it(objective, **limit)
        assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
        assert str(outcome.error).startswith("timed out after 90 s (trial timeout)\n")
    assert call_it(lambda _: 0.5, stopped=lambda: True, **limit).state is TrialState.CANCELLED
    assert LocalContext(**limit).should_stop()


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


def test_the_seconds_are_those_that_passed_although_the_clock_was_set_back(machine_time: MachineTime) -> None:
    def objective(params: Any) -> float:
        machine_time.sleep(2.5)
        machine_time.set_by(-3600.0)
        return 0.0

    assert call(objective, lambda: None, LocalContext()).seconds == 2.5


# One parameter or two


class Model:
    def loss(self, params: Any) -> float:
        return 1.0

    def loss_with_context(self, params: Any, context: Any) -> float:
        return 1.0

    def __call__(self, params: Any, context: Any) -> float:
        return 1.0


@cases(
    "objective, wants",
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


def test_the_context_tells_of_the_trial_and_takes_its_reports(tmp_path: Path) -> None:
    reports: list[tuple[int, float]] = []
    seen: dict[str, Any] = {}

    def objective(params: Any, context: Any) -> float:
        for step in range(2):
            context.report(np.int64(step), np.float32(0.5))
        seen.update(vars(context), stop=context.should_stop())
        (context.checkpoint_dir / "state").write_text("made when it is asked for")
        return 0.0

    call_it(
        objective,
        trial=3,
        attempt=2,
        seed=9,
        budget=0.5,
        checkpoints=tmp_path / "c" / "3",
        device="cuda",
        compute_class="gpu",
        slot=1,
        on_report=lambda step, loss: reports.append((step, loss)),
    )
    assert reports == [(0, 0.5), (1, 0.5)]
    assert [type(part) for part in reports[0]] == [int, float]
    expected = {
        "trial": 3,
        "attempt": 2,
        "seed": 9,
        "budget": 0.5,
        "checkpoints": tmp_path / "c" / "3",
        "device": "cuda",
    }
    assert seen.items() >= {**expected, "compute_class": "gpu", "slot": 1, "stop": False}.items()


@pytest.mark.parametrize(
    ("step", "loss", "error", "says"),
    [
        ("1", 0.5, TypeError, "the step is not a number but str: '1'"),
        (None, 0.5, TypeError, "the step is not a number but NoneType"),
        (1.5, 0.5, ValueError, "the step must be a whole number, not 1.5"),
        (math.nan, 0.5, ValueError, "the step is nan"),
        (2**63, 0.5, ValueError, "the step is too large"),
        (1, "low", TypeError, "the loss is not a number but str: 'low'"),
        (1, None, TypeError, "the loss is not a number but NoneType"),
        (1, np.array([0.5]), TypeError, "the loss is not a number but ndarray"),
        (1, HUGE, ValueError, "the loss is too large"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_report_is_refused_in_the_objective(step: Any, loss: Any, error: type[Exception], says: str) -> None:
    reports: list[Any] = []
    with pytest.raises(error, match=f"context.report: {says}"):
        LocalContext(on_report=lambda *report: reports.append(report)).report(step, loss)
    assert not reports


def test_every_kind_of_number_may_be_reported() -> None:
    reports: list[Any] = []
    context = LocalContext(on_report=lambda step, loss: reports.append((step, loss)))
    for step, loss in ((np.int64(1), np.float32(0.5)), (2.0, Fraction(1, 2)), (Tensor(3), Tensor(0.5)), (-4, True)):
        context.report(step, loss)  # type: ignore[arg-type]
    context.report(loss=0.5, step=3)
    assert reports == [(1, 0.5), (2, 0.5), (3, 0.5), (-4, 1.0), (3, 0.5)]
    assert {type(step) for step, _ in reports} == {int}
    # A training may diverge.
    context.report(1, math.nan)
    context.report(2, np.float32("inf"))  # type: ignore[arg-type]
    assert [str(loss) for _, loss in reports[-2:]] == ["nan", "inf"]


def test_a_chain_of_a_hundred_thousand_causes_is_told_in_short() -> None:
    def objective(params: Any) -> float:
        error = ValueError("the first")
        for number in range(100_000):
            following = ValueError(number)
            following.__context__ = error
            error = following
        raise error

    outcome = call(objective, lambda: None, LocalContext())
    assert outcome.state is TrialState.FAILED
    assert "ValueError: 99999" in str(outcome.error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there so many calls overflow C's stack")
def test_a_recursion_of_a_hundred_thousand_calls_is_told_in_short() -> None:
    before = sys.getrecursionlimit()

    def endless(number: int) -> float:
        return endless(number + 1)

    def objective(params: Any) -> float:
        sys.setrecursionlimit(100_000)
        return endless(0)

    try:
        outcome = call(objective, lambda: None, LocalContext())
    finally:
        sys.setrecursionlimit(before)
    assert "RecursionError" in str(outcome.error)
    assert len(str(outcome.error)) < MAX_ERROR


@pytest.mark.parametrize("made", [10, MAX_REPORTS, 20 * MAX_REPORTS])
def test_many_reports_are_thinned_out_evenly_and_the_warning_says_so(made: int) -> None:
    sent: list[int] = []
    context = LocalContext(on_report=lambda step, loss: sent.append(step))

    def objective(params: Any, context: LocalContext) -> float:
        for step in range(made):
            context.report(step, 0.5)
        return 0.5

    warning = call(objective, lambda: 0, context).warning
    if made <= MAX_REPORTS:
        assert sent == list(range(made))
        assert warning is None
        return
    assert len(sent) < 5 * MAX_REPORTS
    stride = max(b - a for a, b in itertools.pairwise(sent))
    assert set(range(0, made - stride, stride)) <= set(sent), "the whole length is covered"
    assert made / stride <= MAX_REPORTS
    assert warning == f"of {made} reports {len(sent)} were sent, at the end every {stride}th"
    # A trial that fails says so, too.
    assert "reports" in str(call(lambda params, context: context.report(0, "no"), lambda: 0, context).warning)


def test_what_other_tools_have_is_named_as_it_is_called_here() -> None:
    context: Any = LocalContext()
    with pytest.raises(AttributeError, match=r"here it is context\.should_stop$"):
        context.should_prune()
    with pytest.raises(AttributeError, match=r"a trial's context has no attribute 'anything'$"):
        _ = context.anything
    with pytest.raises(ValueError, match=r"whole number, not 0.5: write context.report\(step, loss\).*Optuna's order"):
        context.report(0.5, 3)
    with pytest.raises(ValueError, match=r"report\(loss=..., step=...\)$"):
        context.report(0.5, 0.25)


def test_an_objective_that_suggests_params_is_told_what_a_space_looks_like_here() -> None:
    def objective(trial: Any) -> Any:
        return trial.suggest_float("x", 0, 1)

    outcome = call(objective, lambda: {"x": 1}, LocalContext())
    assert "SPACE = {'x': hp.uniform('x', 0, 1)}" in read_failure(outcome.error).headline
    other = call(lambda params: params.anything, lambda: {"x": 1}, LocalContext())
    assert "hp.uniform" not in str(other.error)


def test_a_trial_asks_why_it_should_stop() -> None:
    """A preemption counts once the trial was told of it; until then its result is that of the whole trial."""
    context = LocalContext(preempted=lambda: True)
    assert not context.was_told
    assert (context.should_stop(), context.stop_reason, context.was_told) == (True, "preempted", True)
    assert LocalContext().stop_reason == ""
    assert LocalContext(timed_out=lambda: True, preempted=lambda: True).stop_reason == "timeout"
    assert LocalContext(stopped=lambda: True, timed_out=lambda: True).stop_reason == "stopped"
    assert call_it(lambda _: 0.5, preempted=lambda: True).loss == 0.5
    for result in (0.5, None):
        told = call_it(lambda _, context, result=result: context.should_stop() and result, preempted=lambda: True)
        assert (told.state, told.loss) == (TrialState.CANCELLED, None)


def test_nothing_can_follow_a_process_group_in_a_trial_with_several_slots() -> None:
    """The ranks would wait in the first block for as long as they may."""
    calls: list[int] = []
    context = LocalContext(slots=2, on_call_replicas=lambda address, token, backups: calls.append(backups))
    context.call_replicas("host:1", "token", 1)
    context.call_replicas("host:1", "token", 0, is_last=True)
    with pytest.raises(UsageError, match="put both trainings into one block"):
        context.call_replicas("host:1", "token", 0)
    assert calls == [1, 0]
