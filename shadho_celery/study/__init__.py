"""In-memory state of one search: its trials, their live attempts and its limits, written to the store turn by turn.

`state` has the search, `table` has its finished trials, `recorder` collects records of attempts and workers, and `open`
starts or resumes a study.

Events may arrive late, twice, or for attempts that were given up, but a trial gets only one result. Only
`StudyState.tell` decides whether a result ends its trial or only its attempt, and whether a lost trial waits again.
Copies of late trials are ordinary attempts. Of finished trials, only columns of numbers are kept in memory; their
params, metrics and texts are read from the store.
"""
