"""The entry to a job: whether a hello fits it, the startup phase, and the way back to that phase."""
