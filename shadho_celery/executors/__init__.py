"""Executors run trials: the Protocol, and those that need no fleet.

May use: core, space, store, objective, predictors, study. `base` is the role, `inline` runs trials in this process,
`by_hand` hands them to the caller. The fleet's executor is in `fleet`, the simulated one in `simulation`.
Why it is so: the scheduler knows nothing of queues. It submits attempts and polls events, and every implementation
passes one contract suite.
"""
