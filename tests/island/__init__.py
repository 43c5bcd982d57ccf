"""Replicas of several ranks, as torchrun starts them."""
