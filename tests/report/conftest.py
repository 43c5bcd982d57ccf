"""Fixtures of this folder."""

from tests.job.running import start as start
