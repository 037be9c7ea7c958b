"""Which trial a free slot may work on next, where trials depend on one another: ladders of budgets, round after round.

Ask, add, tell: values in, decisions out. A trial is one evaluation at one budget, so that a study's "one result a
trial" is one result on each rung.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shadho_celery.errors import UsageError
from shadho_celery.trial import Trial, TrialState

#: trials of one round at most: with more, hardly anybody would live to see the second one
LARGEST = 100_000
#: whole numbers up to here are told apart as floats, and every store takes them
_EXACT = 2**53


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A trial that may be sent now."""

    #: how much of the fidelity it is to be given; None for all of it
    budget: float | None = None
    rung: int | None = None
    #: number of the trial whose params, seed and checkpoints it carries on; None where a new one is to be drawn
    origin: int | None = None
    #: trials that are drawn anew until the end of its round, those of all earlier rounds and those that were cancelled
    #: included; None: no such number
    drawn: int | None = None


class Rounds(Protocol):
    """Decides which trials there are to be, from what came of those there were."""

    def ask(self) -> Wanted | None:
        """What may be sent now; None as long as results have to be waited for. To be asked again changes nothing."""

    def add(self, trial: Trial) -> None:
        """A trial came of what was asked for. All trials of an earlier run are told first, in their order."""

    def tell(self, trial: Trial) -> None:
        """A trial has finished; one that is not of the present round is remembered by nobody."""

    @property
    def size(self) -> int | None:
        """Trials of the present round; None where there are no rounds."""

    @property
    def left(self) -> float:
        """Trials of the present round that are not added yet; infinitely many where there are no rounds."""


class Endless:
    """No rounds: every trial is a new one, and is given all of the fidelity."""

    size: int | None = None
    left: float = math.inf

    def ask(self) -> Wanted | None:
        return Wanted()

    def add(self, trial: Trial) -> None:
        pass

    def tell(self, trial: Trial) -> None:
        pass


@dataclass
class _Rung:
    """The trials of the present bracket at one budget."""

    budget: float
    #: results after which the next rung begins
    wanted: int
    #: trials that are sent to get them
    sent: int
    #: the origins they have, the best first; None where they are drawn anew
    chosen: list[int] | None = None
    #: number of a trial -> its origin
    origins: dict[int, int] = field(default_factory=dict)
    #: (loss, origin) in the order in which they came; infinite where there is none
    losses: list[tuple[float, int]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.losses) >= min(self.wanted, self.sent)

    def best(self, most: int) -> list[int]:
        """The best `most` origins of the first `wanted` results; those that failed are not among them."""
        return [origin for loss, origin in sorted(self.losses[: self.wanted])[:most] if loss < math.inf]


class SuccessiveHalving:
    """Many trials at a small budget, the best of them at a larger one, and so on; then the next bracket begins.

    A bracket's rungs have the budgets ``most * eta**-k`` down to `least`, and ``eta**k`` trials; the best 1 / eta of a
    rung go on to the next one. None goes on before its rung is complete: which trials do depends on their losses
    alone. A failed trial counts as the worst, a cancelled one not at all. Source: Jamieson and Talwalkar,
    "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016; its form here is bracket
    s_max of Li et al., "Hyperband", JMLR 18, 2018.

    With `backups` b every rung gets n + b *different* trials, and the next one begins after the first n results: slow
    trials are not waited for. That is biased where good trials are slow, as large models often are: those that come
    late have no chance to go on, however good they turn out to be. Their results are kept in the study all the same.
    Copies of late trials (`speculation.py`) save most of that waiting and are not biased.
    """

    def __init__(self, least: float, most: float, eta: int = 3, backups: int = 0) -> None:
        """Budgets from `least` to `most`. Raises UsageError where they make no ladder."""
        _check(least, most, eta, backups)
        top = _height(least, most, eta)
        self._ladder = [(whole(most / eta**below), eta**below) for below in range(top, -1, -1)]
        self._backups = backups
        self._drawn = 0
        self._begin()

    @property
    def size(self) -> int:
        return self._rungs[self._place].sent

    @property
    def left(self) -> float:
        return self.size - len(self._rungs[self._place].origins)

    def ask(self) -> Wanted | None:
        rung = self._rungs[self._place]
        if self.left <= 0:
            return None
        if rung.chosen is None:
            return Wanted(budget=rung.budget, rung=0, drawn=self._drawn)
        there = set(rung.origins.values())
        origin = next(origin for origin in rung.chosen if origin not in there)
        return Wanted(budget=rung.budget, rung=self._place, origin=origin)

    def add(self, trial: Trial) -> None:
        place = self._place_of(trial)
        if place is None:
            return
        if trial.state is TrialState.CANCELLED:
            self._drawn += place == 0
            return
        if place == 0 and (self._has_moved_on or len(self._rungs[0].origins) >= self._rungs[0].sent):
            # Trials of earlier runs are added before it is told how they ended.
            self._begin()
        self._has_moved_on |= place > 0
        self._rungs[place].origins[trial.number] = trial.number if trial.origin is None else trial.origin

    def tell(self, trial: Trial) -> None:
        place = self._place_of(trial)
        if place is None or trial.number not in self._rungs[place].origins:
            return
        rung = self._rungs[place]
        if trial.state is TrialState.CANCELLED:
            # It tells nothing of its params: whoever carries the study on has it sent again, or another one drawn.
            del rung.origins[trial.number]
            self._drawn += place == 0
            return
        is_complete = trial.state is TrialState.COMPLETE and trial.loss is not None
        rung.losses.append((trial.loss if is_complete else math.inf, rung.origins[trial.number]))  # type: ignore[arg-type]
        self._advance()

    def _begin(self) -> None:
        """Begin a bracket."""
        self._rungs = [_Rung(budget, wanted, wanted + self._backups) for budget, wanted in self._ladder]
        self._place = 0
        self._has_moved_on = False
        self._drawn += self._rungs[0].sent

    def _advance(self) -> None:
        """Go on to the first rung that is not complete, maybe that of the next bracket."""
        while self._rungs[self._place].is_complete:
            if self._place == len(self._rungs) - 1:
                self._begin()
                return
            last, self._place = self._rungs[self._place], self._place + 1
            rung = self._rungs[self._place]
            rung.chosen = last.best(rung.sent)
            rung.sent = len(rung.chosen)

    def _place_of(self, trial: Trial) -> int | None:
        """The rung that a trial stands on; None for a trial of another ladder, in an earlier run perhaps."""
        if trial.rung is None or trial.rung >= len(self._ladder) or trial.budget != self._ladder[trial.rung][0]:
            return None
        return trial.rung


def whole(budget: Any) -> Any:
    """A budget as objectives get it: an int where it is a whole number, so that ``range(budget)`` works.

    Stores keep budgets as floats, and a ladder is made by division.
    """
    return int(budget) if isinstance(budget, float) and budget.is_integer() and budget <= _EXACT else budget


def make_rounds(settings: Mapping[str, Any] | None) -> Rounds:
    """The rounds that ``STUDY["rungs"]`` asks for; none without it. Raises UsageError for what makes no ladder."""
    if settings is None:
        return Endless()
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"rungs: {_short(settings)} is no ladder; give a dict such as {{'least': 1, 'most': 9, 'eta': 3}}"
        )
    unknown = sorted(map(str, settings.keys() - _SETTINGS))
    missing = sorted({"least", "most"} - settings.keys())
    if unknown or missing:
        wrong = f"there is no {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
        raise UsageError(f"rungs: {wrong}; known are {', '.join(_SETTINGS)}")
    return SuccessiveHalving(**settings)


#: what ``STUDY["rungs"]`` may say
_SETTINGS = ("least", "most", "eta", "backups")


def _height(least: float, most: float, eta: int) -> int:
    """Rungs above the lowest one."""
    # Without the small number some ladders would lack a rung: log(243) / log(3) is 4.999...
    return math.floor(math.log(most / least) / math.log(eta) + 1e-9)


def _check(least: Any, most: Any, eta: Any, backups: Any) -> None:
    for name, value in (("least", least), ("most", most)):
        # Python's ints may be larger than any float.
        if not _is_a(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise UsageError(f"rungs: {name!r} is {_short(value)}; a budget is a number above 0 that a float can hold")
    for name, value, bound in (("eta", eta, 2), ("backups", backups, 0)):
        if not _is_a(value, int) or not bound <= value <= LARGEST:
            raise UsageError(f"rungs: {name!r} is {_short(value)}; it must be a whole number from {bound} to {LARGEST}")
    if most / least + backups > LARGEST:
        raise UsageError(f"rungs: from {least:g} to {most:g} takes over {LARGEST} trials a round; raise 'least'")
    if most <= least or _height(least, most, eta) < 1:
        raise UsageError(f"rungs: from {least:g} to {most:g} there is one rung only; let 'most' be {eta} times 'least'")


def _is_a(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """A value for a message; Python refuses to write ints of thousands of digits."""
    try:
        shown = repr(value)
    except ValueError:
        return "too large"
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
