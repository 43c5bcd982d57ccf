"""Processes that read one order per line and answer each with a line of JSON, so that they can be measured in turns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ftopt.cli.shared.output import say


class Crew:
    """The processes, as the benchmark sees them; made by `crew`."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def all(self, order: str) -> list[Any]:
        """What all of them answer to an order that they carry out together.

        Raises:
            RuntimeError: one has ended.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        return [_answer(process) for process in self._processes]


@contextmanager
def crew(module: str, arguments: Sequence[Any], *, prefixes: Sequence[Sequence[str]] | None = None) -> Iterator[Crew]:
    """``PREFIX python -m MODULE ARGUMENTS`` (JSON) for each of ``arguments``; they are gone when the block ends."""
    processes = []
    try:
        for each, prefix in zip(arguments, prefixes or [()] * len(arguments), strict=True):
            command = [*prefix, sys.executable, "-m", module, json.dumps(each)]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield Crew(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def obey(carry_out: Callable[..., Any]) -> None:
    """In such a process: calls ``carry_out(verb, *numbers)`` for each order, until there are none."""
    for line in sys.stdin:
        verb, *numbers = line.split()
        answer(carry_out(verb, *map(int, numbers)))


def answer(found: Any) -> None:
    """In such a process: the answer to one order, a list or an object."""
    say(json.dumps(found))


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("{", "[", "null")):  # others speak as well
            return json.loads(line)
    raise RuntimeError(f"{' '.join(map(str, process.args))[:200]} ended with status {process.wait()}")  # type: ignore[arg-type]
