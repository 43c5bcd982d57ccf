"""The ranks of a replica: one process alone, or several that hold slices."""
