"""How much of the time four replicas compute, by period and link: the grid that others have measured with torchft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ftopt
from benchmarks.speed.figures import QUICK_REPETITIONS, Row, Spread
from benchmarks.speed.linked import serve
from benchmarks.speed.links import linked
from ftopt.codecs import codec_named

REPLICAS = 4
STEP_S = 0.0265
PARAMETERS = 30_800_000
RATES = (50, 200)
"""Above, four replicas on two cores are limited by the processors."""
PERIODS = (1, 8, 32, 128)
WAYS = ("DiLoCo", "DiLoCo, fp4", "Streaming, delay, fp4")
FRAGMENTS = 4
TORCHFT: Mapping[int, tuple[float, ...]] = {
    1: (0.0007, 0.0032),
    8: (0.0055, 0.0248),
    32: (0.0241, 0.100),
    128: (0.116, 0.361),
}
"""H -> by rate: DiLoCo of torchft on four L40S, measured by the authors of diloco-measured, not by us."""
ABOUT = (
    f"{REPLICAS} replicas in network namespaces, each behind a link of the given rate (`tc tbf`), 30.8M parameters in "
    f"fp32; an inner step is a wait of {1000 * STEP_S:g} ms. Compute utilization: the share of time spent in inner "
    f"steps. *Streaming*: {FRAGMENTS} fragments, a delay of a quarter of H, up to 32. *torchft, published*: the same "
    "grid on four L40S, measured by others. *ideal*: the bytes of a ring all-reduce at that rate and no other cost."
)
GOALS = "above torchft's, cell by cell, in fp32"
DRAWN = "utilization"
PAGE = "comparison.md"
_PATIENT = ftopt.FaultPolicy(start_replicas=REPLICAS, dead_after_s=120.0, grace_s=120.0, heartbeat_s=1.0)


def run(quick: bool) -> list[Row]:
    """A row a way, period and rate."""
    if quick:
        return _measure(RATES, (1, 8), 250_000, QUICK_REPETITIONS)
    return _measure(RATES, PERIODS, PARAMETERS, 2)


def _measure(rates: tuple[int, ...], every: tuple[int, ...], parameters: int, rounds: int) -> list[Row]:
    theirs = {(h, rate): used for h, of_rates in TORCHFT.items() for rate, used in zip(RATES, of_rates, strict=True)}
    rows: list[Row] = [
        {"way": "torchft, published", "H": h, "Mbit/s": rate, "utilization": theirs[h, rate], "ideal": None}
        for h in every
        for rate in rates
    ]
    with linked(__name__, REPLICAS, {"parameters": parameters, "step_s": STEP_S, "policy": asdict(_PATIENT)}) as links:
        for number, way in enumerate(WAYS):
            for h in every:
                if way.startswith("Streaming") and h < FRAGMENTS:
                    continue
                links.crew.all(f"begin {number} {h}")
                for rate in rates:
                    links.rate(rate)
                    of_members = links.crew.all(f"run {number} {h} {rounds + 1}")
                    used = [[computed_s / all_s for computed_s, all_s in times[1:]] for times in of_members]
                    found = Spread.of([min(each) for each in zip(*used, strict=True)])
                    row = {"way": way, "H": h, "Mbit/s": rate, "utilization": found}
                    rows.append({**row, "ideal": ideal(way, parameters, h, rate)})
                links.rate(max(rates))
                links.crew.all(f"end {number} {h}")
    return rows


def ideal(way: str, parameters: int, every: int, mbit: int) -> float:
    """Of replicas that each send ``2 (M - 1) / M`` of the encoded parameters a round."""
    streams = way.startswith("Streaming")
    parts = FRAGMENTS if streams else 1
    encoded = codec_named("fp4" if "fp4" in way else "fp32").encoded_bytes(parameters // parts)
    sent = 2 * (REPLICAS - 1) / REPLICAS * encoded
    hidden_s = _delay(every) * STEP_S if streams else 0.0
    return every * STEP_S / (every * STEP_S + parts * max(0.0, 8 * sent / (mbit * 1e6) - hidden_s))


def method_of(way: str, every: int) -> Any:
    """Its settings, with a round every ``every`` steps."""
    if not way.startswith("Streaming"):
        return ftopt.DiLoCo(sync_every=every, codec="fp4" if "fp4" in way else "fp32")
    fragments = ftopt.fragments.Balanced(n=FRAGMENTS)
    return ftopt.StreamingDiLoCo(sync_every=every, delay=_delay(every), fragments=fragments, codec="fp4")


def _delay(every: int) -> int:
    return min(32, every // FRAGMENTS)


if __name__ == "__main__":
    serve(lambda number, every: method_of(WAYS[number], every))
