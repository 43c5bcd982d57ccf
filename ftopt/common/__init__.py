"""Small modules that every other folder may import."""
