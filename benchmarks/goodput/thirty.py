"""30 replicas under the failures of a run that torchft's authors have published, in compressed time.

Source: PyTorch's blog, June 2025, "Fault Tolerant Llama: training with 2000 synthetic failures every ~15 seconds and no
checkpoints on Crusoe L40S": 30 replica groups, a failure every 60 s, 1,100 failures, 5,145 of 6,249 steps committed. So
there are 0.176 failures a step, and a step takes 10.6 s.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, replace

from benchmarks.goodput.account import Account, simulated
from benchmarks.goodput.measuring import BLOCKING, Window, measure
from benchmarks.goodput.predicted import Measured, latency, model
from benchmarks.goodput.schedule import Setting, quiet, schedule
from benchmarks.simulate.comparison import Ours
from benchmarks.simulate.traces import Trace
from benchmarks.speed.figures import Row, table
from ftopt.cli.shared.output import say

GROUPS, FAILURES, GAP_S, STEPS, COMMITTED = 30, 1100, 60.0, 6249, 5145
"""Theirs. Seconds are from one failure to the next."""
COMPRESSION = 10.0
QUIET_S = 25.0


def setting(seconds: float) -> Setting:
    """Ours: rounds of 1 s and their commit, where theirs are 10.6; all else shorter by the same factor.

    A replica's process starts 15 s after its death there, as the simulation assumes by default: 1.5 s here.
    """
    step_s = 0.1
    return Setting(
        machines=GROUPS,
        seconds=seconds,
        step_s=step_s,
        sync_every=round(GAP_S * FAILURES / STEPS / COMPRESSION / step_s),
        gap_s=GAP_S / COMPRESSION,
        back_s=0.1,
        start_s=1.5,
        told=0.0,
        grace_s=0.5,
        dead_after_s=2.0,
    )


def thirty(arguments: argparse.Namespace) -> int:
    """Runs it and prints it; 1: steps of replicas that lived on were lost."""
    from benchmarks.goodput import kept_at, write

    at = setting(30.0 if arguments.quick else arguments.seconds or 600.0)
    calm = replace(at, seconds=QUIET_S)
    first = measure(calm, quiet(calm), keep=kept_at(arguments.keep, "quiet"), only=BLOCKING)
    measured = Measured(first.step_s, first.spread, 0.0, statistics.fmean(first.stalls_s))
    latency_s = latency(calm, measured, quiet(calm))
    trace = schedule(at, 1)
    window = measure(at, trace, keep=kept_at(arguments.keep, "failures"), only=BLOCKING)
    told = replace(measured, start_s=statistics.fmean(window.starts_s or [at.start_s]))
    assumed = model(at, told, delay=0, latency_s=latency_s)
    found = Ours("", "", assumed).run(trace, 1, lambda name, share: None)
    say(
        f"a step {1000 * window.step_s:.1f} ms, a start {told.start_s:.2f} s, a round without failures keeps a thread "
        f"{1000 * measured.stall_s:.0f} ms, the latest deed {window.late_s:.2f} s late; odd: {window.odd[BLOCKING]}"
    )
    say("\n".join(table(rows(window, simulated(found), trace))))
    write("goodput-thirty", at, [asdict(window)], [{BLOCKING: asdict(simulated(found))}])
    return 1 if window.accounts[BLOCKING].others else 0


def rows(window: Window, found: Account, trace: Trace) -> list[Row]:
    """Theirs, ours, the simulation."""
    kills = sum(x.removed for x in trace.stays())
    return [
        {
            "": "torchft, published",
            "replicas": GROUPS,
            "kills": FAILURES,
            "rounds": STEPS,
            "kills per round": FAILURES / STEPS,
            "attempts committed": f"{COMMITTED / STEPS:.1%}",
            "goodput": None,
            "stall": None,
            "steps lost with machines": None,
            "steps lost by others": None,
        },
        *(
            {
                "": name,
                "replicas": GROUPS,
                "kills": kills,
                "rounds": x.attempts,
                "kills per round": kills / max(1, x.attempts or 0),
                "attempts committed": f"{x.committed:.1%}",
                "goodput": f"{x.goodput:.1%}",
                "stall": f"{x.stall:.1%}",
                "steps lost with machines": x.lost,
                "steps lost by others": x.others,
            }
            for name, x in (("ftopt, real", window.accounts[BLOCKING]), ("ftopt, simulated", found))
        ),
    ]
