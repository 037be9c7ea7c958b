"""In-memory state of one search: its trials, their live attempts, its limits; written to the store turn by turn.

May use: core, store. `state` is the search, `trials` its finished trials, `open` begins or resumes a study.
Why it is so: events may come late, twice, or for attempts that were given up. A trial gets one result all the same.
One place, `StudyState.tell`, decides whether a result ends its trial or only its attempt, and whether a lost trial
waits again. Copies of late trials are attempts like others. Of finished trials only columns are kept in memory; their
params, metrics and texts are read from the store.
"""
