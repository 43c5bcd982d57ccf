"""A chaos campaign from outside: a user's training script under signals, whose final model tells what was lost.

``python -m benchmarks chaos`` runs a campaign for each method. Processes are killed, stopped, asked to leave, started
twice, all at once and one after the other; so is the coordinator, with its journal and without; checkpoints are
damaged, links are cut, a replica's reductions fail, and other coordinators take the place of the job's. The parameters
of the model are the account (`benchmarks.chaos.script`): what is lost or counted twice is read from it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.account import judge
from benchmarks.chaos.facts import Facts, Outcome
from benchmarks.chaos.faults import DECK, Striker
from benchmarks.chaos.jobs import Processes, processes
from benchmarks.chaos.methods import GLOBAL_BATCH, WAYS
from benchmarks.chaos.script import BATCH
from benchmarks.speed.machine import facts as machine_facts
from ftopt.cli.shared.output import complain, say
from ftopt.watch.jsonl import Tail
from tests.forkserver import die_with_parent

RESULTS = Path(__file__).parents[1] / "results" / "chaos.json"
POLICY: dict[str, Any] = {
    "start_s": 6.0,
    "grace_s": 0.5,
    "dead_after_s": 2.0,
    "evict_after_s": 8.0,
    "recovery_s": 6.0,
    "outlier_ratio": 1e6,
}
"""``outlier_ratio``: the account's elements grow from 0 by whole numbers, so a first outer step that comes late is
large, as none of a model's is."""
STEP_S, LIVE_STEP_S = 0.02, 0.05
"""Of an inner step; where replicas meet in each of them."""
_LOOK_S = 1.0
_POLL_S = 0.05
_STOP_S = 45.0
"""After the order to stop everybody has left by then: 30 s at most, as documented."""


@dataclass(frozen=True)
class Plan:
    """One campaign.

    Args:
        way: of `WAYS`.
        ledger: the samples are the job's.
        seconds: how long faults strike; with a ledger until the data have ended, if that comes within twice as long.
        every_s: seconds between two, on average.
        resume: the script calls `ftopt.Checkpoints.resume`, as one does that is restarted again and again.
        only: words; the faults are those with one of them in their names. Empty: all.
        patience_s: without another sample in the model for so long after the faults, the job does not end.
    """

    way: str
    ledger: bool
    seed: int
    seconds: float = 60.0
    every_s: float = 1.5
    recover: str = "drop"
    resume: bool = False
    replicas: int = 5
    patience_s: float = 40.0
    evict_after_s: float = POLICY["evict_after_s"]
    only: tuple[str, ...] = ()

    @property
    def policy(self) -> dict[str, Any]:
        return POLICY | {"evict_after_s": self.evict_after_s}

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in DECK if not self.only or any(word in kind for word in self.only)]

    @property
    def name(self) -> str:
        more = "" if self.ledger else ", no ledger"
        more += (", replay" if self.recover == "replay" else "") + (", resume" if self.resume else "")
        return f"{self.way}{more}, seed {self.seed}"

    @property
    def samples(self) -> int:
        """So many that the data end while faults strike, or some time after that, as the seed has it."""
        if not self.ledger:
            return 0
        rate = 700.0 if self.way == GLOBAL_BATCH else 60.0 if WAYS[self.way].live else 240.0
        count = int(self.seconds * rate * (0.9, 0.6, 1.2)[self.seed % 3])
        return count // BATCH * BATCH + BATCH


class Campaign:
    """Runs a plan."""

    def __init__(self, plan: Plan, folder: Path, job: Processes, *, verbose: bool) -> None:
        self.plan, self.folder, self.job, self.verbose = plan, folder, job, verbose
        self.faults: list[dict[str, Any]] = []
        self.striker = Striker(
            job, kinds=plan.kinds, seed=f"{plan.way} {plan.seed}", replicas=plan.replicas, pause=self.pause,
            tell=self._tell,
        )  # fmt: skip
        self._look_at = self._news_at = 0.0
        self._tail = Tail(folder / "run" / "events.jsonl")
        self._set, self.jumps = time.time() - time.monotonic(), list[tuple[float, float]]()

    def run(self) -> Outcome:
        """To the end of the job, or of the patience with it."""
        plan, job = self.plan, self.job
        job.start_coordinator(new=True)
        for i in range(plan.replicas):
            job.start(f"r{i}")
        self._until(lambda: all(run.joined or run.ended for run in job.runs), POLICY["start_s"] + 45.0)
        began, chance = time.monotonic(), self.striker.chance
        due = began + chance.expovariate(1 / plan.every_s)
        while time.monotonic() < began + plan.seconds * (1 + plan.ledger) and not self._over():
            if time.monotonic() >= due:
                due = time.monotonic() + chance.expovariate(1 / plan.every_s)
                self.striker.strike()
            self.pause(_POLL_S)
        self.striker.calm()
        faults_s = time.monotonic() - began
        self._news_at = time.monotonic()
        ordered = self._end()
        stuck = job.alive
        for run in stuck:
            job.signal(run.pid, signal.SIGUSR1)
        if stuck:
            time.sleep(1.0)
        facts = Facts(
            self.folder, job.runs, plan.way, plan.samples, plan.policy, job.started, self.faults, ordered,
            self.striker.complaints, job.coordinator_sizes, self.jumps,
        )  # fmt: skip
        outcome = judge(facts)
        outcome.faults_s = faults_s
        return outcome

    def pause(self, seconds: float) -> None:
        """Goes on looking, and does what is due."""
        until = time.monotonic() + seconds
        while True:
            self.striker.tend()
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK_S
                self.job.look()
                self._look_at_the_clock()
            if time.monotonic() >= until:
                return
            time.sleep(min(_POLL_S, seconds))

    def _end(self) -> float:
        """Waits for the end; when it was ordered, or 0."""
        job, ordered = self.job, 0.0
        if self.plan.ledger:
            if not self._over() and not job.alive:
                job.start("r0")
            while job.alive and self._is_patient():
                self._until(lambda: not job.alive, 1.0)
        else:
            self.pause(3.0)
            ordered = time.time()
            (self.folder / "stop").touch()
            self._until(lambda: not job.alive, _STOP_S)
        job.look()
        return ordered

    def _is_patient(self) -> bool:
        """Whether samples have come into the model not long ago; or the faults have ended not long ago."""
        if any(e["event"] == "decide" and e["data"].get("ranges") for e in self._tail.more()):
            self._news_at = time.monotonic()
        return time.monotonic() < self._news_at + self.plan.patience_s

    def _look_at_the_clock(self) -> None:
        """Events have the time of day, which a host may set."""
        clock_set = time.time() - time.monotonic()
        if abs(clock_set - self._set) > _LOOK_S:
            self.jumps.append((time.time(), clock_set - self._set))
            self._set = clock_set

    def _until(self, true: Any, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not true() and time.monotonic() < until:
            self.pause(_POLL_S)

    def _over(self) -> bool:
        """Somebody has found that the data have ended."""
        return self.plan.ledger and any(
            not run.fate and not run.alive and run.process.exitcode == 0 for run in self.job.runs
        )

    def _tell(self, fault: dict[str, Any]) -> None:
        self.faults.append(fault)
        if self.verbose:
            more = f" {fault['for_s']:.1f} s" if "for_s" in fault else ""
            more += f", {fault['how']}" if "how" in fault else ""
            say(f"  {fault['at'] - self.job.started:6.1f} s  {fault['who']:<12} {fault['kind']}{more}")


def campaign(plan: Plan, folder: Path, *, verbose: bool = False) -> tuple[Outcome, list[dict[str, Any]]]:
    """Runs one; its outcome, and the faults."""
    step_s = LIVE_STEP_S if WAYS[plan.way].live and plan.way != GLOBAL_BATCH else STEP_S
    options = {"way": plan.way, "samples": plan.samples, "step_s": step_s, "folder": str(folder)}
    options |= {"policy": plan.policy | {"start_replicas": plan.replicas, "recover": plan.recover}}
    options |= {"accumulate": 1 + plan.seed // 3 % 2, "resume": plan.resume}
    with processes(folder, options) as job:
        done = Campaign(plan, folder, job, verbose=verbose)
        return done.run(), done.faults


def add(parser: argparse.ArgumentParser) -> None:
    """[METHOD ...] [--seed N] [--runs N] [--seconds S] [--every-s X] [--ledger WHICH] [--jobs N] [--keep DIR] ..."""
    parser.add_argument("ways", nargs="*", metavar="METHOD", help=f"{', '.join(WAYS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the first campaign's faults (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=2, help="campaigns a method, seeds in a row (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults in each (default: %(default)g)")
    parser.add_argument("--every-s", type=float, default=1.5, help="seconds between two faults (default: %(default)g)")
    parser.add_argument("--ledger", choices=("both", "with", "without"), default="both", help="(default: %(default)s)")
    parser.add_argument("--recover", choices=("both", "drop", "replay"), default="both", help="(default: %(default)s)")
    parser.add_argument("--resume", choices=("both", "with", "without"), default="both", help="(default: %(default)s)")
    text = "strike only with faults that have one of these in their names, as `broken` or `coordinator kill`"
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help=text)
    text = "seconds after which a silent replica is given up (default: %(default)g)"
    parser.add_argument("--evict-after-s", type=float, default=POLICY["evict_after_s"], help=text)
    parser.add_argument("--jobs", type=int, default=1, help="campaigns at a time (default: %(default)s)")
    parser.add_argument(
        "--keep", type=Path, help="folder that keeps what bad campaigns leave (default: a temporary one)"
    )
    parser.add_argument("--verbose", action="store_true", help="print each fault")


def plans(arguments: argparse.Namespace) -> list[Plan]:
    """Every method in turn. The choices of two change from seed to seed, each half as often as the one before."""
    made = []
    for number in range(arguments.runs):
        ledger = _choice(arguments.ledger, ("with", "without"), number)
        recover = _choice(arguments.recover, ("drop", "replay"), number // 2)
        resume = _choice(arguments.resume, ("without", "with"), number // 4) == "with"
        for way in arguments.ways or WAYS:
            with_ledger = ledger == "with" or way == GLOBAL_BATCH
            seed, seconds, every_s = arguments.seed + number, arguments.seconds, arguments.every_s
            how = recover if with_ledger and not WAYS[way].live else "drop"  # nothing else is there to be replayed
            made.append(
                Plan(
                    way, with_ledger, seed, seconds, every_s, how, resume,
                    evict_after_s=arguments.evict_after_s, only=tuple(arguments.only),
                )
            )  # fmt: skip
    return made


def _choice(asked: str, both: tuple[str, str], number: int) -> str:
    return both[number % 2] if asked == "both" else asked


def run(arguments: argparse.Namespace) -> int:
    """Prints a row a method, and one a kind of fault; 1 when anything is not 0."""
    if unknown := [way for way in arguments.ways if way not in WAYS]:
        complain(f"benchmarks chaos: {', '.join(unknown)}; must be of {', '.join(WAYS)}")
        return 2
    if wrong := [word for word in arguments.only if not any(word in kind for kind in DECK)]:
        complain(f"benchmarks chaos: --only {', '.join(wrong)}; must be part of a name of {', '.join(DECK)}")
        return 2
    if not arguments.evict_after_s >= (least := POLICY["dead_after_s"] + 4.0):
        complain(f"benchmarks chaos: --evict-after-s {arguments.evict_after_s:g}; must be at least {least:g}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    about, began = machine_facts(), time.monotonic()
    RESULTS.parent.mkdir(exist_ok=True)
    asked, found = plans(arguments), []
    for each in _all(asked, arguments):
        found.append(each)
        RESULTS.write_text(json.dumps({"machine": about, "campaigns": found}, indent=1))
    say("\n" + "\n".join(table(found)) + "\n\n" + "\n".join(kinds(found)))
    say(
        f"\ncommit {about['commit']}, load before {about['load_before']}, {(time.monotonic() - began) / 60:.0f} minutes"
    )
    return 1 if len(found) < len(asked) or any(each["outcome"]["bad"] for each in found) else 0


def _all(plans: Sequence[Plan], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What each has come to, as they end. Those that run at a time are in processes of their own, with ports and
    folders of their own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn, initializer=die_with_parent) as pool:
        waiting = [pool.submit(_one, plan, arguments.keep, arguments.verbose) for plan in plans]
        try:
            for ended in as_completed(waiting):
                if (error := ended.exception()) is not None:
                    why = f"{type(error).__name__}: {error}"
                    complain(f"benchmarks chaos: a campaign has itself failed, and does not count: {why}")
                else:
                    yield ended.result()
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


def _one(plan: Plan, keep: Path | None, verbose: bool) -> dict[str, Any]:
    """Runs a campaign in a short temporary folder, which is kept if it went wrong."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=keep))
    say(f"{plan.name} ({plan.samples} samples) in {folder}")
    outcome, faults = campaign(plan, folder, verbose=verbose)
    each = {"way": plan.way, "seed": plan.seed, "plan": asdict(plan), "faults": faults, "outcome": outcome.plain()}
    (folder / "outcome.json").write_text(json.dumps(each, indent=1))
    end = "did not end" if outcome.end_s is None else f"ended after {outcome.end_s:.1f} s"
    text = f"{plan.name}: {len(faults)} faults, {outcome.steps} steps, {end}; "
    text += f"stall {outcome.stall_s:.1f} s, idle {outcome.idle_s:.1f} s"
    say("\n".join([text, *(f"  bad: {line}" for line in outcome.bad)]))
    if not outcome.bad:
        shutil.rmtree(folder)
    return each


_COLUMNS = (
    "method", "runs", "minutes", "faults", "steps", "lost", "twice", "samples lost", "twice", "stall, s", "too long",
    "end, s", "did not end", "bad",
)  # fmt: skip


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """A row a method."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for way in dict.fromkeys(each["way"] for each in found):
        mine = [each for each in found if each["way"] == way]
        outcomes = [each["outcome"] for each in mine]
        ends = [o["end_s"] for o in outcomes if o["end_s"] is not None]
        cells = [
            way, len(mine), f"{sum(o['faults_s'] for o in outcomes) / 60:.1f}",
            sum(len(each["faults"]) for each in mine), *(
                sum(o[key] or 0 for o in outcomes)
                for key in ("steps", "steps_lost", "steps_twice", "samples_lost", "samples_twice")
            ),
            f"{max(o['stall_s'] for o in outcomes):.1f}", sum(o["too_long"] for o in outcomes),
            f"{max(ends, default=0.0):.1f}", len(mine) - len(ends), sum(bool(o["bad"]) for o in outcomes),
        ]  # fmt: skip
        lines.append("| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in cells) + " |")
    return lines


def kinds(found: Sequence[dict[str, Any]]) -> list[str]:
    """A row a kind of fault: how many processes or links it has struck."""
    counts = Counter(fault["kind"] for each in found for fault in each["faults"])
    return ["| fault | struck |", "|---|---|", *(f"| {kind} | {counts[kind]:,} |" for kind in DECK)]
