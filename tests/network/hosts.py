"""Hosts of their own on one machine: network namespaces on a bridge, whose links go down, lose and slow down.

Losses need no netem: a queue of length 0 drops whatever leaves a device, and a wrong hardware address sends what is
meant for one host nowhere. All of it is silent, as a cut cable is: nobody is notified.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import unittest
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_SUBNET = "10.77.0"
_SECOND_SUBNET = "10.78.0"
_NOWHERE = "02:00:00:00:00:01"


class Hosts:
    """Namespaces by host name; made by `hosts`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"ftopt-{os.getpid()}-"
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._switch = f"{self._prefix}switch"
        self._made: list[str] = []

    def make(self) -> None:
        """Namespaces, a bridge, and a cable from each to it."""
        self._namespace(self._switch)
        self._ip(self._switch, "link add br0 type bridge")
        self._ip(self._switch, "link set br0 up")
        for name, number in self._numbers.items():
            host, port = self.namespace(name), f"p{number}"
            self._namespace(host)
            self._ip(self._switch, f"link add {port} type veth peer name eth0 netns {host}")
            self._ip(self._switch, f"link set {port} master br0")
            self._ip(self._switch, f"link set {port} up")
            self._ip(host, f"addr add {self.address(name)}/24 dev eth0")
            self._ip(host, "link set eth0 up")
            self._ip(host, "link set lo up")

    def remove(self) -> None:
        """Takes all of it away; devices go with their namespaces."""
        for name in self._made:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)

    def namespace(self, name: str) -> str:
        return self._prefix + name

    def address(self, name: str) -> str:
        return f"{_SUBNET}.{self._numbers[name]}"

    def second_network(self) -> None:
        """Another bridge, and a cable from each host's ``eth1`` to it."""
        self._ip(self._switch, "link add br1 type bridge")
        self._ip(self._switch, "link set br1 up")
        for name, number in self._numbers.items():
            host, port = self.namespace(name), f"q{number}"
            self._ip(self._switch, f"link add {port} type veth peer name eth1 netns {host}")
            self._ip(self._switch, f"link set {port} master br1")
            self._ip(self._switch, f"link set {port} up")
            self._ip(host, f"addr add {_SECOND_SUBNET}.{number}/24 dev eth1")
            self._ip(host, "link set eth1 up")

    def leave_second(self, name: str, how: str) -> None:
        """This host is off the second network: its ``cable`` is out, the ``device`` down, or the ``address`` gone."""
        match how:
            case "cable":
                self._ip(self._switch, f"link set q{self._numbers[name]} down")
            case "device":
                self._ip(self.namespace(name), "link set eth1 down")
            case _:
                self._ip(self.namespace(name), "addr flush dev eth1")

    def join_second(self, name: str) -> None:
        self._ip(self._switch, f"link set q{self._numbers[name]} up")
        self._ip(self.namespace(name), "link set eth1 up")
        self._ip(self.namespace(name), f"addr replace {_SECOND_SUBNET}.{self._numbers[name]}/24 dev eth1")

    def sent(self, name: str, device: str) -> int:
        """Bytes that a host has sent by a device."""
        shown = _run("ip", "-n", self.namespace(name), "-j", "-s", "link", "show", device)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def down(self, name: str) -> None:
        """The cable is out: both directions."""
        self._ip(self._switch, f"link set p{self._numbers[name]} down")

    def up(self, name: str) -> None:
        self._ip(self._switch, f"link set p{self._numbers[name]} up")

    def lose_from(self, name: str) -> None:
        """Whatever this host sends is lost; it still hears."""
        self._tc(self.namespace(name), "replace dev eth0 root pfifo limit 0")

    def lose_to(self, name: str) -> None:
        """Whatever is sent to this host is lost; it is still heard."""
        self._tc(self._switch, f"replace dev p{self._numbers[name]} root pfifo limit 0")

    def rate(self, name: str, mbit: int) -> None:
        """What this host sends goes through a link of that rate."""
        self._tc(self.namespace(name), f"replace dev eth0 root tbf rate {mbit}mbit burst 64kb latency 300ms")

    def whole(self, name: str) -> None:
        """No loss and no limit any more."""
        with suppress(subprocess.CalledProcessError):
            self._tc(self.namespace(name), "del dev eth0 root")
        with suppress(subprocess.CalledProcessError):
            self._tc(self._switch, f"del dev p{self._numbers[name]} root")

    def cut(self, a: str, b: str) -> None:
        """What ``a`` sends to ``b`` is lost, and nothing else."""
        self._ip(self.namespace(a), f"neigh replace {self.address(b)} lladdr {_NOWHERE} dev eth0 nud permanent")

    def mend(self, a: str, b: str) -> None:
        self._ip(self.namespace(a), f"neigh del {self.address(b)} dev eth0")

    def _namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._made.append(name)

    def _ip(self, namespace: str, command: str) -> None:
        _run("ip", "-n", namespace, *command.split())

    def _tc(self, namespace: str, command: str) -> None:
        _run("ip", "netns", "exec", namespace, "tc", "qdisc", *command.split())


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[Hosts]:
    """Hosts that are gone when the block ends. SkipTest: the machine has no namespaces for us. (Benchmarks run without
    pytest.)"""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise unittest.SkipTest("ip and tc are missing; install iproute2")
    _remove_orphans()
    made = Hosts(names)
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            raise unittest.SkipTest(
                f"no network namespaces here ({error.stderr.strip()}); they need root and a kernel with veth"
            ) from None
        yield made
    finally:
        made.remove()


def _remove_orphans() -> None:
    """Namespaces of processes that were killed before they could remove them."""
    with suppress(subprocess.CalledProcessError):
        for pid in set(re.findall(r"^ftopt-(\d+)-", _run("ip", "netns", "list"), re.MULTILINE)):
            if not Path(f"/proc/{pid}").exists():
                for name in re.findall(rf"^(ftopt-{pid}-\S+)", _run("ip", "netns", "list"), re.MULTILINE):
                    _run("ip", "netns", "del", name)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
