"""Who comes: whether a hello fits the job, the startup phase, and the way back to it."""
