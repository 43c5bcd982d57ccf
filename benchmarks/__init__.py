"""Measurements that take longer than a test: ``python -m benchmarks VERB``, from the repository's root."""
