"""Which folders of trials are needed: those of the best, of unfinished ones, and of those that may be promoted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from hyperopt import hp
from services.cases import cases
from services.rounds import Player
from services.trials import told

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.scheduler.plan import make_rounds
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.keeper import KEEP_SECONDS, Keeper, may_be_promoted
from shadho_celery.study.table import StudyTrials

S = TrialState


def study_of(trials: Iterable[Trial]) -> StudyTrials:
    record = StudyRecord(key="k", name="s", module="", seed=0, space={}, created_at=0.0)
    found = StudyTrials(MemoryStore(record), record, [], ())
    for trial in trials:
        if trial.state.is_finished:
            found.trials.add(trial)
        else:
            found._open[trial.number] = trial
    return found


def kept(trials: Collection[Trial], best: int, promotable: Collection[int] = ()) -> set[int]:
    """Return the numbers of the trials whose folders are kept. A promoted trial has no folder of its own."""
    keeper, study = Keeper(best), study_of(trials)
    keeper.tell([trial for trial in trials if trial.state.is_finished])
    bits = keeper.unneeded(study, promotable)
    own = [trial.number for trial in trials if trial.origin is None]
    return {number for number in own if not bits[number // 8] >> number % 8 & 1}


def ended(number: int, end: float | TrialState, **facts: Any) -> Trial:
    return told({}, end, number=number, **facts)


@cases(
    "best, losses, numbers",
    [
        (1, [3.0, 1.0, 2.0], {1}),
        (2, [3.0, 1.0, 2.0, S.FAILED, S.PRUNED, S.CANCELLED], {1, 2}),
        (2, [1.0, 1.0, 1.0], {0, 1}),
        (9, [3.0, S.FAILED, 2.0], {0, 2}),
        (1, [*[2.0] * 20, 1.0], {20}),
    ],
)
def test_the_folders_of_the_best_trials_are_kept(best: int, losses: list[Any], numbers: set[int]) -> None:
    """Of equal trials the first ones; those of trials without a loss are not."""
    assert kept([ended(number, loss) for number, loss in enumerate(losses)], best) == numbers


def test_an_unfinished_trial_keeps_its_folder_and_a_promoted_one_that_of_its_origin() -> None:
    running = Trial(number=4, subspace="all", params={}, state=S.RUNNING, origin=1, rung=1, budget=3.0)
    waiting = Trial(number=3, subspace="all", params={})
    trials = [ended(0, 0.5, budget=1.0), ended(1, 2.0, budget=1.0), ended(2, 1.0, budget=1.0), waiting, running]
    assert kept(trials, 1) == {0, 1, 3}
    assert kept(trials, 1, promotable=[2]) == {0, 1, 2, 3}
    # A higher budget is better than a lower loss.
    trials[-1] = running.evolve(state=S.COMPLETE, outcome=Outcome(state=S.COMPLETE, loss=9.0))
    assert kept(trials, 1) == {1, 3}


def test_with_several_losses_the_folders_of_the_front_are_kept() -> None:
    points = [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    outcomes = [Outcome(state=S.COMPLETE, loss=x, losses={"a": x, "b": y}) for x, y in points]
    trials = [
        Trial(number=number, subspace="all", params={}, state=S.COMPLETE, outcome=each)
        for number, each in enumerate(outcomes)
    ]
    assert kept(trials, 1) == {0, 1, 2}


def test_trials_are_told_now_and_then_and_only_what_has_changed() -> None:
    keeper, study = Keeper(1), study_of([])
    assert keeper.news(study, (), 0.0) is None, "nothing is to be deleted"
    for number, loss in enumerate([1.0, 2.0]):
        study.trials.add(ended(number, loss))
        keeper.tell([ended(number, loss)])
    assert keeper.news(study, (), KEEP_SECONDS / 2) is None
    assert keeper.news(study, (), KEEP_SECONDS) == b"\x02"
    assert keeper.news(study, (), 3 * KEEP_SECONDS) is None


def test_a_cancelled_promotion_may_be_repeated() -> None:
    trials = [ended(0, 1.0, budget=1.0), ended(1, TrialState.CANCELLED, budget=3.0, origin=0, rung=1)]
    assert may_be_promoted(trials, 9.0) == {0}


@cases("how", ["halving", "hyperband", "asha", "auto", "dehb"])
def test_a_folder_is_there_for_each_promotion(how: str) -> None:
    """A folder that was once not needed is never needed again; what is known without the rounds keeps more."""
    ladder = Ladder.of({"least": 1, "most": 9, "eta": 3, "how": how})
    player = Player(make_rounds(ladder, compile_space({"x": hp.uniform("x", 0, 1)}), 0, 1000))
    player.loss = lambda origin, budget: None if origin % 7 == 5 else (origin * 37 % 101) / budget
    gone: set[int] = set()
    promoted = 0
    while len(player.finished) < 150:
        for trial in player.ask_all(4 - len(player.running)):
            if trial.origin is not None:
                promoted += 1
                assert trial.origin not in gone
        player.finish(player.running[len(player.finished) % len(player.running)])
        needed = {*player.rounds.promotable}
        assert {each for each in needed if not player.trials[each].state.is_finished} <= {
            each.number for each in player.running
        }
        needed |= {each.number if each.origin is None else each.origin for each in player.running}
        assert {each for each in player.rounds.promotable if player.trials[each].state is S.COMPLETE} <= (
            may_be_promoted(player.finished, ladder.most)
        )
        gone |= {each.number for each in player.trials if each.origin is None} - needed
    assert promoted > 4
    assert len(gone) > 10
