"""Searches in a user's program: `minimize`, `Study`, and hyperopt's interface.

`study` has `minimize`, and `Study`, which also supports ask/tell loops. `recorded` loads studies from a store and shows
progress; `optuna_study` copies a study for Optuna. `on_workers` runs a study file on workers. `hyperopt_api` has
hyperopt's names. `interrupts` delays Ctrl-C while records change, and has `warn`. Arguments are explicit, and checked
before anything is recorded. Scheduler, samplers and store are the same as on a fleet, but trials run in this process
unless the caller names workers.
"""
