"""Simulation: a search on simulated machines, which a cluster file describes.

May use: core to scheduler. `cluster_file` reads the description, with the distributions of `params` and
expressions of them. `simulation` runs it, and `executor` runs its trials on a manual clock.

The simulator runs the real scheduler, with its policies, cost model and study, on a manual clock. Its results are
therefore valid for the product. The same seed gives exactly the same result.
"""
