"""A study with repeats ends with the best params under several seeds, with budgets, with a grid, and after a resume."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shadho_celery import Study, hp, minimize
from shadho_celery.core.trial import TrialState
from shadho_celery.errors import UsageError
from shadho_celery.objective.context import Context
from shadho_celery.program.recorded import ShownStudy
from shadho_celery.results.study import study_json

SPACE = {"x": hp.uniform("x", -1, 1)}
#: of a search without repeats of its own numbers
PLAIN: dict[str, Any] = {"sampler": "random", "seed": 1}


def noisy(values: Any, context: Context) -> float:
    """Return a loss whose noise, about the range of the losses, comes from the trial's seed."""
    return float(values["x"] ** 2 + np.random.default_rng(context.seed).normal())


def repeats_of(study: ShownStudy) -> list[int | None]:
    return [trial.origin for trial in study.trials if trial.sampler == "repeated"]


def test_the_last_trials_of_the_limit_repeat_the_best_params_under_other_seeds() -> None:
    """Repeats count as trials, have the params and a seed of their own, and the best mean names the best trial."""
    study = minimize(noisy, SPACE, trials=20, repeats=3, **PLAIN)
    trials = [*study.trials]
    assert len(trials) == 20
    assert [trial.sampler for trial in trials[-4:]] == ["repeated"] * 4
    groups = [[trial for trial in trials if number in (trial.number, trial.origin)] for number in {*repeats_of(study)}]
    for group in groups:
        assert len({str(trial.params) for trial in group}) == 1
        assert len({trial.seed for trial in group}) == len({trial.folder for trial in group}) == len(group)
    means = {group[0].number: float(np.mean([trial.loss for trial in group])) for group in groups if len(group) == 3}
    assert study.best.number == min(means, key=lambda number: means[number])
    assert study.repeated is not None
    assert study.best_loss == study.repeated.mean == pytest.approx(means[study.best.number])
    of_best = next(group for group in groups if group[0].number == study.best.number)
    assert study.repeated.deviation == pytest.approx(np.std([trial.loss for trial in of_best], ddof=1))


def test_the_draws_of_a_random_search_are_those_without_repeats() -> None:
    """Repeats take no places in the stream of a sampler that does not learn."""
    trials = minimize(noisy, SPACE, trials=20, repeats=3, **PLAIN).trials
    drawn = [trial.params for trial in trials if trial.origin is None]
    assert drawn == [trial.params for trial in minimize(noisy, SPACE, trials=20, **PLAIN).trials][: len(drawn)]
    assert len(drawn) < 20


def test_a_resume_in_the_middle_of_repeats_continues_them(tmp_path: Path) -> None:
    """Two runs make the trials of one run with the same limits in turn; the setting is kept by the study."""
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path / 'a.db'}", "study": "s"}
    with Study(SPACE, repeats=3, **PLAIN, **where) as study:
        study.run(noisy, trials=12)
        before = repeats_of(study)
    with Study(SPACE, resume=True, **where) as study:
        study.run(noisy, trials=20)
        assert repeats_of(study)[: len(before)] == before
        assert len(repeats_of(study)) > len(before)
        assert study.repeated is not None
        assert study.repeated.results == 3
    assert study.best.number == minimize(noisy, SPACE, trials=20, resume=True, **where).best.number


def test_an_objective_without_a_seed_has_equal_losses() -> None:
    """Nothing breaks, the deviation is 0, and the best loss is that of the search."""
    study = minimize(lambda values: abs(values["x"]), SPACE, trials=20, repeats=3, **PLAIN)
    assert study.repeated is not None
    assert (study.repeated.deviation, study.best_loss) == (0.0, pytest.approx(min(t.loss or 0 for t in study.trials)))


@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp", "cma", "qmc"])
def test_every_sampler_learns_from_repeats(sampler: str) -> None:
    """Duplicates of params do no harm: also in a finite space, where a sampler repeats no point by itself."""
    space = {"x": hp.uniform("x", -1, 1), "n": hp.randint("n", 2)} if sampler == "cma" else {"n": hp.randint("n", 14)}
    study = minimize(lambda values: float(values["n"]), space, trials=18, repeats=3, sampler=sampler, seed=0)
    assert len([*study.trials]) == 18
    assert study.repeated is not None
    drawn = [trial.params["n"] for trial in study.trials if trial.sampler != "repeated"]
    assert sampler in {"cma", "qmc"} or len({*drawn}) == len(drawn)


def test_the_best_points_of_a_grid_are_repeated_after_its_last_point() -> None:
    """A finite search ends only after the repeats, also with no limit that is reached."""
    study = minimize(
        lambda values: float(values["n"]), {"n": hp.randint("n", 5)}, seconds=60, repeats=2, sampler="grid"
    )
    assert sorted(repeats_of(study)) == sorted(trial.number for trial in study.trials if trial.params["n"] < 3)[:3]
    assert study.best.params == {"n": 0}


def test_trials_at_the_full_budget_are_repeated_from_their_beginning() -> None:
    """With budgets, a repeat has the highest budget, no rung, and a checkpoint folder of its own."""
    study = minimize(
        lambda values: abs(values["x"]), SPACE, trials=40, repeats=3, fidelity={"most": 9, "how": "asha"}, **PLAIN
    )
    repeats = [trial for trial in study.trials if trial.sampler == "repeated"]
    assert {(trial.budget, trial.rung, trial.continued) for trial in repeats} == {(9.0, None, None)}
    assert {trial.folder for trial in repeats}.isdisjoint(t.folder for t in study.trials if t not in repeats)
    assert study.best.budget == 9.0
    assert study.repeated is not None
    assert sum(t.folder == study.best.folder for t in study.trials) > 1


def test_a_lucky_loss_is_no_target() -> None:
    """A search ends by its target once the mean of all results of the best params is good enough."""
    study = minimize(noisy, SPACE, trials=60, target=-0.5, repeats=3, **PLAIN)
    first = next(trial.number for trial in study.trials if (trial.loss or 0.0) < -0.5)
    assert study.count() > first + 2
    assert study.repeated is not None
    assert study.count() == 60 or study.repeated.mean <= -0.5


def test_failed_repeats_do_not_stop_a_search() -> None:
    """If all repeats fail, the best single loss is the best, as without repeats."""
    seen = set()

    def fails_again(values: Any) -> float:
        if values["x"] in seen:
            raise ValueError("this seed diverges")
        seen.add(values["x"])
        return float(values["x"] ** 2)

    study = minimize(fails_again, SPACE, trials=14, repeats=3, **PLAIN)
    assert study.repeated is None
    assert study.count(TrialState.FAILED) > 0
    assert study.best.state == TrialState.COMPLETE


def test_an_ask_tell_loop_gets_repeats() -> None:
    """Without a limit, one in ten trials repeats one of the best; an asked repeat has the params and its own seed."""
    with Study({"x": hp.uniform("x", -1, 1)}, repeats=3, **PLAIN) as study:
        study.enqueue([{"x": 0.25}])
        for _ in range(30):
            trial = study.ask()
            study.tell(trial, abs(trial.values["x"]))
        assert len(repeats_of(study)) == 3
        assert study.count() == 30


def test_small_limits_leave_room_for_draws() -> None:
    """At most half of the trials of a small study are repeats at its end; one trial has none."""
    for trials, most in ((1, 0), (2, 1), (5, 2)):
        assert len(repeats_of(minimize(noisy, SPACE, trials=trials, repeats=3, **PLAIN))) <= most


@pytest.mark.parametrize("repeats", [0, -1, 1.5, "three", True])
def test_repeats_are_a_whole_number(repeats: Any) -> None:
    """The error names the setting."""
    with pytest.raises(UsageError, match="repeats: "):
        minimize(noisy, SPACE, trials=5, repeats=repeats)


def test_several_losses_have_no_repeats() -> None:
    """The mean of one loss names the best trial."""
    losses = {"a": "minimize", "b": "minimize"}
    with pytest.raises(UsageError, match=r"repeats .* several; leave out"):
        minimize(lambda values: {"losses": {"a": 1, "b": 2}}, SPACE, trials=5, repeats=3, objectives=losses)


def test_reports_and_exports_say_how_many_and_how_far_apart() -> None:
    """A maximised loss has its mean as the objective returned it, in the text, in JSON, and by origin in the table."""
    study = minimize(lambda v, c: -noisy(v, c), SPACE, trials=20, repeats=3, direction="maximize", **PLAIN)
    report, known = study.read_report(), study.repeated
    assert known is not None
    assert report.best_words == f"best loss {known.mean:.6g}, mean of 3, standard deviation {known.deviation:.3g}"
    assert study_json(report)["repeated"] == {"results": 3, "mean": known.mean, "deviation": known.deviation}
    study.write_csv(file := io.StringIO())
    rows = [*csv.DictReader(io.StringIO(file.getvalue()))]
    mine = [row for row in rows if str(study.best.number) in (row["number"], row["origin"])]
    assert [float(row["x"]) for row in mine] == [study.best.values["x"]] * 3
    # In tables, the column `loss` is minimised.
    assert -np.mean([float(row["loss"]) for row in mine]) == pytest.approx(known.mean)
