"""The log of a replica says who is missing in a version, who is back and who is new."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ftopt.sync.replica.log.peers import Peers
from tests.sync.processes.job import CALM, tiny_job


def rounds(caplog: pytest.LogCaptureFixture, *members: str, fragments: int = 1) -> list[tuple[int, str]]:
    """What is said of versions that these have made, one letter a replica."""
    caplog.set_level(logging.INFO)
    peers = Peers("a")
    for version, names in enumerate(members):
        for fragment in range(fragments):
            peers.committed(fragment, version, [(name, 1) for name in names])
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_each_change_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for fragments, of in ((1, ""), (2, " of fragment 0")):
        caplog.clear()
        said = rounds(caplog, "abc", "abc", "ab", "ab", "abc", "abc", "abcd", fragments=fragments)
        assert said == [
            (logging.WARNING, f"replica a: version 2{of} is averaged without c; 2 replicas took part"),
            (logging.WARNING, f"replica a: version 4{of} is averaged with c again; 3 replicas took part"),
            (logging.INFO, f"replica a: version 6{of} is averaged with d, new in the job; 4 replicas took part"),
        ]


def test_of_a_version_whose_members_are_not_known_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator was started again between a quorum and its commit."""
    assert rounds(caplog, "abc", "", "abc") == []


def test_one_that_was_there_before_this_replica_is_not_new_in_the_job(caplog: pytest.LogCaptureFixture) -> None:
    peers = Peers("spare")
    for version, lives in enumerate(({"r0": 1}, {"r0": 1, "r1": 2})):
        peers.committed(0, version, [*lives.items(), ("spare", 1)])
    assert [record.getMessage() for record in caplog.records] == [
        "replica spare: version 1 is averaged with r1 again; 3 replicas took part"
    ]


def test_one_that_dies_before_its_first_outer_step_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    peers = Peers("a")
    peers.gone([("a", 1), ("d", 1)])
    peers.committed(0, 1, [("a", 2), ("b", 1), ("d", 2)])
    peers.gone([("b", 1), ("c", 1)])
    for version in (2, 3):
        peers.committed(0, version, [("a", 2), ("b", 2), ("d", 2)])
    peers.committed(0, 4, [("a", 2), ("b", 2), ("c", 2), ("d", 2)])
    assert [record.getMessage() for record in caplog.records] == [
        "replica a: version 2 is averaged without c, gone before an outer step with this one; 3 replicas took part",
        "replica a: version 4 is averaged with c again; 4 replicas took part",
    ]


def test_of_one_that_is_missing_again_and_again_it_is_told_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    said = rounds(caplog, *["ab", "a"] * 40)
    without = "replica a: version {} is averaged without b; 1 replica took part"
    assert [text for _, text in said if "without" in text] == [
        without.format(2 * times - 1) for times in (1, 2, 4, 8, 16, 32)
    ]
    assert sum("again" in text for _, text in said) == 6


def test_of_many_the_log_names_eight(caplog: pytest.LogCaptureFixture) -> None:
    ((_, text),) = rounds(caplog, "abcdefghijkl", "a")
    assert text == "replica a: version 1 is averaged without b, c, d, e, f, g, h, i and 3 more; 1 replica took part"


@pytest.mark.long
def test_survivors_of_a_killed_replica_say_so(tmp_path: Path) -> None:
    with tiny_job(tmp_path, policy=CALM, steps=None, logs=True) as job:
        job.start_all()
        job.until("decide", count=2)
        job.kill("r1")
        job.wait_until(lambda: "is averaged without r1; 2 replicas" in log(tmp_path, "r0"), "r0 says who is missing")
        job.start("r1")
        job.wait_until(lambda: "is averaged with r1 again; 3 replicas" in log(tmp_path, "r0"), "r0 says who is back")
        job.enough()
        job.end()


def log(folder: Path, name: str) -> str:
    return (folder / f"log-{name}").read_text()
