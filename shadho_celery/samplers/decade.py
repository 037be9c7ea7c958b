"""How long trials take, as a decade, and what a proposal of `auto` may therefore cost.

The decade follows from the first trials of a study and is recorded once. All rules are functions of the decade and of
counts, never of a clock, so equal seeds and equal decades give equal studies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from shadho_celery.core.trial import WELL, Trial

#: number of the first trials whose median duration determines the decade; until then, EARLY of them determine it
FIRST, EARLY = 20, 10
#: least decade in seconds, which also stands for shorter trials
LEAST = 0.01
#: a proposal may take this part of the decade, and LEAST_MS milliseconds in any case, on average
PART, LEAST_MS = 0.1, 2.0
#: allowed milliseconds below which `gp` makes quick proposals
QUICK_MS = 50.0
#: milliseconds of a quick proposal by `gp` for the loss, and for each constraint: of a space without labels, and for
#: each label; they grow by the same amount with every GP_RESULTS results, up to GP_MOST of them
GP_MS, GP_MS_PER_LABEL, GP_RESULTS, GP_MOST = 3.0, 0.25, 100, 300
#: factors on them: of full proposals, and of quick ones, in reserve for the first trials, fits and slower machines
FULL, RESERVE = 3.0, 6.0
#: seconds of a typical trial, in those of its decade
TYPICAL = 6.0
#: milliseconds of a proposal by `tpe`: of a space without labels, and for each label
TPE_MS, TPE_MS_PER_LABEL = 0.3, 0.03


class Decade:
    """Decade of the seconds of a study's trials. All samplers `auto` of a study share one."""

    def __init__(self, recorded: float | None = None) -> None:
        """`recorded` is the decade in the study's record, such as 0.1; None if it is not known yet."""
        #: decade of the first trials, for the study's record
        self.recorded = recorded
        #: decade by what is known so far; None at the start
        self.seconds = recorded
        self._first: list[float] = []

    def tell(self, trials: Sequence[Trial]) -> None:
        """Count finished trials. Failed and cancelled ones are ignored, because they may have ended at once."""
        if self.recorded is not None:
            return
        told = [trial.outcome.seconds for trial in trials if trial.state in WELL]
        self._first += [seconds for seconds in told if seconds is not None]
        if len(self._first) >= EARLY:
            # By the first ones only: a resumed study may learn of more of them at once.
            self.seconds = decade_of(self._first[: FIRST if len(self._first) >= FIRST else EARLY])
        if len(self._first) >= FIRST:
            self.recorded = self.seconds

    def __str__(self) -> str:
        if self.seconds is None:
            return "an unknown time"
        return f"{self.seconds:g} to {10 * self.seconds:g} s" if self.seconds > LEAST else f"under {10 * LEAST:g} s"

    @property
    def allowed_ms(self) -> float:
        """Milliseconds that a proposal may take on average; infinite until the decade is known."""
        return math.inf if self.seconds is None else max(LEAST_MS, 1000 * PART * self.seconds)


def decade_of(seconds: Sequence[float]) -> float:
    """Return the greatest of .01, .1, 1, 10 and so on that is not above the median, or .01."""
    return float(f"1e{math.floor(math.log10(max(statistics.median(seconds), LEAST)))}")


def turn_of_gp(allowed_ms: float, labels: int, results: int, functions: int = 1) -> int:
    """Return k if `gp` may propose the params of every k-th trial and `tpe` of the others; 0 if `gp` takes too long.

    `results` and `functions` are the numbers of results and of modelled functions.
    """
    spare = allowed_ms - TPE_MS - TPE_MS_PER_LABEL * labels
    factor = RESERVE if allowed_ms < QUICK_MS else FULL
    by_gp = factor * _by_gp(labels, results, functions)
    return 0 if spare <= 0 else max(1, math.ceil(by_gp / spare))


def keeps_up(seconds: float | None, trials: int, labels: int, results: int, functions: int = 1) -> bool:
    """Return True if full proposals by `gp` for so many trials take at most a tenth of the seconds of one.

    Then slots hardly wait for them. `seconds` is the decade of the trials, and None if it is unknown. The other
    arguments are as in `turn_of_gp`.
    """
    tenth_ms = 1000 * PART * (seconds or 0.0)
    return tenth_ms >= QUICK_MS and trials * FULL * _by_gp(labels, results, functions) <= TYPICAL * tenth_ms


def allows_outlook(allowed_ms: float, subspaces: int, labels: int, results: int, functions: int = 1) -> bool:
    """Return True if `gp` may estimate after each result what it expects of so many subspaces.

    For one subspace this takes as long as a quick proposal. The other arguments are as in `turn_of_gp`.
    """
    return allowed_ms >= max(QUICK_MS, subspaces * _by_gp(labels, results, functions))


def _by_gp(labels: int, results: int, functions: int) -> float:
    """Return the milliseconds of a quick proposal by `gp`."""
    growth = 1 + min(results, GP_MOST) // GP_RESULTS
    return (GP_MS + GP_MS_PER_LABEL * labels) * growth * functions
