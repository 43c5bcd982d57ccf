"""The end of a membership: what is handed in and logged, and scripts and optimizers that end without `close`."""
