"""Executors run trials: the Protocol, and those that need no fleet.

May use: core, space, store, objective, predictors, study. `base` is the role. `inline` runs trials in this process, or
hands them to the caller. The fleet's executor is in `fleet`, the simulated executor in `simulation`.

The scheduler does not know queues: it submits attempts and polls events. Every implementation passes the same contract
suite.
"""
