"""Which of two trials is better: decided here. Stores and tables of numbers sort in the same order, held by a test."""

from __future__ import annotations

import math

from shadho_celery.core.trial import Trial, TrialState

#: the least merit is that of the best trial
Merit = tuple[bool, float, float, bool, float]

#: the merit of a trial without a loss
NO_MERIT: Merit = (True, 0.0, 0.0, False, 0.0)


def merit(trial: Trial) -> Merit:
    """Return a sort key, least for the best trial; of equal ones the one with the least number is the best.

    Feasible trials come first, then those that break their constraints least. Of these the highest budget comes first,
    as losses at unlike budgets do not compare; there complete trials come before pruned ones, then the least loss.
    Trials without a loss come last.
    """
    outcome = trial.outcome
    if outcome.loss is None:
        return NO_MERIT
    budget = math.inf if trial.budget is None else trial.budget
    violation = outcome.violation if outcome.constraints else 0.0
    return False, violation, -budget, trial.state is not TrialState.COMPLETE, outcome.loss


def feasible_loss(trial: Trial) -> float:
    """Return the loss by which trials of one budget are compared, infinite unless it is COMPLETE and feasible.

    So what has failed, was pruned or breaks a constraint is no better than any other trial, and is never promoted.
    """
    loss = trial.outcome.loss
    if trial.state is not TrialState.COMPLETE or loss is None or math.isnan(loss) or trial.outcome.violation:
        return math.inf
    return float(loss)
