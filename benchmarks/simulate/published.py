"""Published throughput under failures, in samples per second, by the time between two failures; and published failure
rates of runs.

Source: the papers of Oobleck (arXiv 2309.08125: BERT-Large) and ReCycle (arXiv 2405.14009: GPT-3 6.7B).
"""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0

BERT_LARGE: dict[str, dict[float, float]] = {
    "Bamboo": {6 * HOUR_S: 77.0, HOUR_S: 75.6, 600.0: 69.8},
    "Varuna": {6 * HOUR_S: 259.6, HOUR_S: 245.4, 600.0: 168.2},
    "Oobleck": {6 * HOUR_S: 287.1, HOUR_S: 286.3, 600.0: 282.1},
}
"""The table has no throughput without failures: ratios are relative to a failure in 6 h."""

GPT3_6B: dict[str, dict[float, float]] = {
    "Oobleck": {6 * HOUR_S: 4.98, 2 * HOUR_S: 4.65, 1800.0: 2.78},
    "ReCycle": {6 * HOUR_S: 5.17, 2 * HOUR_S: 4.85, 1800.0: 3.53},
}
GPT3_6B_FAULT_FREE = 5.33

MODELS = {
    "Bamboo": "redundant computation (Bamboo)",
    "Varuna": "checkpoint and reshape (Varuna)",
    "Oobleck": "re-planning (Oobleck)",
    "ReCycle": "re-routing (ReCycle)",
}
"""System -> the name of its model in `policies`."""


def ratios() -> list[tuple[str, str, float, float]]:
    """(system, trained model, seconds between failures, ratio to fault-free throughput or to a failure in 6 h)."""
    found = [
        (name, "BERT-Large", every_s, rate / table[6 * HOUR_S])
        for name, table in BERT_LARGE.items()
        for every_s, rate in table.items()
        if every_s < 6 * HOUR_S
    ]
    found += [
        (name, "GPT-3 6.7B", every_s, rate / GPT3_6B_FAULT_FREE)
        for name, table in GPT3_6B.items()
        for every_s, rate in table.items()
    ]
    return found


@dataclass(frozen=True, slots=True)
class Failures:
    """A run's failures: ``count`` times in ``days`` on ``machines`` of 8 GPUs."""

    machines: int
    count: float
    days: float

    def mtbf_s(self, machines: int) -> float:
        """Seconds between two failures of a fleet of ``machines`` such machines."""
        return self.days * 24 * HOUR_S / self.count * self.machines / machines


FAILURES = {
    "llama3": Failures(2048, 466, 54),
    "opt175b": Failures(124, 105, 60),
    "rsc1": Failures(1000, 6.5, 1),
}
"""Llama 3 405B: all interruptions (arXiv 2407.21783, section 3.3.4). OPT-175B: 35 manual and more than 70 automatic
restarts for hardware in two months (arXiv 2205.01068, section 2.5). RSC-1: failures of jobs per node and day (arXiv
2410.21680)."""
