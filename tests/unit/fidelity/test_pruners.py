"""Whether a trial goes on follows from its reports and those of the others, whatever is reported."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from services.cases import cases

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import NO_OUTCOME, Outcome, Report, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.fidelity.pruners import ENOUGH, Pruning, percentile, read_pruner
from shadho_celery.scheduler.plan import Plan
from shadho_celery.space.compile import compile_space

NAMES = ["median", "percentile", "patience", "threshold:1e9", "asha"]


def pruning(given: Any) -> Pruning:
    settings = read_pruner(given)
    assert settings is not None
    return Pruning(settings)


def trial(number: int, state: TrialState = TrialState.RUNNING, budget: float | None = None) -> Trial:
    outcome = Outcome(state=state, loss=0.5 if state is TrialState.COMPLETE else None)
    return Trial(
        number=number,
        subspace="all",
        params={},
        budget=budget,
        state=state,
        outcome=outcome if state.is_finished else NO_OUTCOME,
    )


def report(number: int, step: int, loss: float) -> Report:
    return Report(number=number, attempt=1, step=step, loss=loss, at=0.0)


def reach(judge: Pruning, number: int, losses: list[float], budget: float | None = None) -> int | None:
    """Report the losses of steps 1, 2, ...; return the step at which the trial is stopped, else let it complete."""
    for step, loss in enumerate(losses, 1):
        if judge.tell(trial(number, budget=budget), report(number, step, loss)):
            judge.end(trial(number, TrialState.PRUNED, budget))
            return step
    judge.end(trial(number, TrialState.COMPLETE, budget))
    return None


def of_several(number: int, step: int, *losses: float) -> Report:
    return Report(number=number, attempt=1, step=step, loss=losses[0], losses=finite(*losses), at=0.0)


def finite(*losses: float) -> dict[str, float]:
    return {name: loss for name, loss in zip("ab", losses, strict=True) if math.isfinite(loss)}


@pytest.mark.parametrize("given", ["asha:2", "median:3", "percentile:50"])
def test_with_several_losses_a_trial_is_stopped_by_the_number_of_trials_that_dominate_it(given: str) -> None:
    """Trials that none dominates go on, equal ones too; a loss that is not finite makes a trial worse than others."""
    settings = read_pruner({"how": "percentile", "percentile": 50, "startup_trials": 3} if "per" in given else given)
    assert settings is not None
    judge = Pruning(settings, ["a", "b"])
    for number, losses in enumerate([(0.0, 9.0), (9.0, 0.0), (2.0, 2.0)]):
        assert not any(judge.tell(trial(number), of_several(number, step, *losses)) for step in (1, 2))
        judge.end(trial(number, TrialState.COMPLETE))
    for number, (*losses, is_stopped) in enumerate(
        [(1.0, 3.0, False), (2.0, 2.0, False), (3.0, 3.0, True), (math.nan, 0.0, True), (-1.0, math.inf, True)], 3
    ):
        assert judge.tell(trial(number), of_several(number, 1, *losses)) is is_stopped, losses


def test_below_the_median_of_the_complete_trials_at_its_step_a_trial_is_stopped() -> None:
    judge = pruning("median")
    for number in range(5):
        assert reach(judge, number, [10.0 + number, 5.0 + number, 1.0 + number]) is None
    assert reach(judge, 5, [12.0, 7.0, 3.0]) is None, "the median itself is no worse than the median"
    assert reach(judge, 6, [12.0, 7.5, 0.0]) == 2
    assert reach(judge, 7, [13.0, 0.0, 0.0]) == 1


def test_the_best_loss_so_far_counts() -> None:
    judge = pruning("median:1")
    assert reach(judge, 0, [5.0, 4.0, 3.0]) is None
    assert reach(judge, 1, [3.0, 9.0, 9.0]) is None


def test_of_a_percentile_only_the_better_part_goes_on() -> None:
    judge = pruning({"how": "percentile", "percentile": 25, "startup_trials": 4})
    for number in range(4):
        assert reach(judge, number, [float(number), 0.0]) is None
    assert reach(judge, 4, [0.7, 0.0]) is None
    assert reach(judge, 5, [0.8, 0.0]) == 1


def test_before_enough_trials_are_complete_and_before_the_warmup_none_is_stopped() -> None:
    judge = pruning({"how": "median", "startup_trials": 3, "warmup_steps": 2})
    for number in range(3):
        assert reach(judge, number, [float(number)] * 3) is None
    assert reach(judge, 3, [9.0, 9.0, 9.0]) == 2


def test_the_patience_is_counted_from_the_last_gain() -> None:
    judge = pruning("patience:3")
    assert reach(judge, 0, [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0]) is None
    assert reach(judge, 1, [5.0, 4.0, 4.1, 4.2, 4.0, 3.0]) == 5
    careful = pruning({"how": "patience", "steps": 2, "least_gain": 0.5})
    assert reach(careful, 0, [5.0, 4.8, 4.6, 4.4]) == 3


def test_beyond_a_threshold_and_at_nan_a_trial_is_stopped() -> None:
    judge = pruning({"how": "threshold", "upper": 10, "lower": 0})
    assert reach(judge, 0, [9.0, 10.0, 0.0]) is None
    assert reach(judge, 1, [9.0, 10.5, 1.0]) == 2
    assert reach(judge, 2, [-0.1, 1.0]) == 1
    assert reach(judge, 3, [math.nan, 1.0]) == 1


def test_asha_lets_the_best_third_of_each_rung_go_on_and_asks_at_the_rungs_alone() -> None:
    judge = pruning("asha")
    assert reach(judge, 0, [9.0] * 9) is None, "the first one has nobody to be compared with"
    assert reach(judge, 1, [9.5] * 9) == 1
    assert reach(judge, 2, [8.0, 99.0, 8.0, *[99.0] * 5, 7.0]) is None, "between the rungs nobody looks"
    assert reach(judge, 3, [7.0, 7.0, 8.5]) == 3
    wide = pruning("asha:10")
    for number in range(3):
        assert reach(wide, number, [-float(number)] * 9) is None


def test_asha_keeps_about_one_in_eta_of_many() -> None:
    judge, losses = pruning({"how": "asha", "eta": 4, "least": 2}), np.random.default_rng(0).random(400)
    stopped = [reach(judge, number, [loss] * 8) for number, loss in enumerate(losses.tolist())]
    assert set(stopped) == {2, None}
    assert 0.6 < stopped.count(2) / 400 < 0.85


def test_a_step_that_does_not_grow_changes_nothing() -> None:
    one, two = pruning("median:1"), pruning("median:1")
    for judge in (one, two):
        assert reach(judge, 0, [1.0, 1.0, 1.0]) is None
    for step, loss in ((1, 0.9), (1, 99.0), (2, 0.9), (1, 99.0), (-5, 99.0), (2, 99.0)):
        assert not one.tell(trial(1), report(1, step, loss))
    # Another attempt begins again.
    for step in (1, 2):
        assert not one.tell(trial(1), report(1, step, 5.0))


def test_once_it_is_to_stop_it_stays_so_until_it_has_ended() -> None:
    judge = pruning("threshold:1")
    assert judge.tell(trial(0), report(0, 1, 2.0))
    assert judge.tell(trial(0), report(0, 2, 0.0))
    assert judge.tell(trial(0), report(0, 1, 0.0))


def test_trials_of_another_budget_are_not_compared() -> None:
    judge = pruning("median:1")
    assert reach(judge, 0, [1.0, 1.0, 1.0], budget=3.0) is None
    assert reach(judge, 1, [5.0, 5.0, 5.0], budget=9.0) is None
    assert reach(judge, 2, [5.0, 5.0, 5.0], budget=3.0) == 1


def test_at_the_last_step_of_complete_trials_nothing_is_stopped() -> None:
    judge = pruning("asha")
    assert reach(judge, 0, [1.0] * 9) is None
    assert reach(judge, 1, [1.0] * 8 + [50.0]) is None


def test_pruned_and_failed_trials_are_no_measure_for_others() -> None:
    judge = pruning("median:1")
    judge.tell(trial(0), report(0, 1, 0.0))
    judge.end(trial(0, TrialState.FAILED))
    judge.end(trial(1, TrialState.PRUNED))
    assert reach(judge, 2, [5.0, 5.0]) is None


@pytest.mark.parametrize("given", NAMES)
def test_whatever_is_reported_every_report_has_an_answer(given: str) -> None:
    judge, generator = pruning(given), np.random.default_rng(1)
    odd = [math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0]
    for number in range(60):
        for _ in range(20):
            loss = odd[generator.integers(6)] if generator.random() < 0.3 else float(generator.normal())
            step = int(generator.integers(-5, 30))
            assert judge.tell(trial(number), report(number, step, loss)) in {True, False}
        judge.end(trial(number, [TrialState.COMPLETE, TrialState.FAILED, TrialState.PRUNED][number % 3]))
    judge.end(trial(1000, TrialState.CANCELLED))


@pytest.mark.parametrize("given", NAMES)
def test_what_was_recorded_is_learned_again(given: str) -> None:
    """A resumed study judges the next trial as the first run would have."""
    generator = np.random.default_rng(2)
    first = pruning(given)
    trials: list[Trial] = []
    reports: list[Report] = []
    for number in range(40):
        state = TrialState.COMPLETE
        for step in range(1, 10):
            reports.append(report(number, step, float(generator.random() + 1 / step)))
            if first.tell(trial(number), reports[-1]):
                state = TrialState.PRUNED
                break
        trials.append(trial(number, state))
        first.end(trials[-1])
    second = pruning(given)
    second.recall(trials, reports)
    for number in range(40, 60):
        losses = [float(generator.random() + 1 / step) for step in range(1, 10)]
        assert reach(second, number, losses) == reach(first, number, losses)


def test_what_is_learned_again_stops_nothing_that_was_not_stopped() -> None:
    """At the last step of complete trials a bad report was no reason, and is none after a resumption."""
    judge, trials, reports = pruning("asha"), [], []
    for number in range(6):
        for step in (1, 3, 9):
            reports.append(report(number, step, 1.0))
        outcome = Outcome(state=TrialState.COMPLETE, loss=1.0)
        ended = trial(number).evolve(state=TrialState.COMPLETE, outcome=outcome, finished_at=1.0 + number)
        reports[-3:] = [Report(number=number, attempt=1, step=s, loss=1.0, at=0.5 + number) for s in (1, 3, 9)]
        trials.append(ended)
    trials.append(trial(6))
    reports += [
        Report(number=6, attempt=1, step=s, loss=loss, at=10.0) for s, loss in ((1, -9.0), (3, -9.0), (9, 50.0))
    ]
    judge.recall(trials, reports)
    assert not judge.tell(trial(6), report(6, 1, -9.0))
    assert not judge.tell(trial(6), report(6, 10, 50.0))


@pytest.mark.parametrize("percent", [1, 50, 99])
def test_percentiles_are_numpys(percent: float) -> None:
    values = sorted(np.random.default_rng(3).normal(size=17).tolist())
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([math.inf, math.inf], percent) == math.inf


@cases(
    "given, said",
    [
        ("best", "there is no 'best'"),
        ("median:x", "'x' is not a number"),
        ("percentile:100", "must be below 100"),
        ("asha:1", "eta: 1 is not allowed; it must be at least 2"),
        ("asha:2.5", "is not a whole number"),
        ("patience:0", "must be at least 1"),
        ("threshold", "needs the loss above which"),
        ("threshold:nan", "nothing lies between"),
        ({"how": "median", "startup": 3}, "startup: there is no such key"),
        ({"eta": 3}, "pruner.how: it is missing; give median"),
        ({"how": ["asha"]}, "there is no"),
        ({"how": "threshold", "upper": 1, "lower": 2}, "nothing lies between 2 and 1"),
        (7, "7 is not a pruner"),
        ("", "there is no ''"),
        ("median:-1", "must be at least 1"),
        ("none:3", "none takes no settings"),
        ("MedianPruner", "write median for 'MedianPruner'"),
        ("ASHA", "write asha for 'ASHA'"),
        ("hyperband", "gives trials budgets, see STUDY['fidelity']"),
        ("sha", "gives trials budgets, see STUDY['fidelity']"),
    ],
)
def test_what_is_no_pruner_is_refused_in_one_line(given: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_pruner(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "median" in str(caught.value) or "threshold" in str(caught.value)


def test_that_nothing_is_reported_is_said_after_some_trials() -> None:
    judge = pruning("median")
    for number in range(ENOUGH):
        assert judge.notice is None
        judge.end(trial(number, TrialState.FAILED))
        judge.end(trial(number, TrialState.COMPLETE))
    assert "call context.report(step, loss)" in str(judge.notice)
    judge.tell(trial(99), report(99, 1, 0.5))
    assert judge.notice is None


def test_a_notice_about_a_command_speaks_of_its_output() -> None:
    judge = Plan.of(compile_space({}), StudySettings(trials=9, pruner="median", command=("x",))).make_pruning()
    assert judge is not None
    for number in range(ENOUGH):
        judge.end(trial(number, TrialState.COMPLETE))
    assert str(judge.notice).endswith('the pruner stops none: print lines such as {"step": 1, "loss": 0.3}')


def test_the_short_form_and_the_dict_are_one() -> None:
    assert read_pruner("asha:4") == read_pruner({"how": "asha", "eta": 4})
    assert read_pruner("percentile:10.5") == read_pruner({"how": "percentile", "percentile": 10.5})
    assert read_pruner("none") is read_pruner(None) is read_pruner({"how": "none"}) is None
