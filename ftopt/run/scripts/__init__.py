"""``ftopt launch``: replicas that run the user's own script."""
