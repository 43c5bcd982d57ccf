"""The fault matrix: point x (kill, stop, hang, partition) x (replica, source of a fetch, coordinator).

Each cell is a job of real processes, sockets and Gloo: three replicas train, one fault strikes, a killed
process is restarted, and the job goes on until everybody has contributed again. The table shows the cost to the others.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftopt.cli.shared.output import say
from ftopt.run.fault_spec import COORDINATOR, Fault
from tests.sync.processes.job import FAST, TinyJob, tiny_job

POLICY = replace(FAST, grace_s=0.5, evict_after_s=60.0)
POINTS = ("inner", "propose", "gather", "reduce", "reduce.after", "prepare", "commit", "apply")
COORDINATOR_POINTS = ("join", "quorum", "decide", "abort")
KINDS = ("kill", "stop", "hang", "partition")
COORDINATOR_KINDS = ("kill", "kill, no journal", "stop", "partition")
LASTS_S = {"stop": 1.6, "hang": 1.5, "partition": 1.5}
AT_STEP = 40


@dataclass(frozen=True)
class Cell:
    """Who is struck, where, how."""

    role: str
    point: str
    kind: str

    @property
    def do(self) -> str:
        return self.kind.partition(",")[0]

    @property
    def process(self) -> str:
        """Who is struck: the newcomer of a fetch is r3, its source r0."""
        return {"replica": "r1", "newcomer": "r3", "source": "r0"}.get(self.role, COORDINATOR)

    def fault(self) -> Fault:
        early = self.point in ("fetch", "serve", "join", "abort")
        return Fault(
            replica=COORDINATOR if self.role == COORDINATOR else self.process,
            point=self.point,
            do=self.do,
            at_step=0 if early else AT_STEP,
            for_s=LASTS_S.get(self.do),
            incarnation=2 if self.role == "newcomer" else 1,
        )


@dataclass(frozen=True)
class Outcome:
    """What a cell came to. ``stall_s``: the longest of those that were not struck, after the fault."""

    cell: Cell
    stall_s: float | None
    lost: int
    twice: int
    discarded: int
    aborted: int
    equal: bool
    one_history: bool
    samples: int | None
    failure: str = ""

    @property
    def good(self) -> bool:
        return not (self.failure or self.lost or self.twice or self.discarded) and self.equal and self.one_history


def cells() -> Iterator[Cell]:
    """All of the matrix."""
    for point in POINTS:
        for kind in KINDS:
            yield Cell("replica", point, kind)
    for kind in KINDS:
        yield Cell("newcomer", "fetch", kind)
        yield Cell("source", "serve", kind)
    for point in COORDINATOR_POINTS:
        for kind in COORDINATOR_KINDS:
            yield Cell(COORDINATOR, point, kind)


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Runs one cell to its end."""
    faults = {cell.process: [cell.fault()]}
    if cell.role == "newcomer":  # its first life only makes way for the second, which has to fetch
        faults[cell.process].insert(0, Fault(point="inner", do="kill", at_step=1))
    if cell.point == "abort":  # something must be aborted
        faults["r2"] = [Fault(point="reduce", do="partition", for_s=0.2, at_step=AT_STEP)]
    options: dict[str, Any] = {"journal": "" if cell.kind == "kill, no journal" else "journal.sqlite"}
    with tiny_job(folder, policy=POLICY, faults=faults, steps=None, **options) as job:
        try:
            fault = _strike(job, cell)
            _everybody_again(job, fault)
            job.enough()
            summary = job.end()
        except AssertionError as error:
            return Outcome(cell, None, 0, 0, 0, 0, False, False, None, str(error).partition("\n")[0])
        stalls = [e for e in job.events("stall") if e["t_s"] > fault["t_s"] and e["replica"] != cell.process]
    return Outcome(
        cell,
        stall_s=max((e["data"]["stall_s"] for e in stalls), default=0.0),
        lost=summary["survivor_inner_steps_lost"],
        twice=summary["inner_steps_counted_twice"],
        discarded=sum(summary["inner_steps_discarded"].values()),
        aborted=summary["attempts_aborted"],
        equal=len(set(summary["anchor_digests"].values())) == 1,
        one_history=not summary["chain_conflicts"],
        samples=summary["samples_lost"],
    )


def _strike(job: TinyJob, cell: Cell) -> dict[str, Any]:
    """Lets the fault happen and restarts a killed process; returns the fault's event."""
    name = cell.process
    job.start_all()
    if cell.role in ("newcomer", "source"):
        job.until("decide", count=2)
        job.names.append("r3")
        job.start("r3")
    if cell.role == "newcomer":
        job.until("fault", name)
        job.died(name)
        job.start(name)
    fault = job.until("fault", name, count=2 if cell.role == "newcomer" else 1)
    if cell.do == "kill":
        job.died(name)
        if name == COORDINATOR:
            job.start_coordinator()
        else:
            job.start(name)
    return fault


def _everybody_again(job: TinyJob, fault: dict[str, Any]) -> None:
    """Waits until every replica is in a decision that came after the fault had passed, with steps of its own."""
    passed_s = fault["t_s"] + (fault["data"]["for_s"] or 0.0)

    def again() -> bool:
        late = [e for e in job.events("decide") if e["t_s"] > passed_s]
        return set(job.names) <= {m[0] for e in late for m in e["data"]["members"] if m[2] > 0}

    job.wait_until(again, "everybody contributes again")


def add(parser: argparse.ArgumentParser) -> None:
    """[--only WORD ...]"""
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells of this role, point, fault")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 1 when a cell lost a survivor's step, or did not come to its end."""
    outcomes = []
    say(f"{'who':<12}{'point':<14}{'fault':<18}{'stall':>8}  lost  twice  discarded  aborted  samples  digests")
    for cell in cells():
        if not all(word in (cell.role, cell.point, cell.do) for word in arguments.only):
            continue
        with tempfile.TemporaryDirectory(prefix="ftopt-faults-") as folder:
            outcomes.append(run_cell(cell, Path(folder)))
        say(_line(outcomes[-1]))
    bad = [x for x in outcomes if not x.good]
    worst = max((x.stall_s or 0.0 for x in outcomes), default=0.0)
    say(f"{len(outcomes)} cells, {len(bad)} bad; the longest stall of a survivor is {worst:.2f} s")
    return 1 if bad else 0


def _line(x: Outcome) -> str:
    who = f"{x.cell.role:<12}{x.cell.point:<14}{x.cell.kind:<18}"
    if x.failure:
        return f"{who}FAILED: {x.failure}"
    samples = "-" if x.samples is None else str(x.samples)
    digests = "equal" if x.equal else "UNEQUAL"
    digests += "" if x.one_history else ", FORK"
    return f"{who}{x.stall_s:>6.2f} s{x.lost:>6}{x.twice:>7}{x.discarded:>11}{x.aborted:>9}{samples:>9}  {digests}"
