"""Metrics of one replica for experiment trackers: Weights & Biases, TensorBoard."""
