"""What a history's job is like, drawn from its seed: settings, samples, and what goes wrong how often."""

from __future__ import annotations

import random
from dataclasses import replace

from ftopt.sync.protocol.samples import Samples
from tests.simulation.knobs import Knobs


def drawn(seed: int, chooser: random.Random) -> Knobs:
    """The knobs of the history of ``seed``. What was added later is drawn by a chooser of its own, so that the other
    histories are what they were."""
    knobs = _knobs(chooser, hasty=0.15 if seed % 10 == 4 else 0.0)
    for number, more in enumerate((_graced, _lent, _shared, _saved, _replayed, _slow, _spoiled), 2):
        knobs = more(knobs, random.Random(seed * 7919 + number))
    knobs = _strict(knobs, random.Random(seed * 7919 + 10))
    knobs = _spared(knobs, random.Random(seed * 7919 + 35))  # 35: no seed of a planted bug has spares
    return _forgetful(knobs, random.Random(seed * 7919 + 41))


def _knobs(chooser: random.Random, *, hasty: float) -> Knobs:
    settings: dict[str, float | int | str | None] = {
        "min_replicas": chooser.choice((1, 1, 1, 2)),
        "start_replicas": chooser.choice((None, 2, 2)),
        "start_s": chooser.uniform(1.0, 4.0),
        "grace_s": chooser.uniform(0.3, 2.0),
        "heartbeat_s": 1.0,
        "dead_after_s": 3.0,
        "recovery_s": chooser.uniform(4.0, 12.0),
        "evict_after_s": chooser.choice((6.0, 12.0, 60.0)),
    }
    return Knobs(
        settings=settings,
        fragments=chooser.choice((1, 1, 1, 2, 3, 4)),
        sync_every=chooser.randint(2, 5),
        delay_s=chooser.choice((0.005, 0.05, 0.2)),
        reduce_s=chooser.choice((0.05, 0.5)),
        fetch_s=chooser.choice((0.1, 1.0)),
        fault=chooser.choice((0.01, 0.03, 0.08)),
        corrupt=chooser.choice((0.0, 0.0, 0.0, 0.0, 0.1, 0.3)),
        nonfinite=chooser.choice((0.0, 0.0, 0.0, 0.05)),
        hasty=hasty,
    )


def _graced(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With an adaptive grace in a quarter of all histories; the others are what they would be without it."""
    if chooser.random() < 0.75:
        return knobs
    return replace(knobs, overlap_steps=chooser.randint(1, 4), grace=chooser.choice((0.5, 1.0, 3.0)))


def _lent(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With a sample ledger in half of all histories; the others are what they would be without it."""
    if chooser.random() < 0.5:
        return knobs
    ends = chooser.random() < 0.3
    samples = Samples(
        samples=chooser.randint(20, 100),
        batch_size=chooser.choice((1, 1, 3)),
        drop_last=chooser.random() < 0.5,
        epochs=chooser.choice((1, 1, 2)) if ends else None,
    )
    if ends:
        chooser.random()  # was a setting that is gone: the histories stay what they were
    accumulate, ahead = chooser.choice((1, 1, 2)), chooser.choice((0, 2, 4))
    return replace(knobs, samples=samples, accumulate=accumulate, ahead=ahead)


def _shared(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With a global batch in every eighth history, of those without a sample ledger."""
    if knobs.samples is not None or chooser.random() < 0.75:
        return knobs
    batch_size = chooser.choice((1, 1, 3))
    samples = Samples(
        samples=batch_size * chooser.randint(8, 40) + chooser.randrange(batch_size),
        batch_size=batch_size,
        drop_last=chooser.random() < 0.5,
        epochs=chooser.choice((1, 1, 2)) if chooser.random() < 0.3 else None,
        global_batch=batch_size * chooser.choice((2, 3, 4, 6, 8, 12)),
    )
    return replace(knobs, samples=samples, fragments=1)


def _saved(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With checkpoints, and a day when all replicas die, in every seventh history."""
    return replace(knobs, save_every=chooser.choice((1, 1, 1, 2))) if chooser.random() < 1 / 7 else knobs


def _replayed(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With copies that neighbours keep, in every third history with a sample ledger; in most of these more than one a
    round."""
    lent = knobs.samples is not None and not knobs.global_batch
    knobs = replace(knobs, replay=lent and chooser.random() < 1 / 3)
    return replace(knobs, copy_every=chooser.choice((0, 1, 1, 2, 3))) if knobs.replay else knobs


def _slow(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With fetches that take longer than a round, and than the grace, in every eighth history. A global batch is not
    held open for anybody."""
    slow = not knobs.global_batch and chooser.random() < 1 / 8
    return replace(knobs, fetch_s=chooser.uniform(3.0, 8.0)) if slow else knobs


def _spoiled(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With contributions that are out of line in every sixth history. A global batch leaves nobody out."""
    return replace(knobs, outliers=0.05) if not knobs.global_batch and chooser.random() < 1 / 6 else knobs


def _strict(knobs: Knobs, chooser: random.Random) -> Knobs:
    """Where a loss ends the job, in every twelfth history, of those without checkpoints and copies."""
    if knobs.save_every or knobs.replay or chooser.random() >= 1 / 12:
        return knobs
    return replace(knobs, settings=knobs.settings | {"on_loss": "fail"})


def _spared(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With one or two spares in every sixth history, of those that go on after a loss."""
    if knobs.settings.get("on_loss") == "fail":
        return knobs
    return replace(knobs, spares=chooser.choice((1, 1, 2))) if chooser.random() < 1 / 6 else knobs


def _forgetful(knobs: Knobs, chooser: random.Random) -> Knobs:
    """With a coordinator that remembers hardly any gone incarnation, in every third history."""
    return replace(knobs, kept_gone=chooser.choice((0, 0, 1, 2))) if chooser.random() < 1 / 3 else knobs
