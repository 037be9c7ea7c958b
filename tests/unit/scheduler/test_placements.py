"""What placement compared is, to the bit, what is recorded and shown, and what a worker is told about the seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.families import Family, cluster_of, fleet_of

from shadho_celery.core.records import Placed
from shadho_celery.core.trial import Attempt, Trial
from shadho_celery.placement.model import CostModel
from shadho_celery.placement.pool import Pool
from shadho_celery.simulation.simulation import Cluster, Machine, simulate
from shadho_celery.study.recorder import Recorder


def by_width(params: Mapping[str, Any], machine: Machine) -> float:
    return 20.0 + {"gpu": 10.0, "cpu": 400.0}[machine.compute_class] * float(params["w"])


def crossing(params: Mapping[str, Any], machine: Machine) -> float:
    return 90.0 - 30.0 * float(params["w"]) if machine.compute_class == "gpu" else 10.0 + 20.0 * float(params["w"])


def cluster(*laws: Callable[[Mapping[str, Any], Machine], float], **settings: Any) -> Cluster:
    params = {"w": lambda label: hp.uniform(label, 0, 1)}
    families = {law.__name__: Family(seconds=law, params=params) for law in laws}
    return cluster_of(fleet_of({"gpu": 4, "cpu": 12}), families, {"trials": 300, "sampler": "random", **settings})


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Attempt, Mapping[str, Placed]]]:
    """The attempts that are recorded, each with what was known of the live classes."""
    found: list[tuple[Attempt, Mapping[str, Placed]]] = []
    note_placement = Recorder.note_placement

    def spied(self: Recorder, attempt: Attempt, known: Mapping[str, Placed]) -> None:
        found.append((attempt, known))
        note_placement(self, attempt, known)

    monkeypatch.setattr(Recorder, "note_placement", spied)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("laws", [[by_width], [by_width, crossing]], ids=["flat", "split"])
def test_the_recorded_seconds_are_those_by_which_a_trial_drawn_ahead_was_chosen(
    laws: Sequence[Callable[[Mapping[str, Any], Machine], float]],
    recorded: Sequence[tuple[Attempt, Mapping[str, Placed]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: dict[int, list[float]] = {}
    take = Pool.take

    def spied(self: Pool, place: int) -> Trial:
        seconds = np.exp(self.costs().log_seconds[place]).tolist()
        trial = take(self, place)
        compared[trial.number] = seconds
        return trial

    monkeypatch.setattr(Pool, "take", spied)
    simulate(cluster(*laws), seed=1)
    first = {attempt.number: known for attempt, known in recorded if attempt.attempt == 1}
    assert len(compared) > 200
    for number, seconds in compared.items():
        assert [each.seconds for each in first[number].values()] == seconds
    assert len({tuple(seconds) for seconds in compared.values()}) > 200, "params count"


@pytest.mark.slow
def test_the_recorded_seconds_of_a_promoted_trial_are_those_by_which_it_was_chosen(
    recorded: Sequence[tuple[Attempt, Mapping[str, Placed]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any machine of the class, or on the one with its checkpoint."""
    compared: dict[tuple[int, float], tuple[list[str], list[list[float]]]] = {}
    predict = CostModel.promoted_seconds

    def spied(self: CostModel, trial: Trial, classes: Sequence[str], home: str) -> Any:
        found = predict(self, trial, classes, home)
        compared[int(trial.origin or 0), trial.budget or 0.0] = [*classes], found.tolist()
        return found

    monkeypatch.setattr(CostModel, "promoted_seconds", spied)
    simulate(cluster(by_width, fidelity={"least": 1, "most": 9, "how": "asha"}), seed=1)
    promoted = [(each, known) for each, known in recorded if each.origin is not None and each.attempt == 1]
    assert len(promoted) > 20
    for attempt, known in promoted:
        names, (anywhere, at_home) = compared[int(attempt.origin or 0), attempt.budget or 0.0]
        column = names.index(str(attempt.compute_class))
        seconds = (anywhere if attempt.only_on is None else at_home)[column]
        assert known[str(attempt.compute_class)].seconds == seconds
