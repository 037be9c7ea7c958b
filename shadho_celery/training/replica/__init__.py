"""The processes that compute gradients: connection to the coordinator, batches, and local replica processes."""
