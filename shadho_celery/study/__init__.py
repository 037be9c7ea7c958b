"""In-memory state of one search: its trials, their live attempts, its limits; kept in step with the store.

May use: core, store. `study` is the whole of it, `trials` the finished ones, `open` begins a study or carries one on.
Why it is so: events may come late, twice, or for attempts that were given up. A trial gets one result all the same,
and whether a result ends its trial or only its attempt is decided in one place, `Study.tell`. Copies of late trials are
attempts like others.
"""
