"""A killed run leaves network namespaces behind, and the next run removes them."""

from __future__ import annotations

import subprocess
import sys

from tests.network.hosts import hosts


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout


def test_what_a_killed_process_has_left_is_removed_by_the_next_one() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan = f"ftopt-{gone.pid}-r0"
    with hosts(["a"]) as own:
        assert own.namespace("a") in namespaces()
        subprocess.run(["ip", "netns", "add", orphan], check=True)
    assert orphan in namespaces()
    assert own.namespace("a") not in namespaces()
    with hosts(["a"]) as own:
        assert orphan not in namespaces()
        assert own.namespace("a") in namespaces()
