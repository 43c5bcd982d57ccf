"""``python -m tests.programs 17 [18 ...]``, or ``100:200``: runs programs; of the first that fails a smaller one."""

from __future__ import annotations

import sys

from tests.programs.program import Program, program_of
from tests.programs.running import failure, quiet, run_all, script

TRIES = 4
"""Threads take turns as they like: a program that has failed once may have to be run again."""


def fails(program: Program, tries: int = TRIES) -> str:
    """What goes wrong, "" if nothing does."""
    with quiet():
        return next(filter(None, (failure(program) for _ in range(tries))), "")


def shrink(program: Program, text: str) -> tuple[Program, str]:
    """The smallest program found that fails, and how."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in program.smaller():
            if found := fails(candidate):
                program, text, smaller = candidate, found, True
                break
    return program, text


def main(arguments: list[str]) -> int:
    seeds: list[int] = []
    shrinks = "--as-it-is" not in arguments
    for each in arguments:
        if not each.startswith("--"):
            start, _, stop = each.partition(":")
            seeds += range(int(start), int(stop)) if stop else [int(start)]
    for program, text in run_all(map(program_of, seeds), at_once=1 if len(seeds) == 1 else 8):
        print(f"{text}\n\n{script(program)}\n", flush=True)  # noqa: T201
        if "--all" not in arguments:
            break
    else:
        return 0
    if shrinks:
        program, text = shrink(program, text)
        print(f"smaller:\n\n{text}\n\n{script(program)}", flush=True)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
