"""Simulated trials have budgets, start-up and checkpoints, and promotions find their machines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from services.families import Family, cluster_of, fleet_of, half_normal

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.simulation.simulation import Cluster, Simulation, simulate


def cluster(
    seconds: float = 600.0, startup: float = 0.0, how: str = "asha", scale: float = 0.2, **facts: Any
) -> Cluster:
    return cluster_of(
        fleet_of({"strong": 2, "weak": 8}, **facts),
        {"net": Family(seconds={"strong": 1, "weak": 4})},
        {"seconds": seconds, "fidelity": {"least": 1, "most": 27, "eta": 3, "how": how}},
        overhead_seconds=lambda values, machine: startup,
        straggler=partial(half_normal, scale),
    )


def promoted(played: Simulation) -> list[Trial]:
    return [trial for trial in played.study.trials if trial.rung and trial.state is TrialState.COMPLETE]


def test_a_promoted_trial_takes_its_start_up_and_the_budget_that_is_not_behind_it() -> None:
    played = simulate(cluster(startup=30.0, checkpoints="shared", scale=0.0), policy="fifo")
    for trial in promoted(played):
        unit = {"strong": 1.0, "weak": 4.0}[str(trial.compute_class)]
        assert trial.outcome.seconds == pytest.approx(30.0 + unit * (trial.budget or 0.0) * 2 / 3)
        assert trial.outcome.continued is True


def test_without_checkpoints_a_promoted_trial_begins_anew() -> None:
    played = simulate(cluster(scale=0.0), policy="fifo")
    assert {trial.outcome.continued for trial in promoted(played)} == {False}
    for trial in promoted(played):
        unit = {"strong": 1.0, "weak": 4.0}[str(trial.compute_class)]
        assert trial.outcome.seconds == pytest.approx(unit * (trial.budget or 0.0))


@pytest.mark.slow
def test_where_each_machine_keeps_its_checkpoints_promotions_go_there_under_cost() -> None:
    def part(policy: str) -> float:
        # At the end of a rung many machines are free, and the next free one is seldom the right one.
        described = cluster(seconds=1000.0, how="halving", checkpoints="machine")
        runs = [simulate(described, policy=policy, speculate=False, seed=seed) for seed in range(8)]
        found = [trial for played in runs for trial in promoted(played)]
        assert len(found) > 100
        return sum(bool(trial.outcome.continued) for trial in found) / len(found)

    assert part("cost") > part("fifo") + 0.2


def test_a_hand_over_is_paid_on_other_machines_only() -> None:
    played = simulate(cluster(checkpoints="shared", handover_seconds=100.0, scale=0.0), policy="fifo")
    host = {(trial.number if trial.origin is None else trial.origin, trial.rung): trial.host for trial in played.study}
    for trial in promoted(played):
        unit = {"strong": 1.0, "weak": 4.0}[str(trial.compute_class)]
        moved = host[trial.origin, int(trial.rung or 0) - 1] != trial.host
        assert trial.outcome.seconds == pytest.approx(unit * (trial.budget or 0.0) * 2 / 3 + 100.0 * moved)


@pytest.mark.slow
def test_high_rungs_go_to_the_strong_class_and_all_slots_stay_busy() -> None:
    def strong(policy: str) -> float:
        played = simulate(cluster(seconds=2000.0, startup=30.0, checkpoints="shared"), policy=policy)
        assert min(played.utilisation.values()) > 0.999
        top = [trial for trial in promoted(played) if trial.rung == 3]
        return sum(trial.compute_class == "strong" for trial in top) / len(top)

    assert strong("cost") > 0.75
    assert strong("fifo") < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["auto", "asha", "hyperband", "dehb", "halving"])
def test_all_ways_to_give_budgets_can_be_played(how: str) -> None:
    played = simulate(cluster(seconds=200.0, how=how, checkpoints="machine"), sampler="auto")
    assert {trial.rung for trial in played.study} == {0, 1, 2, 3}


def test_budgets_that_make_no_ladder_are_refused() -> None:
    with pytest.raises(UsageError, match="fidelity"):
        simulate(cluster(), fidelity={"least": 9, "most": 1})
