"""Islands whose ranks are on hosts of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.network.hosts import Hosts, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COORDINATOR = "coordinator"
ISLANDS = {"r0": ("a0", "a1"), "r1": ("b0", "b1")}


@pytest.mark.parametrize("method", ["syncsgd", "diloco"])
def test_ranks_on_several_hosts_are_one_replica(tmp_path: Path, method: str) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    with hosts([COORDINATOR, *(name for ranks in ISLANDS.values() for name in ranks)]) as net, ExitStack() as ends:
        url = f"http://{net.address(COORDINATOR)}:29410"
        command = ["-m", "ftopt", "coordinator", "--bind", url.removeprefix("http://"), "--new"]
        started(ends, net, COORDINATOR, tmp_path / "coordinator.txt", command, {})
        outs, ranks = {}, []
        for replica, names in ISLANDS.items():
            for rank, name in enumerate(names):
                environ = {
                    "FTOPT_COORDINATOR": url, "FTOPT_REPLICA": replica, "METHOD": method, "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": net.address(names[0]), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0",
                    "RANK": str(rank), "WORLD_SIZE": str(len(names)), "TORCHELASTIC_RESTART_COUNT": "0",
                }  # fmt: skip
                outs[name] = tmp_path / f"{name}.txt"
                program = ["-m", "tests.island.struck", str(saved)]
                ranks.append(started(ends, net, name, outs[name], program, environ))
        until_s = time.monotonic() + 200
        while not all("step 40 " in outs[names[0]].read_text() for names in ISLANDS.values()):
            said = "".join(out.read_text() for out in outs.values())
            assert time.monotonic() < until_s and all(rank.poll() is None for rank in ranks), said
            time.sleep(0.1)
        (saved / "end").touch()
        assert [rank.wait(60) for rank in ranks] == [0] * 4
        ours, theirs = (
            dict(re.findall(r"^step \d+ (\d+) (\S+)", outs[names[0]].read_text(), re.MULTILINE))
            for names in ISLANDS.values()
        )
        common = ours.keys() & theirs.keys()
        assert len(common) > 2 and all(ours[version] == theirs[version] for version in common)
        sent = {name: net.sent(name, "eth0") for name in outs}
        print(sent)  # noqa: T201


def started(
    ends: ExitStack, net: Hosts, host: str, out: Path, arguments: list[str], environ: dict[str, str]
) -> subprocess.Popen[bytes]:
    """A Python process on a host, killed at the end."""
    command = ["ip", "netns", "exec", net.namespace(host), sys.executable, "-u", *arguments]
    with out.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | environ, stdout=file, stderr=subprocess.STDOUT)

    def end() -> None:
        process.kill()
        process.wait()

    ends.callback(end)
    return process
