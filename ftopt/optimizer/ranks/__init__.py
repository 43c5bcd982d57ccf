"""The ranks that a replica consists of: one process alone, or several that hold slices."""
