"""What the soak calls calm, what it calls growth, and that it never waits for ever."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.meter import QUIET_S, Calm, Growth, Meter
from ftopt.run.fault_spec import COORDINATOR, Fault

NAMES = ["r0", "r1"]


def decide(t_s: float, *names: str) -> dict[str, Any]:
    return {"t_s": t_s, "event": "decide", "data": {"members": [[name, 1, 20] for name in names]}}


def test_calm_needs_outer_steps_of_all_and_quiet_after_the_trouble() -> None:
    calm = Calm(NAMES)
    calm.hear({"t_s": 1.0, "event": "fault", "data": {"for_s": 2.0}})
    calm.hear(decide(2.0, *NAMES))  # the fault still lasts
    for t_s in (4.0, 4.5):
        calm.hear(decide(t_s, *NAMES))
    assert not calm.is_calm(20.0)
    calm.hear(decide(5.0, *NAMES))
    assert not calm.is_calm(3.0 + QUIET_S)
    assert calm.is_calm(3.1 + QUIET_S)
    calm.hear(decide(8.0, "r0"))
    assert not calm.is_calm(20.0)


def growths(first: float, last: float, *, moments: int = 100) -> list[Growth]:
    return [Growth(name, "threads", moments, first, last, last) for name in (COORDINATOR, *soak.KEPT)]


@pytest.mark.parametrize(
    ("growth", "bad"),
    [
        (growths(12.0, 12.0), []),
        (growths(20.0, 21.0), []),
        (growths(12.0, 13.0), [f"threads of {name} grows" for name in (COORDINATOR, *soak.KEPT)]),
        (growths(12.0, 12.0, moments=3)[:1], ["too few"] * 3),
    ],
)
def test_growth_beyond_five_percent_is_bad_and_so_is_not_knowing(growth: list[Growth], bad: list[str]) -> None:
    got = soak._judge_growth(growth)
    assert len(got) == len(bad)
    assert all(part in text for part, text in zip(bad, got, strict=True))


class Process:
    pid, exitcode = os.getpid(), None

    def is_alive(self) -> bool:
        return self.exitcode is None


class Job:
    """A job in which nothing happens: no order strikes, no event comes."""

    def __init__(self) -> None:
        self.names, self.started = ["r0", "r1", "r2", "r3"], 0.0
        self.processes = {name: Process() for name in (COORDINATOR, *self.names)}

    def events(self) -> list[dict[str, Any]]:
        return []

    def order(self, name: str, fault: Fault) -> None: ...


def soak_of(job: Job) -> soak.Soak:
    return soak.Soak(job, seconds=1e9, seed=0, every_s=1.0)  # type: ignore[arg-type]


def test_whoever_does_not_die_when_it_was_ordered_to_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "REPLICA_FAULTS", (Fault(point="reduce", do="kill"),))
    monkeypatch.setattr(soak, "_COORDINATOR_SHARE", 0.0)
    struck = soak_of(Job())
    struck._strike(5.0)
    struck._tend(5.0 + soak._DOOM_S)
    with pytest.raises(soak.SoakError, match=r"r\d lives on 45 s after its kill at reduce, ordered at 5.0 s"):
        struck._tend(5.1 + soak._DOOM_S)


def test_whoever_ends_by_itself_ends_the_soak() -> None:
    job = Job()
    job.processes["r1"].exitcode = 3  # type: ignore[assignment]
    with pytest.raises(soak.SoakError, match="r1 has ended by itself with status 3"):
        soak_of(job)._tend(1.0)


def test_growth_is_of_those_who_lived_from_early_on_to_the_end() -> None:
    job = Job()
    meter = Meter(job)  # type: ignore[arg-type]
    for now_s in range(40):
        if now_s == 30:
            del job.processes["r3"]
        meter.look(float(now_s), calm=now_s % 2 == 0)
    growth = meter.growth(born_s=5.0, warm_s=10.0)
    assert {x.process for x in growth} == {COORDINATOR, "r0", "r1", "r2"}
    assert {x.what for x in growth} == {"threads", "fds", "sockets", "rss_mib"}
    assert {x.moments for x in growth} == {15}, "the calm ones after the first ten seconds"
    assert not meter.growth(born_s=-1.0, warm_s=0.0)
