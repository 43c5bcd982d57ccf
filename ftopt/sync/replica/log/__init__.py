"""What a replica's log says of the coordinator, of the other replicas, and of rounds without its steps."""
