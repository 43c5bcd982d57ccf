"""A replica's log lines about the coordinator, the other replicas, and rounds without its steps."""
