"""The coordinator, which owns the model: it admits replicas, gathers their vectors, commits steps and writes
checkpoints.
"""
