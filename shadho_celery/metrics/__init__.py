"""Metrics of a run and of a worker, which Prometheus reads over HTTP.

`server` has the class of a family of metrics, with its name, help, labels, and the function that reads its samples, and
answers Prometheus. `run` and `worker` have the lists of families.

Metrics cost a run almost no time: a scrape reads records that exist anyway, in a thread of its own, and the scheduler's
loop never waits for it.
"""
