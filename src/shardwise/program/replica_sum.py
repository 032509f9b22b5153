"""The operator that adds a value up over data replicas; only losses that are no mean over samples need it."""

REPLICA_SUM = "replica_sum"
