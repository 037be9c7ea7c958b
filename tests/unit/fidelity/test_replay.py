"""A replay gives rounds the trials and the results of an earlier run in the order in which they came."""

from __future__ import annotations

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.fidelity.rounds import Replay, Rounds


class Recorder(Rounds):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def add(self, trial: Trial) -> None:
        self.heard.append(f"add {trial.number}")

    def tell(self, trial: Trial) -> None:
        self.heard.append(f"tell {trial.number}")


def ended(number: int, asked_at: float | None, finished_at: float | None) -> Trial:
    outcome = Outcome(state=TrialState.COMPLETE, loss=0.0)
    facts = {"asked_at": asked_at, "finished_at": finished_at}
    return Trial(number=number, subspace="all", params={}, state=outcome.state, outcome=outcome, **facts)


def heard(trials: list[Trial], results: list[int]) -> list[str]:
    recorder = Recorder()
    replay = Replay(recorder, trials)
    for number in results:
        replay.tell(trials[number])
    replay.end()
    return recorder.heard


def test_a_result_comes_after_the_trials_that_were_sent_before_it_and_before_those_sent_at_its_time() -> None:
    trials = [ended(0, 1.0, 5.0), ended(1, 2.0, 3.0), ended(2, 3.0, 9.0), ended(3, 6.0, None), ended(4, 9.5, None)]
    assert heard(trials, [1, 0, 2]) == ["add 0", "add 1", "tell 1", "add 2", "tell 0", "add 3", "tell 2", "add 4"]


def test_a_trial_is_sent_before_its_result_whatever_the_clock_of_its_machine_says() -> None:
    assert heard([ended(0, 5.0, 2.0), ended(1, 6.0, 2.5)], [0, 1]) == ["add 0", "tell 0", "add 1", "tell 1"]


def test_trials_without_a_time_were_sent_before_all_results() -> None:
    trials = [ended(0, None, 2.0), ended(1, None, None), ended(2, 7.0, None)]
    assert heard(trials, [0]) == ["add 0", "add 1", "tell 0", "add 2"]
