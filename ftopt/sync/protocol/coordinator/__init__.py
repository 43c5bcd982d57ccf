"""The coordinator's side of the protocol: a pure state machine, one file per concern."""
