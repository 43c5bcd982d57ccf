"""The end of a membership: handing in steps, logging, and scripts and optimizers that end without `close`."""
