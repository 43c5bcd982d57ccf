"""The goodput simulation beside real runs: ``python -m benchmarks goodput [--thirty]``.

A schedule of failures is drawn from a seed and played on real jobs, processes and sockets and Gloo, of ftopt, of DDP
with checkpoints and restarts, and of torchft where it is installed, all in the same window; and the same schedule goes
into the simulation behind ``python -m benchmarks simulate``. What that is told of the machine (a step's time, a
process' start, how long a round takes) is measured in a window without failures. With ``--thirty``: 30 replicas at the
ratio of failures to rounds of a run that torchft's authors have published.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.goodput.schedule import Setting
from benchmarks.run import aside
from benchmarks.speed.machine import facts
from benchmarks.speed.report import RESULTS
from ftopt.cli.shared.output import say

QUIET_S = 30.0


def add(parser: argparse.ArgumentParser) -> None:
    """[--seeds N] [--seconds S] [--thirty] [--quick]"""
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="schedules (default: %(default)s)")
    parser.add_argument("--seconds", type=float, metavar="S", help="of each (default: 150; with --thirty 600)")
    parser.add_argument("--thirty", action="store_true", help="30 replicas, beside torchft's published run")
    parser.add_argument("--quick", action="store_true", help="one schedule of 20 s")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs' files there")


def run(arguments: argparse.Namespace) -> int:
    """1: steps of replicas that lived on were lost."""
    log = RESULTS / "speed" / "goodput.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with aside(log):
        if arguments.thirty:
            from benchmarks.goodput.thirty import thirty

            return thirty(arguments)
        return _beside(arguments)


def _beside(arguments: argparse.Namespace) -> int:
    from benchmarks.goodput.measuring import BLOCKING, Window, measure
    from benchmarks.goodput.predicted import Measured, latency, predict
    from benchmarks.goodput.schedule import quiet, schedule
    from benchmarks.goodput.tables import beside, odd, summary

    about = facts()
    seconds = 20.0 if arguments.quick else arguments.seconds or 150.0
    setting, seeds = Setting(seconds=seconds), 1 if arguments.quick else arguments.seeds
    calm = replace(setting, seconds=15.0 if arguments.quick else QUIET_S)
    first = measure(calm, quiet(calm), keep=kept_at(arguments.keep, "quiet"))
    measured = Measured(first.step_s, first.spread, 0.0, statistics.fmean(first.stalls_s))
    latency_s = latency(calm, measured, quiet(calm))
    say(
        f"without failures: a step {1000 * measured.step_s:.1f} ms (wait {1000 * setting.step_s:g}), DDP's "
        f"{1000 * first.ddp_step_s:.1f} ms, a blocking round keeps "
        f"a thread {1000 * measured.stall_s:.1f} ms: latency {1000 * latency_s:.2f} ms"
    )
    say("goodput: " + ", ".join(f"{way} {x.goodput:.2%}" for way, x in first.accounts.items()))
    windows: list[Window] = []
    predictions = []
    for seed in range(1, seeds + 1):
        trace = schedule(setting, seed)
        window = measure(setting, trace, keep=kept_at(arguments.keep, f"seed-{seed}"))
        told = replace(measured, start_s=statistics.fmean(window.starts_s or [setting.start_s]), step_s=window.step_s)
        pause_s = statistics.fmean(window.pauses_s or [setting.start_s])
        found = predict(
            setting, told, trace, latency_s=latency_s, seed=seed, ddp_step_s=first.ddp_step_s, pause_s=pause_s
        )
        windows.append(window)
        predictions.append(found)
        removals = [x for x in trace.stays() if x.removed]
        say(
            f"\nseed {seed}: {len(removals)} removals, {sum(x.told for x in removals)} with a notice; a step "
            f"{1000 * window.step_s:.1f} ms, a start {told.start_s:.2f} s, DDP's restart {pause_s:.1f} s, the latest "
            f"deed {window.late_s:.2f} s late"
        )
        say("\n".join(beside(window.accounts, found)))
        say(odd(window.odd))
    say(f"\nall {seeds}:")
    say("\n".join(summary([x.accounts for x in windows], predictions)))
    say(f"({about['cores']} cores, load {about['load_before']} before, {about['commit']})")
    write("goodput", setting, [asdict(x) for x in windows], [{k: asdict(v) for k, v in x.items()} for x in predictions])
    lost = sum(abs(x.others) for window in windows for way, x in window.accounts.items() if way.startswith("ftopt"))
    assert BLOCKING in windows[0].accounts
    return 1 if lost else 0


def kept_at(keep: Path | None, name: str) -> Path | None:
    """A new folder there; None: nothing is kept."""
    if keep is None:
        return None
    (keep / name).mkdir(parents=True)
    return keep / name


def write(name: str, setting: Setting, windows: list[Any], predictions: list[Any]) -> None:
    """The figures as JSON in ``benchmarks/results/speed``."""
    path = RESULTS / "speed" / f"{name}.json"
    told = {"name": name, "about": facts(), "setting": asdict(setting), "windows": windows, "predictions": predictions}
    path.write_text(json.dumps(told, indent=1) + "\n")
