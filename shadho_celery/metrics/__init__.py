"""Metrics of a run and of a worker, which Prometheus reads over HTTP.

`family` describes a family of metrics: its name, help, labels, and the function that reads its samples. `run` and
`worker` have the lists of families. `server` serves them.

Nothing is counted for the metrics alone that costs time: a scrape reads the records that there are, in a thread of its
own, and the scheduler's loop never waits for it.
"""
