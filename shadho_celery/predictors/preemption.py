"""Preemption of machines: how often it happens in a class, and what it costs a trial that has no checkpoint."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: hours of a worker without a preemption that count beside those that were observed
PRIOR_HOURS = 1.0
#: maximum of the preemptions expected during a trial: of more, the seconds would be too far apart to compare
MOST_EXPECTED = 20.0


def preemption_rate(preempted: int, hours: float) -> float:
    """Return the preemptions an hour to expect of one worker, after this many in `hours` of all workers of its class.

    A trial runs on one worker, and all slots of a worker end together, so its slots do not count. The rate is
    n / (h + PRIOR_HOURS): the posterior mean of a Poisson rate, where the prior is the limit of a gamma distribution
    whose shape is 0 and whose rate is PRIOR_HOURS. Source: Gelman et al., "Bayesian Data Analysis", 2013, section 2.6.
    """
    return preempted / (hours + PRIOR_HOURS)


def charged(log_seconds: Array, rates: Array) -> Array:
    """Return the log of the expected seconds until trials that begin again after each preemption have ended.

    `rates` are the preemptions a second of the classes, the last axis of `log_seconds`. The expected seconds of a trial
    of T seconds are (exp(r T) - 1) / r, without those until the next start. Source: Daly, "A higher order estimate of
    the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006, with one interval.
    """
    expected = np.clip(np.exp(log_seconds) * rates, 1e-12, MOST_EXPECTED)
    return np.asarray(log_seconds + np.log(np.expm1(expected) / expected))
