"""Checks every invariant after every event of random histories of faults, in virtual time. ::

python -m tests.simulation --histories 10000
python -m tests.simulation --replay 4711
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence

from ftopt.cli.shared.output import complain, say
from ftopt.common.plural import count
from ftopt.errors import UserError
from tests.simulation.walk import Coverage
from tests.simulation.walk import run as walk

_PROGRESS_S = 0.5
_PLAIN_PROGRESS_S = 10.0
"""Interval where standard error is not a terminal, and each progress report is a line."""


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if an invariant is violated, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    text = "number of histories (default: %(default)s)"
    parser.add_argument("--histories", metavar="N", type=int, default=1000, help=text)
    text = "seed of the first history (default: %(default)s)"
    parser.add_argument("--seed", metavar="S", type=int, default=0, help=text)
    parser.add_argument("--replay", metavar="SEED", type=int, help="run this one history and print its trace")
    try:
        return run(parser.parse_args(words))
    except UserError as error:
        complain(str(error))
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Runs the histories and prints what occurred in them; returns 1 if an invariant is violated."""
    if arguments.replay is not None:
        return _replay(_natural("--replay", arguments.replay))
    gc.set_threshold(100_000, 50, 50)  # by default it takes an eighth of the time
    wanted, seed = _natural("--histories", arguments.histories, least=1), _natural("--seed", arguments.seed)
    tally, terminal, began_s = Coverage(), sys.stderr.isatty(), time.monotonic()
    shown_s, every_s = began_s, _PROGRESS_S if terminal else _PLAIN_PROGRESS_S
    for done in tally.walk(seed, wanted):
        if time.monotonic() - shown_s >= every_s:
            shown_s = time.monotonic()
            text = f"{done:,} of {wanted:,} histories, {tally.events / (shown_s - began_s):,.0f} events/s"
            sys.stderr.write(f"\r\033[K{text}" if terminal else f"{text}\n")
            sys.stderr.flush()
    wall_s = time.monotonic() - began_s
    if terminal:
        sys.stderr.write("\r\033[K")
    if tally.failed is not None:
        say("\n".join(walk(tally.failed.seed, trace=True).trace))
    say(
        f"{count(tally.histories, 'history', 'histories')} (seeds {seed} to {seed + tally.histories - 1}), "
        f"{tally.events:,} events"
    )
    say(f"{wall_s:.1f} s, {tally.events / wall_s:,.0f} events/s; share of the histories that contain:")
    for line in tally.table():
        say(line)
    if tally.failed is not None:
        again = f"python -m tests.simulation --replay {tally.failed.seed}"
        complain(f"seed {tally.failed.seed}: {tally.failed.failure}; to replay it: {again}")
        return 1
    say("every invariant holds")
    return 0


def _replay(seed: int) -> int:
    history = walk(seed, trace=True)
    say("\n".join(history.trace))
    if history.failure is not None:
        complain(f"seed {seed}: {history.failure}")
        return 1
    say(f"seed {seed}: {history.events:,} events, version {history.versions}, every invariant holds")
    return 0


def _natural(option: str, value: int, *, least: int = 0) -> int:
    if value < least:
        raise UserError(f"{option}={value}; must be an integer of at least {least}")
    return value


if __name__ == "__main__":
    sys.exit(main())
