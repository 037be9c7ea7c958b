"""The order of trials from best to worst. Stores and in-memory tables sort in the same order, which a test checks."""

from __future__ import annotations

import math

from shadho_celery.core.trial import Trial, TrialState

#: sort key of a trial; the best trial has the least
Merit = tuple[bool, float, float, bool, float]

#: merit of a trial without a loss
NO_MERIT: Merit = (True, 0.0, 0.0, False, 0.0)


def merit(trial: Trial) -> Merit:
    """Return a sort key, which is least for the best trial. Of trials with equal keys, the least number is the best.

    Trials are sorted by these criteria in turn: the least violation of constraints (0 for feasible trials); the highest
    budget, because losses at different budgets cannot be compared; complete before pruned; the least loss. Trials
    without a loss come last.
    """
    outcome = trial.outcome
    if outcome.loss is None:
        return NO_MERIT
    budget = math.inf if trial.budget is None else trial.budget
    violation = outcome.violation if outcome.constraints else 0.0
    return False, violation, -budget, trial.state is not TrialState.COMPLETE, outcome.loss


def feasible_loss(trial: Trial) -> float:
    """Return the loss by which trials of one budget are compared; infinity unless the trial is COMPLETE and feasible.

    A trial that failed, was pruned or breaks a constraint is therefore not better than any other, and never promoted.
    """
    loss = trial.outcome.loss
    if trial.state is not TrialState.COMPLETE or loss is None or math.isnan(loss) or trial.outcome.violation:
        return math.inf
    return float(loss)
