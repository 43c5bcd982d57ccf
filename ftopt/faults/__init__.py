"""Faults injected into the real processes: what they are, and the subscriber that injects them."""

from ftopt.faults.spec import Fault as Fault
