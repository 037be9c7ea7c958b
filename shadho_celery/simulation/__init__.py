"""Simulation: a search played on machines that need not exist, described in a cluster file.

May use: core to scheduler. `cluster_file` reads the description, with the laws of `params` and each `expression` of
them, `simulation` plays it, `executor` runs its trials on a manual clock.
Why it is so: the simulator is the scheduler on a manual clock, with its policies, cost model and study. Its
results are valid for the product, because it runs the product; the same seed gives the same result to the bit.
"""
