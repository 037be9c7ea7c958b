"""Metrics of a run, a worker and a whole fleet, which Prometheus reads over HTTP.

A family of metrics has a name, a help text, labels, and a function that reads its samples. `server` defines this class
and the server that answers Prometheus. `run`, `worker` and `fleet` list the families.

Metrics cost a run almost no time, because a separate thread reads existing records at each scrape, and the scheduler's
loop never waits for this thread.
"""
