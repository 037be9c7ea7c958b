"""In-memory state of one search: its trials, their live attempts and its limits, written to the store turn by turn.

`state` has the search and its limits, `table` its finished trials (in memory only as rows of numbers), and `front`
Pareto fronts and their hypervolume. `recorder` collects records of attempts and workers. `keeper` finds folders of
trials that are not needed. `open` starts or resumes a study.

Events may arrive late, twice, or for attempts that were given up, but a trial gets only one result. Two functions
may set `Result.retry`, which makes the trial run again: the executor's circuit breaker, then
`Scheduler._with_retry_and_hint` (a lost rank, or `MemoryFit.retry`). Otherwise `StudyState.tell` ends the trial or only
the attempt, by the rule in `core.attempts.Attempts.finish`.
"""
