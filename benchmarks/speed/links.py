"""Replicas behind links of a given rate: each in its own network namespace, limited by `tc tbf`."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.speed.crew import coordinator
from benchmarks.speed.figures import NotHereError
from benchmarks.speed.orders import Crew, crew
from tests.network.hosts import Hosts, hosts


class NoLinksError(NotHereError):
    """The machine has no network namespaces for us."""


class Linked:
    """Replicas and their links; made by `linked`."""

    def __init__(self, crew: Crew, net: Hosts, names: list[str]) -> None:
        self.crew = crew
        self._net = net
        self._names = names

    def rate(self, mbit: int) -> None:
        """What each replica sends goes through a link of that rate (Mbit/s) from now on."""
        for name in self._names:
            self._net.rate(name, mbit)


@contextmanager
def namespaces(names: list[str]) -> Iterator[Hosts]:
    """Hosts that are gone when the block ends.

    Raises:
        NoLinksError: there can be none.
    """
    with ExitStack() as stack:
        try:
            net = stack.enter_context(hosts(names))
        except unittest.SkipTest as reason:
            raise NoLinksError(str(reason)) from None
        yield net


@contextmanager
def linked(module: str, replicas: int, told: Mapping[str, Any]) -> Iterator[Linked]:
    """A coordinator and replicas, ``python -m MODULE``; they are gone when the block ends.

    Args:
        module: what a replica runs. It takes orders; its argument is ``told`` with ``url``, ``replica`` and ``host``.
        replicas: how many.
        told: the same for all.

    Raises:
        NoLinksError: there can be no namespaces.
    """
    names = [f"r{i}" for i in range(replicas)]
    with ExitStack() as stack:
        net = stack.enter_context(namespaces(["head", *names]))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        within = {name: ("ip", "netns", "exec", net.namespace(name)) for name in ("head", *names)}
        url = stack.enter_context(coordinator(folder, host=net.address("head"), prefix=within["head"]))
        each = [{**told, "url": url, "replica": name, "host": net.address(name)} for name in names]
        members = stack.enter_context(crew(module, each, prefixes=[within[name] for name in names]))
        yield Linked(members, net, names)
