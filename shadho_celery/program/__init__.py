"""Searches in a user's program: `minimize`, `Study`, and hyperopt's interface.

`study` has `minimize` and `Study`, which is also for ask/tell loops; `recorded` loads studies from a store.
`on_workers` runs a study file on workers, `hyperopt_api` has hyperopt's names, `interrupts` warns, and delays Ctrl-C
while records change. Why it is so: arguments are explicit, and checked before anything is recorded. Scheduler, samplers
and store are the same as on a fleet, and trials run in this process unless the caller names workers.
"""
