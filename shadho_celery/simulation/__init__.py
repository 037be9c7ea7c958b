"""Simulation: a search on simulated machines, which a cluster file describes.

`cluster_file` imports the file; `example` is such a file. `simulation` runs the search, and `executor` runs its trials
on a manual clock.

The simulator runs the real scheduler, with its policies, cost model and study, on a manual clock. Its results therefore
show how the real scheduler decides. The same seed gives exactly the same result.
"""
