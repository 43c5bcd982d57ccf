"""Saving, restoring and replaying a replica, and adopting the work of one that does not return."""
