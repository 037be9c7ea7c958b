"""A program's studies learn from studies, files, hyperopt's Trials and lists; the trials there are not their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery import Study, Trials, fmin, load_study, minimize, rand
from shadho_celery.errors import ShadhoError, UsageError

STORE = "sqlite:///shadho.db"
SPACE = {"x": hp.uniform("x", -5, 5), "y": hp.uniform("y", -5, 5)}


def loss(values: Any) -> float:
    return float((values["x"] - 1) ** 2 + (values["y"] + 2) ** 2)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def old(name: str = "old") -> Any:
    return minimize(loss, SPACE, trials=30, seed=0, store=STORE, study=name, progress=False)


def params(study: Any) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp", "optuna:TPESampler"])
def test_it_teaches_and_counts_for_nothing(sampler: str) -> None:
    best = old().best.loss
    new = minimize(loss, SPACE, trials=6, seed=1, store=STORE, sampler=sampler, warm_start="old", progress=False)
    assert len(new.trials) == 6
    assert new.best.loss > best or new.best.params != load_study(STORE, "old").best.params
    cold = minimize(loss, SPACE, trials=6, seed=1, sampler=sampler, progress=False)
    assert np.median([trial.loss for trial in new.trials]) < np.median([trial.loss for trial in cold.trials])


@pytest.mark.slow
def test_the_same_warm_start_and_seed_repeat() -> None:
    study = old()
    study.dataframe().to_csv("old.csv", index=False)
    trials = [(trial.params, trial.loss) for trial in study.trials]
    sources = ["old", Path("old.csv"), "old.csv", study, trials, f"{STORE}#old"]
    runs = [params(minimize(loss, SPACE, trials=5, seed=1, store=STORE, warm_start=each)) for each in sources]
    assert runs == [runs[0]] * len(runs)


@pytest.mark.slow
def test_a_resumed_study_goes_on_as_one_that_was_not_interrupted_though_the_source_is_gone() -> None:
    source = old()
    whole = minimize(loss, SPACE, trials=9, seed=1, store=STORE, warm_start="old")
    minimize(loss, SPACE, trials=4, seed=1, store=STORE, study="parts", warm_start="old")
    source.delete()
    parts = minimize(loss, SPACE, trials=9, store=STORE, study="parts", resume=True)
    # A fit of the process is made from the losses alone, in one way or the other.
    for one, other in zip(params(whole), params(parts), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    parts.delete()


def test_trials_of_hyperopt_teach() -> None:
    trials = Trials()

    def fails(values: Any) -> Any:
        return {"loss": loss(values), "status": "ok" if values["x"] < 4 else "fail"}

    fmin(fails, SPACE, rand.suggest, max_evals=30, trials=trials, verbose=False, rstate=np.random.default_rng(0))
    failed = trials.statuses().count("fail")
    with pytest.warns(
        UserWarning, match=f"learned from {30 - failed} of 30 trials of hyperopt's Trials; left out {failed} f"
    ):
        study = Study(SPACE, seed=1, warm_start=trials)
    with study:
        assert study.ask().params["x"] < 5
        assert study.count() == 1


def test_it_fills_known_points_and_counts_as_tried() -> None:
    """In a finite space, what another study has tried is not tried again while there are others."""
    space = {"a": hp.randint("a", 4), "b": hp.randint("b", 2)}
    known = [({"a": a, "b": 0}, float(a)) for a in range(4)]
    study = minimize(lambda values: 0.0, space, trials=4, seed=0, sampler="tpe", warm_start=known)
    assert {trial.params["b"] for trial in study.trials} == {1}
    trials = [(trial.params, trial.loss) for trial in old().trials]
    with Study(SPACE, seed=0, sampler="gp", warm_start=trials) as filled:
        filled.enqueue([{"x": 1.0}])
        assert abs(filled.trials[0].params["y"] + 2) < 1


def test_a_list_has_what_the_objective_returns() -> None:
    """Without it the study would be taught the worst."""
    known = [({"x": i / 3 - 5, "y": 0.0}, i / 3) for i in range(30)]

    def found(known: Any) -> float:
        study = minimize(
            lambda values: values["x"],
            SPACE,
            trials=8,
            seed=1,
            sampler="tpe",
            objectives={"acc": "maximize"},
            warm_start=known,
            progress=False,
        )
        return float(np.mean([trial.params["x"] for trial in study.trials]))

    assert found(known) > 0 > found([(point, -number) for point, number in known])


def test_what_fits_is_taken_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Study(SPACE, warm_start=[({"x": 1, "y": 2}, 1)]) as study:
            assert study.taught == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (5, "5 cannot be a warm start; give a study, its name, a CSV file, hyperopt's Trials, Optuna's"),
        ({"x": 1}, "{'x': 1} cannot be a warm start"),
        ([], "the warm start has no trials"),
        (Trials(), "the warm start's Trials have no trials"),
        ([({"x": 1}, 1.0), 3], "trial 1 of the warm start is 3; give"),
        ([({"x": 99, "y": 1}, 1.0)], "none of 1 trial of the list fits this study: left out 1 outside x"),
        ("none", "there is no study named 'none'"),
    ],
)
def test_what_is_no_warm_start_is_refused_and_nothing_is_recorded(wrong: Any, words: str) -> None:
    with pytest.raises(ShadhoError) as caught:
        minimize(loss, SPACE, trials=3, store=STORE, study="new", warm_start=wrong)
    assert words in str(caught.value)
    with pytest.raises(ShadhoError):
        load_study(STORE, "new")


def test_a_study_that_is_continued_gets_none() -> None:
    old()
    with pytest.raises(UsageError, match="leave out warm_start or resume"):
        minimize(loss, SPACE, trials=40, store=STORE, study="old", resume=True, warm_start="old")
