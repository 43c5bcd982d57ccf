"""Fixtures of this folder."""

from tests.run.running import start as start
