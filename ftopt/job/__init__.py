"""The job that ``ftopt run`` does: the model, one replica's training loop, and the runner of a whole job."""
