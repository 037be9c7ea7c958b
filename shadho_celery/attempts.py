"""The live attempts of copied trials: one that ends well ends its trial, the others leave it to those that live on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shadho_celery.trial import Trial, TrialState

#: how a trial may look otherwise in another of its attempts
_OWN = ("attempt", "state", "compute_class", "host", "started_at")


class Attempts:
    """Which attempts of a trial live, and how it looks in each.

    Those of trials that were copied are kept here; any other trial is itself its only attempt. A copied trial shows its
    oldest live attempt, under the number of the latest.
    """

    def __init__(self) -> None:
        #: number of a trial -> attempt -> how the trial looks in it
        self._alive: dict[int, dict[int, Trial]] = {}
        #: trials of which an attempt has ended badly
        self._suspects: set[int] = set()

    def of(self, trial: Trial) -> Mapping[int, Trial]:
        """How a trial looks in each of its live attempts, by the attempt's number."""
        return self._alive.get(trial.number) or {trial.attempt: trial}

    def beside(self, trial: Trial) -> Sequence[Trial]:
        """How a trial looks in the live attempts that it does not show."""
        alive = self._alive.get(trial.number, {})
        return [alive[attempt] for attempt in sorted(alive)[1:]]

    def may_add(self, trial: Trial) -> bool:
        """False where a trial has two live attempts, or one has ended badly: the one that lives decides on it."""
        return trial.number not in self._suspects and len(self._alive.get(trial.number, ())) <= 1

    def is_copy(self, trial: Trial, attempt: int) -> bool:
        """Whether a copied trial shows another attempt than this one."""
        return trial.number in self._alive and attempt != min(self._alive[trial.number])

    def add(self, trial: Trial, compute_class: str) -> Trial:
        """How a trial looks in another attempt beside those that live, which is sent to `compute_class`."""
        number = trial.attempt + 1
        attempt = replace(
            trial,
            state=TrialState.QUEUED,
            attempt=number,
            compute_class=compute_class,
            host=None,
            started_at=None,
            live=None,
        )
        self._alive.setdefault(trial.number, {trial.attempt: trial})[number] = attempt
        return attempt

    def kept(self, trial: Trial) -> Sequence[Mapping[str, Any]] | None:
        """What has to be kept with a trial, for its `live`, so that it can be taken up."""
        alive = self._alive.get(trial.number, {})
        if list(alive) in ([], [trial.attempt]):
            return None
        # A state is kept as its word: JSON knows no other.
        return [{name: getattr(one, name) for name in _OWN} | {"state": str(one.state)} for one in alive.values()]

    def take_up(self, trial: Trial) -> None:
        """Know the live attempts of a trial that was copied in an earlier run."""
        if trial.live:
            self._alive[trial.number] = {
                kept["attempt"]: replace(trial, **{**kept, "state": TrialState(kept["state"]), "live": None})
                for kept in trial.live
            }

    def change(self, trial: Trial, attempt: Trial) -> Trial:
        """One of its live attempts looks like that now; the trial as it looks then."""
        if trial.number not in self._alive:
            return attempt
        self._alive[trial.number][attempt.attempt] = attempt
        return self.shown(trial)

    def suspect(self, trial: Trial) -> None:
        """An attempt of a trial has ended badly."""
        self._suspects.add(trial.number)

    def lose(self, trial: Trial, attempt: int) -> bool:
        """Take an attempt away; whether another one of its trial lives."""
        alive = self._alive.get(trial.number, {})
        alive.pop(attempt, None)
        if not alive:
            self.end(trial)
        return bool(alive)

    def end(self, trial: Trial) -> None:
        """None of its attempts lives any more."""
        self._alive.pop(trial.number, None)

    def shown(self, trial: Trial) -> Trial:
        """A copied trial as it looks in the oldest of its live attempts."""
        alive = self._alive[trial.number]
        oldest = alive[min(alive)]
        # Not `evolve`: where it seems to go back from RUNNING to QUEUED another attempt is shown, and none went back.
        return replace(
            trial,
            state=oldest.state,
            compute_class=oldest.compute_class,
            host=oldest.host,
            started_at=oldest.started_at,
        )
