"""Held-out loss of each method after equal time, behind links of two rates."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ftopt
from benchmarks.speed.figures import Row
from benchmarks.training import Case, Outcome, train
from ftopt.codecs import codec_named
from ftopt.methods import Method

REPLICAS, PARAMETERS = 4, 131_448
STEP_S, TIME_S = 0.02, 5.0
EVERY, FRAGMENTS, DELAY = 20, 3, 5
RATES = (200, 50)
LR = 8e-3
FP4 = "fp4"
ABOUT = (
    f"The byte GPT of `adamw_bytes` (131,000 parameters), {REPLICAS} replicas of batch 16, AdamW at the best rate of "
    f"benchmarks/results/methods.md, or the optimizers of `diloco_bytes` (Muon), one seed. Each way has {TIME_S:g} s: "
    f"{TIME_S / STEP_S:g} inner steps of {1000 * STEP_S:g} ms, which is what one takes on a core of ours, less what "
    "the link takes for the bytes of a ring all-reduce, unless a delay hides it. The number of steps is computed, with "
    "no other cost of an outer step; the cosine schedule ends there, after the recipe's warm-up of 50 steps. The "
    f"losses are measured. A round every {EVERY} steps; Streaming and Decoupled: {FRAGMENTS} fragments, a delay of "
    f"{DELAY} steps."
)
GOALS = "behind 50 Mbit/s, DiLoCo below SyncSGD"
PAGE = "choosing.md"
DRAWN = "loss"


@dataclass(frozen=True)
class Way:
    """A row; ``muon``: with the optimizers of `diloco_bytes`."""

    method: Method
    muon: bool = False


_OVERLAPPED: dict[str, Any] = {"sync_every": EVERY, "fragments": ftopt.fragments.Balanced(n=FRAGMENTS), "delay": DELAY}
_OVERLAPPED |= {"wait_for_result_s": 600.0}
WAYS = {
    "SyncSGD": Way(ftopt.SyncSGD(clip_norm=1.0)),
    "PAFT": Way(ftopt.PAFT(sync_every=EVERY, clip_norm=1.0)),
    "LocalSGD": Way(ftopt.LocalSGD(sync_every=EVERY)),
    "SlowMo": Way(ftopt.SlowMo(sync_every=EVERY, slow_momentum=0.4)),
    "DiLoCo": Way(ftopt.DiLoCo(sync_every=EVERY)),
    "DiLoCo, fp4": Way(ftopt.DiLoCo(sync_every=EVERY, codec=FP4)),
    "SparseLoCo": Way(ftopt.SparseLoCo(sync_every=EVERY)),
    "Streaming": Way(ftopt.StreamingDiLoCo(**_OVERLAPPED)),
    "Decoupled": Way(ftopt.DecoupledDiLoCo(**_OVERLAPPED)),
    "SyncSGD, Muon": Way(ftopt.SyncSGD(clip_norm=1.0), muon=True),
    "DiLoCo, Muon": Way(ftopt.DiLoCo(sync_every=EVERY), muon=True),
}
_QUICK = ("SyncSGD", "DiLoCo, fp4", "Streaming", "DiLoCo, Muon")


def run(quick: bool) -> list[Row]:
    """A row a way and rate."""
    time_s, ways = (0.3, {name: WAYS[name] for name in _QUICK}) if quick else (TIME_S, WAYS)
    cases = {(name, mbit): case(way, steps(way.method, mbit, time_s)) for name, way in ways.items() for mbit in RATES}
    found = _trained(list(cases.values()))
    return [
        {
            "way": name,
            "Mbit/s": mbit,
            "steps": each.steps,
            "loss": found[each.key()].loss,
            "to SyncSGD": found[each.key()].loss / found[cases["SyncSGD", mbit].key()].loss,
            "sent a replica, MB": found[each.key()].sent_bytes / 1e6,
        }
        for (name, mbit), each in cases.items()
    ]


def _trained(cases: list[Case]) -> dict[str, Outcome]:
    """The longest first, one on each core."""
    todo = {each.key(): each for each in sorted(cases, key=lambda each: -each.steps)}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        return dict(zip(todo, pool.map(train, todo.values()), strict=True))


def case(way: Way, steps: int) -> Case:
    """A run of so many steps."""
    codec = str(way.method.codec)
    plain = Case(recipe="adamw_bytes", method=way.method, codec=codec, lr=LR, steps=steps, eval_every=steps)
    return replace(plain, recipe="diloco_bytes", inner="recipe", lr=None) if way.muon else plain


def steps(method: Method, mbit: int, time_s: float) -> int:
    """Inner steps in ``time_s``; at least one."""
    found = 1
    while seconds(method, mbit, found + 1) <= time_s:
        found += 1
    return found


def seconds(method: Method, mbit: int, steps: int) -> float:
    """Of that many inner steps, and of the outer steps after each whole period."""
    overlapped = isinstance(method, ftopt.StreamingDiLoCo | ftopt.DecoupledDiLoCo)
    parts = FRAGMENTS if overlapped else 1
    sent: float = 2 * (REPLICAS - 1) / REPLICAS * codec_named(str(method.codec)).encoded_bytes(PARAMETERS // parts)
    reduction_s = 8 * sent / (mbit * 1e6)
    waited_s = max(0.0, reduction_s - (DELAY * STEP_S if overlapped else 0.0))
    rounds = parts * (steps // method.sync_every)
    if isinstance(method, ftopt.PAFT):
        rounds += steps
    return steps * STEP_S + rounds * waited_s
