"""Recipes: the schema, where the shipped ones lie, and the loader that reports every error at once."""
