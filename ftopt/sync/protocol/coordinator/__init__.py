"""The coordinator's side of the protocol: a pure state machine, one file a concern."""
