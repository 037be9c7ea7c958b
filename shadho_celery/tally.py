"""The trials of a study as they are now, and what they add up to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from shadho_celery.trial import Trial, TrialState

_S = TrialState


def merit(trial: Trial) -> tuple[float, float]:
    """What COMPLETE trials are ordered by, the best first: losses compare at one budget only, the highest counts."""
    return -(math.inf if trial.budget is None else trial.budget), math.inf if trial.loss is None else trial.loss


class Tally:
    """Trials by number, and sums over them that are right after every change.

    Of a compute class live attempts are counted: a trial with two of them counts, and takes slots, twice.
    """

    def __init__(self) -> None:
        #: finished trials in the order in which their results came
        self.trials: list[Trial] = []
        #: the COMPLETE trial with the least loss, of those with the highest budget
        self.best: Trial | None = None
        self._by_number: dict[int, Trial] = {}
        self._sent: dict[int, Trial] = {}
        #: of trials with several live attempts, how they look in those that they do not show
        self._beside: dict[int, Sequence[Trial]] = {}
        self._by_state: Counter[TrialState] = Counter()
        self._by_class: Counter[tuple[str | None, TrialState]] = Counter()
        self._by_subspace: Counter[tuple[str, TrialState]] = Counter()
        self._taken: Counter[str | None] = Counter()
        #: by subspace and slots, the trials that wait
        self._waiting_by_width: dict[str, Counter[int]] = {}
        self._asked: Counter[str] = Counter()
        self._best_of: dict[str, Trial] = {}

    def trial(self, number: int) -> Trial:
        """The trial of that number, in whatever state; KeyError where there is none."""
        return self._by_number[number]

    def __len__(self) -> int:
        """Trials asked for so far."""
        return len(self._by_number)

    def __iter__(self) -> Iterator[Trial]:
        """All trials in the order of their numbers, finished or not."""
        return iter(self._by_number.values())

    def count(self, *states: TrialState, compute_class: str | None = None, subspace: str | None = None) -> int:
        """Trials in one of `states`; of one compute class or of one subspace where that is given.

        Of a class, every live attempt that was sent there counts.
        """
        if compute_class is not None:
            return sum(self._by_class[compute_class, state] for state in states)
        if subspace is not None:
            return sum(self._by_subspace[subspace, state] for state in states)
        return sum(self._by_state[state] for state in states)

    def count_wider(self, slots: int, subspace: str) -> int:
        """WAITING trials of a subspace that take more than so many slots."""
        return sum(n for width, n in self._waiting_by_width.get(subspace, {}).items() if width > slots)

    @property
    def counted(self) -> int:
        """Trials that count against the `trials` limit."""
        return self.count(_S.COMPLETE, _S.PRUNED, _S.FAILED)

    @property
    def in_flight(self) -> int:
        """Trials that were sent and have not ended."""
        return len(self._sent)

    @property
    def sent(self) -> list[Trial]:
        """Trials that were sent and have not ended, the one sent last at the end."""
        return list(self._sent.values())

    @property
    def copies(self) -> int:
        """Live attempts beside the first one of their trial."""
        return sum(map(len, self._beside.values()))

    def taken(self, compute_class: str) -> int:
        """Slots of a class that its trials in flight take."""
        return self._taken[compute_class]

    @property
    def compute_classes(self) -> list[str]:
        """Classes that trials were sent to."""
        return sorted({name for name, _ in self._by_class if name is not None})

    @property
    def subspaces(self) -> list[str]:
        """Subspaces that trials were drawn in."""
        return sorted(self._asked)

    def asked(self, subspace: str) -> int:
        """Trials drawn in `subspace` so far, cancelled ones included; those that carry another on were not drawn."""
        return self._asked[subspace]

    def best_of(self, subspace: str) -> float | None:
        """The least loss in `subspace`, at the highest budget that it was given."""
        best = self._best_of.get(subspace)
        return None if best is None else best.loss

    def _put(self, trial: Trial, beside: Sequence[Trial] = ()) -> None:
        """Make `trial` the current version of itself; `beside` it live the attempts that it does not show."""
        before = self._by_number.get(trial.number)
        self._by_number[trial.number] = trial
        if before is None:
            self._asked[trial.subspace] += trial.origin is None
        else:
            self._add(before, -1)
        self._add(trial, +1)
        self._put_beside(trial.number, beside)
        if trial.state in (_S.QUEUED, _S.RUNNING):
            self._sent[trial.number] = trial
        else:
            self._sent.pop(trial.number, None)
        if trial.state.is_finished:
            self.trials.append(trial)
        if trial.state is _S.COMPLETE and trial.loss is not None:
            self._compare(trial)

    def _put_beside(self, number: int, beside: Sequence[Trial]) -> None:
        for attempt in self._beside.pop(number, ()):
            self._add_slots(attempt, -1)
        if beside:
            self._beside[number] = beside
            for attempt in beside:
                self._add_slots(attempt, +1)

    def _add(self, trial: Trial, by: int) -> None:
        self._by_state[trial.state] += by
        self._by_subspace[trial.subspace, trial.state] += by
        if trial.state is _S.WAITING:
            self._waiting_by_width.setdefault(trial.subspace, Counter())[trial.slots] += by
        self._add_slots(trial, by)

    def _add_slots(self, trial: Trial, by: int) -> None:
        self._by_class[trial.compute_class, trial.state] += by
        if trial.state in (_S.QUEUED, _S.RUNNING):
            self._taken[trial.compute_class] += by * trial.slots

    def _compare(self, trial: Trial) -> None:
        """See whether a trial is the best, of all or of its subspace; the first of equals is."""
        of_it = self._best_of.get(trial.subspace)
        if of_it is None or merit(trial) < merit(of_it):
            self._best_of[trial.subspace] = trial
        if self.best is None or merit(trial) < merit(self.best):
            self.best = trial
