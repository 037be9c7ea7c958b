"""Processes that compute gradients: connection to the coordinator, batches, optimizer steps, and local processes."""
