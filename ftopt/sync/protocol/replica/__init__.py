"""The replica's side of the protocol: a pure state machine."""
