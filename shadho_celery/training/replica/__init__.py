"""Replicas, which compute gradients: connection to the coordinator, batches, optimizer steps, and processes on this
machine.
"""
