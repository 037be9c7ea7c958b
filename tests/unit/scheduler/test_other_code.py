"""Failures under an earlier version of the code no longer count: a branch that was broken is tried at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hyperopt import hp
from services.searching import SimulatedSearch

from shadho_celery import Study
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Lost, Memory, Outcome, Trial, TrialState
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.state import Limits

S = TrialState
OLD, NEW = "0" * 12, "1" * 12

SPACE = hp.choice("m", [{"m": name, name: hp.uniform(name, 0, 1)} for name in "ab"])
Play = Callable[[Attempt, str], Outcome]


def play(code: str, *, is_broken: bool) -> Play:
    """Return losses of branch b that are better than those of a, unless b is broken."""

    def outcome(attempt: Attempt, compute_class: str) -> Outcome:
        if is_broken and attempt.subspace == "m=b":
            return Outcome(state=S.FAILED, error="ValueError: broken", seconds=1.0, code=code)
        loss = attempt.params["b"] if attempt.subspace == "m=b" else 1.0 + attempt.params["a"]
        return Outcome(state=S.COMPLETE, loss=loss, seconds=1.0, code=code)

    return outcome


def searched(
    store: SqlStore,
    plays: Play,
    trials: int,
    code: str,
    *,
    resume: bool = False,
    slots: Any = None,
    space: Any = SPACE,
    clock: ManualClock | None = None,
    **settings: Any,
) -> SimulatedSearch:
    """Return a study in the store that was begun or resumed until it had so many trials."""
    return (
        SimulatedSearch(
            *(compile_space(space), plays, slots or {"cpu": 1, "gpu": 1}),
            settings=StudySettings(**settings),
            limits=Limits(trials=trials),
            clock=clock or ManualClock(),
            seed=1,
            store=store,
            resume=resume,
            code=code,
        )
        .run()
        .close()
    )


def of(name: str, trials: list[Trial]) -> list[int]:
    return [place for place, trial in enumerate(trials) if trial.subspace == f"m={name}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "shares", "sampler"),
    [("cost", "promise", "tpe"), ("cost", "even", "random"), ("fifo", "uniform", "random"), ("paper", "even", "tpe")],
)
def test_a_branch_that_was_fixed_gets_the_next_trial_and_its_full_share(policy: str, shares: str, sampler: str) -> None:
    store, settings = SqlStore("sqlite://"), {"policy": policy, "shares": shares, "sampler": sampler}
    before = [*searched(store, play(OLD, is_broken=True), 40, OLD, **settings).study]
    assert len(of("b", before)) >= 5
    study = searched(store, play(NEW, is_broken=False), 120, NEW, resume=True, **settings).study
    after = sorted((each for each in study if each.outcome.code == NEW), key=lambda each: each.started_at or 0.0)
    places = of("b", after)
    assert places[0] < 2, "two slots begin at the same moment"
    assert len(places) >= 0.4 * len(after) or policy == "paper"


def test_while_the_code_is_the_same_a_resumed_study_has_no_mercy() -> None:
    """A tenth of its share, from then on."""
    store = SqlStore("sqlite://")
    searched(store, play(OLD, is_broken=True), 40, OLD, sampler="random")
    found = [*searched(store, play(OLD, is_broken=True), 200, OLD, resume=True, sampler="random").study]
    assert 5 <= len(of("b", found[:40])) <= 12
    assert len(of("b", found[40:])) == pytest.approx(160 / 11, abs=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ended after")
@pytest.mark.parametrize("sampler", ["auto", "tpe", "grid", "cma", "optuna:TPESampler"])
def test_whichever_sampler_searches_it_finds_what_was_broken(sampler: str, tmp_path: Any) -> None:
    """In one process, of which the code is the function's; the grid tries the failed points again."""
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/s.db", "study": "s"}

    def broken(values: Any) -> float:
        if "b" in values:
            raise ValueError("broken")
        return float(1.0 + values["a"])

    def fixed(values: Any) -> float:
        return float(values["b"] if "b" in values else 1.0 + values["a"])

    with Study(SPACE, seed=3, sampler=sampler, **where) as study:
        study.run(broken, trials=20, progress=False)
        ended = len(study.trials)
    with (
        pytest.warns(UserWarning, match=r"their failures no longer count, but their losses do"),
        Study(SPACE, **where, resume=True) as study,
    ):
        study.run(fixed, trials=100, progress=False)
    after = [trial.subspace for trial in study.trials][ended:]
    assert after[0] == "m=b"
    assert after.count("m=b") >= 0.4 * len(after)
    assert study.best.subspace == "m=b"


def test_back_under_an_earlier_version_a_branch_that_failed_since_is_tried_before_others() -> None:
    """Even if it has trials of that version from before; and only once."""
    store, middle = SqlStore("sqlite://"), "2" * 12
    options = [(p, {"m": name, name: hp.uniform(name, 0, 1)}) for p, name in ((0.95, "a"), (0.05, "b"))]
    settings: dict[str, Any] = {"sampler": "random", "slots": {"cpu": 1}, "space": hp.pchoice("m", options)}
    clock = ManualClock()
    for code, trials in ((OLD, 30), (middle, 71), (OLD, 75), (OLD, 79)):
        plays = play(code, is_broken=code == middle)
        found = searched(store, plays, trials, code, resume=trials > 30, clock=clock, **settings).study
    assert of("b", [*found])[-1] == 71


def test_rare_branches_are_tried_in_the_order_of_their_shares() -> None:
    """Each of them within two trials over its share."""
    names = "abcdef"
    space = hp.pchoice("m", [(p, {"m": name, name: hp.uniform(name, 0, 1)}) for p, name in zip(
        (0.1, 0.05, 0.5, 0.05, 0.2, 0.1), names, strict=True)])  # fmt: skip
    store = SqlStore("sqlite://")

    def broken(attempt: Attempt, compute_class: str) -> Outcome:
        if attempt.subspace != "m=e":
            return Outcome(state=S.FAILED, error="x", seconds=1.0, code=OLD)
        return Outcome(state=S.COMPLETE, loss=1.0, seconds=1.0, code=OLD)

    def fixed(attempt: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=S.COMPLETE, loss=1.0, seconds=1.0, code=NEW)

    searched(store, broken, 150, OLD, slots={"cpu": 1}, sampler="random", space=space)
    after = [*searched(store, fixed, 170, NEW, resume=True, slots={"cpu": 1}, sampler="random", space=space).study][
        150:
    ]
    assert [trial.subspace[-1] for trial in after[:5]] == ["c", "a", "f", "b", "d"]


def test_memory_that_ran_out_under_other_code_keeps_no_class_away() -> None:
    """Neither for the trial itself, which still waits, nor for similar ones, however much they took elsewhere."""
    space = {"x": hp.uniform("x", 0, 1)}

    def hungry(code: str) -> Play:
        def outcome(attempt: Attempt, compute_class: str) -> Outcome:
            is_short = code == OLD and compute_class == "gpu_small"
            if is_short:
                return Outcome(
                    state=S.FAILED, error="CUDA out of memory", seconds=1.0, out_of_memory=Memory.GPU, code=code
                )
            return Outcome(state=S.COMPLETE, loss=1.0, seconds=1.0, gpu_memory=30 * 2**30, code=code)

        return outcome

    store, slots = SqlStore("sqlite://"), {"gpu_small": 1, "gpu_large": 1}
    first = [*searched(store, hungry(OLD), 30, OLD, slots=slots, space=space, sampler="random").study]
    assert {trial.compute_class for trial in first[10:]} == {"gpu_large"}
    assert any(trial.outgrown for trial in first)
    after = [*searched(store, hungry(NEW), 60, NEW, resume=True, slots=slots, space=space, sampler="random").study][30:]
    assert sum(trial.compute_class == "gpu_small" for trial in after) >= 10


def test_a_waiting_trial_forgets_where_it_failed_under_other_code_and_a_lost_one_has_the_code_of_its_run() -> None:
    from shadho_celery.core.trial import Result, Retry
    from shadho_celery.study.open import open_study

    store, params = SqlStore("sqlite://"), {"x": 0.5}
    study = open_study(store, {}, name="s", seed=0)
    study.use_code(OLD)
    waiting, lost = (study.add("all", params, seed=0) for _ in range(2))
    failed = Outcome(state=S.FAILED, error="x", code=OLD)
    retry = Retry(reason="r", outgrown="gpu", memory=Memory.GPU)
    attempt = study.send(waiting, "gpu")
    study.tell(Result(number=waiting.number, attempt=attempt.attempt, outcome=failed, at=1.0, retry=retry))
    for _ in range(3):
        attempt = study.send(study.trial(lost.number), "gpu")
        study.tell(Lost(number=lost.number, attempt=attempt.attempt, reason="gone"))
    assert (study.trial(lost.number).state, study.trial(lost.number).outcome.code) == (S.FAILED, OLD)
    study.close()
    for code, known in ((OLD, "gpu"), ("", "gpu"), (NEW, None)):
        study = open_study(store, {}, name="s", resume=True)
        study.use_code(code)
        assert study.trial(waiting.number).outgrown == known
        assert (study.current(study.trial(lost.number)).state is S.CANCELLED) == (code == NEW)
        study.close()
