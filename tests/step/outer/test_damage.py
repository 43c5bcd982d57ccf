"""Memory that changes under the committed state: it is found block by block, and pending work outlives the repair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.codecs import FP32
from ftopt.run.harm import flip_bit
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.digest import block_sums, damage
from ftopt.step.tensors.flat import FlatView
from ftopt.sync.group import AttemptView, Committed, Damaged
from tests.optimizer.scripted import Lonely

SIZE = 40_000  # three blocks of 16,384
BLOCK = slice(16_384, 32_768)
PLACE = 20_000


class Silent:
    """A group that only listens."""

    replica = "r0"
    policy = ftopt.FaultPolicy()
    codec = FP32()
    units = None
    global_batch = None
    tells_gradients = False

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.told.append((event, fields.get("data")))


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, SIZE))


def one_that_has_worked() -> tuple[Vector, OuterStep, Silent, torch.Tensor]:
    """A replica at version 0 with one pending step that moved each parameter by 0.5."""
    model, group = Vector(), Silent()
    outer = OuterStep([FlatView(model)], ftopt.LocalSGD(sync_every=10), group)  # type: ignore[arg-type]
    sound = outer.fragments[0].state.anchor.clone()
    with torch.no_grad():
        model.weight.add_(0.5)
    outer.counters.count_step(0, None)
    return model, outer, group, sound


def install(outer: OuterStep, version: int, anchor: torch.Tensor, *, inner_step: int = 0) -> None:
    from ftopt.step.tensors.digest import digest

    tensors = {"anchor": anchor, "outer.usual": outer.fragments[0].state.outer["usual"].clone()}
    outer.reduction.install(Committed(0, version, inner_step, 0), digest(tensors), tensors, reset=False)


def test_a_flipped_bit_is_found_in_its_block() -> None:
    flat = torch.linspace(-1, 1, SIZE)
    sums = block_sums(flat)
    assert damage(flat, sums) == []
    flat.view(torch.int32)[PLACE] ^= 1
    assert damage(flat, sums) == [BLOCK]


def test_the_same_version_fetched_again_leaves_the_parameters_and_the_work_as_they_are() -> None:
    model, outer, _, sound = one_that_has_worked()
    before = model.weight.detach().clone()
    flip_bit(outer.fragments[0].state.anchor[BLOCK])
    install(outer, 0, sound)
    outer.apply()
    assert torch.equal(model.weight, before)
    assert torch.equal(outer.fragments[0].start, sound)
    assert outer.fragments[0].pending_steps == 1


def test_on_a_newer_version_only_the_damaged_blocks_lose_their_work() -> None:
    model, outer, group, sound = one_that_has_worked()
    flip_bit(outer.fragments[0].state.anchor[BLOCK])
    newer = sound + 2
    install(outer, 1, newer)
    outer.apply()
    assert torch.equal(model.weight[BLOCK], newer[BLOCK])
    for part in (slice(0, BLOCK.start), slice(BLOCK.stop, SIZE)):
        assert torch.allclose(model.weight[part], newer[part] + 0.5)
    assert ("repaired", {"blocks": 1}) in group.told


def test_before_a_retry_a_member_looks_its_own_state_over() -> None:
    _, outer, group, _ = one_that_has_worked()
    group.outstanding = lambda index: False  # type: ignore[attr-defined]
    group.propose = lambda contribution, now: None  # type: ignore[attr-defined]
    outer.propose_pending(0, lr=0.0)
    first, retry = (AttemptView(0, 1, n, 0, 2, 1.0, 2.0, 2) for n in (1, 2))
    outer.reduction.reduce(first, Lonely())
    outer.reduction.discard(0)
    flip_bit(outer.fragments[0].state.anchor[BLOCK])
    with pytest.raises(Damaged, match=r"anchor\[16384:32768\]"):
        outer.reduction.reduce(retry, Lonely())
    assert ("damaged", {"blocks": ["anchor[16384:32768]"]}) in group.told


def test_a_state_that_others_have_made_does_not_let_a_hung_training_thread_seem_to_move() -> None:
    _, outer, _, sound = one_that_has_worked()
    outer.counters.set_step_s(0.25)
    install(outer, 1, sound + 2, inner_step=7)
    assert (outer.inner_step(), outer.reduction.standing()) == (8, (1, 0.25))
    outer.apply()
    assert (outer.inner_step(), outer.reduction.standing()) == (8, (8, 0.25))
