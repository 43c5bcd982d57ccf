"""Reverting the last step of an optimizer."""
