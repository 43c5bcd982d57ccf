"""``ftopt run`` over whole epochs, with faults: every sample of the data set is in exactly one commit."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ftopt.data.order import Order
from ftopt.run.fault_spec import COORDINATOR, Fault
from ftopt.sync.protocol.samples import Samples
from tests.run.recount import times, units_by_version
from tests.run.running import Start, events_of, folder_of, summary_of

CONTEXT = 16  # of `TINY`


def tokens(folder: Path, windows: int) -> list[str]:
    """Files of so many windows to train on, and a few to evaluate on; the overrides."""
    drawn = np.random.default_rng(0).integers(0, 256, windows * CONTEXT + 1, dtype=np.uint16)
    drawn.tofile(folder / "train.bin")
    drawn[: 64 * CONTEXT + 1].tofile(folder / "val.bin")
    files = [f"data.path={folder / 'train.bin'}", f"data.held_out={folder / 'val.bin'}"]
    return ["data.name=tokens", *files, "data.epochs=1", "train.inner_steps=100000"]


def times_committed(folder: Path, samples: Samples) -> Counter[int]:
    """Sample -> contributions of commits that it is in, listed from the events of the run alone."""
    order = Order(samples.samples, seed=samples.seed)
    listed: Counter[int] = Counter()
    for unit, count in times(units_by_version(folder_of(folder))).items():
        for sample in order.indices(samples.epoch_of(unit), samples.positions(unit)).tolist():
            listed[sample] += count
    return listed


def seeded_faults(seed: int, replicas: int, steps: int) -> list[Fault]:
    """20 of all kinds; those of one process one after the other."""
    rng = random.Random(seed)
    kinds = [
        *({"do": "kill", "point": point} for point in ("inner", "propose", "reduce", "prepare", "commit", "apply")),
        {"do": "stop", "point": "reduce", "for_s": 1.0},
        {"do": "stop", "point": "inner", "for_s": 5.0},
        {"do": "hang", "point": "inner", "for_s": 2.0},
        {"do": "hang", "point": "propose", "for_s": 4.0},
        {"do": "partition", "point": "inner", "for_s": 1.0},
        {"do": "partition", "point": "gather", "for_s": 4.0},
        {"do": "corrupt", "point": "reduce.after"},
        {"do": "corrupt", "point": "prepare"},
        {"do": "corrupt", "point": "apply", "what": "anchor"},
        {"do": "nan", "point": "inner", "what": "grads"},
        {"do": "slow", "point": "inner", "factor": 4.0, "for_s": 3.0},
    ]
    rng.shuffle(kinds)
    faults = []
    for number, kind in enumerate(kinds):
        back = {"rejoin_s": rng.choice((0.0, 1.0))} if kind["do"] == "kill" else {}
        at_step = steps * (1 + number) // (2 * len(kinds))
        faults.append(Fault(replica=number % replicas, at_step=at_step, **kind, **back))
    # The successor of a killed replica strikes.
    for index, fault in enumerate(faults):
        lives = 1 + sum(other.do == "kill" for other in faults[:index] if other.replica == fault.replica)
        faults[index] = Fault(**{**asdict(fault), "incarnation": lives})
    at = [steps // 8, steps // 4, steps * 3 // 8]
    faults.append(Fault(replica=COORDINATOR, point="quorum", do="kill", at_step=at[0], rejoin_s=0.5))
    faults.append(Fault(replica=COORDINATOR, point="quorum", do="stop", at_step=at[1], for_s=2.0, incarnation=2))
    faults.append(Fault(replica=COORDINATOR, point="decide", do="kill", at_step=at[2], rejoin_s=0.5, incarnation=2))
    return faults


def as_override(faults: list[Fault]) -> str:
    return f"faults={json.dumps([asdict(fault) for fault in faults])}"


@pytest.mark.slow  # by default tests/sync/processes/test_samples_of_processes.py kills
def test_a_killed_replica_s_samples_go_to_others_and_each_is_in_one_commit(tmp_path: Path, start: Start) -> None:
    fault = Fault(replica=1, at_step=15, point="reduce", do="kill", rejoin_s=0.0)
    settings = ["replicas=2", "method.sync_every=10", "data.batch_size=10", as_override([fault])]
    run = start(tmp_path, *tokens(tmp_path, 605), *settings, leave_out="data.name")
    status, error = run.wait()
    assert status == 0, error
    samples = Samples(samples=605, batch_size=10, epochs=1)
    assert times_committed(tmp_path, samples) == Counter(range(605))
    got = summary_of(tmp_path)
    assert len(got["deaths"]) == 1
    assert got["survivor_inner_steps_lost"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0])
def test_an_epoch_of_50_000_samples_survives_twenty_faults(tmp_path: Path, start: Start, seed: int) -> None:
    faults = seeded_faults(seed, replicas=6, steps=300)
    settings = ["replicas=6", "method.sync_every=10", "data.batch_size=25", as_override(faults)]
    run = start(tmp_path, *tokens(tmp_path, 50_000), *settings, "policy.evict_after_s=60", leave_out="data.name")
    status, error = run.wait(1700)
    assert status == 0, error
    assert len(faults) == 20
    struck = len(events_of(tmp_path, "fault"))
    assert struck >= 18, struck  # one or the other point may not come again before the end
    samples = Samples(samples=50_000, batch_size=25, epochs=1)
    assert times_committed(tmp_path, samples) == Counter(range(50_000))
    assert summary_of(tmp_path)["survivor_inner_steps_lost"] == 0
