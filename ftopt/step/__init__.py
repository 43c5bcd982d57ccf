"""The outer step of one process: from the inner optimizer's parameters to the next committed state, and back."""
