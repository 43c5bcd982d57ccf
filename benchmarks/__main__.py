"""``python -m benchmarks VERB [options]``."""

from __future__ import annotations

import argparse
import importlib
import sys

from ftopt.cli.main import status_of

VERBS = {
    "run": "what ftopt costs, beside what does the same without it",
    "guard": "whether ftopt's own work has become slower, by CPU time",
    "plan": "what `ftopt plan` predicts, beside what is measured and what is published",
    "codecs": "speed and bytes of the codecs",
    "methods": "every method and codec: held-out loss and bytes",
    "grid": "outer rates, momenta and periods in short runs, in a plain loop: held-out loss",
    "paft": "PAFT and other ways against gradients that go bad",
    "faults": "every fault at every point, with real processes",
    "harm": "one flipped bit, in any place at any moment; false alarms of clean runs",
    "honest": "clean runs with unusual sizes of parameters, rates, losses and rounds: dropped steps",
    "chaos": "a training script under signals, for every method: what its final model has lost",
    "simulate": "how much of the machines' work is kept when they fail, by policy, in virtual time",
    "goodput": "the goodput simulation beside real runs with the same failures",
    "stragglers": "slow replicas: how soon they are known, false alarms, and what they cost",
    "soak": "a job under faults of all kinds for a long time",
}
"""Verb -> what it does. A verb is a module of this package with ``add(parser)`` and ``run(arguments) -> int``."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one verb; returns the exit status."""
    parsed = parser().parse_args(arguments)
    return status_of(lambda: int(importlib.import_module(f"benchmarks.{parsed.verb}").run(parsed)))


def parser() -> argparse.ArgumentParser:
    """Of all verbs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, what in VERBS.items():
        importlib.import_module(f"benchmarks.{verb}").add(verbs.add_parser(verb, help=what, description=what))
    return parser


if __name__ == "__main__":
    sys.exit(main())
