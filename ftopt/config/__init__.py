"""Recipes: the schema, the place of the shipped ones, and the loader that reports all errors at once."""
