"""The processes that compute: their connection to the coordinator, their batches, and replicas on this machine."""
