"""Simulation: a search on simulated machines, which a cluster file describes.

`simulation` imports the file, runs the search, and can keep it in a store; `example` is such a file. `executor`
simulates the workers and their trials on a manual clock.

The scheduler is the real one, with its policies, cost model and study. So the results show how the real scheduler
decides. The same seed gives exactly the same result.
"""
