"""Faults that hit the real processes: what they are, and the subscriber that strikes."""

from ftopt.faults.spec import Fault as Fault
