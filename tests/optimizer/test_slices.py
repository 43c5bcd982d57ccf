"""Where a rank's part of a tensor lies in the slices of a flat fragment."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ftopt
from ftopt.methods import BySpeed, Method
from ftopt.methods.method import needs_whole
from ftopt.optimizer.ranks.parts import Box
from ftopt.optimizer.ranks.rank_group import RankGroup
from ftopt.optimizer.ranks.saved_slices import sliced_work
from ftopt.optimizer.ranks.slices import Cut, _runs
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import ReplicaGroup

WHOLE = (5, 4, 3)
BOXES = [
    Box(starts, shape) for starts, shape in product(product((0, 1), (0, 2), (0, 1)), product((0, 1, 4), (1, 2), (1, 2)))
] + [Box((0, 0, 0), WHOLE), Box((2, 0, 0), (3, 4, 3)), Box((0, 1, 0), (5, 2, 3))]


@pytest.mark.parametrize("box", BOXES, ids=lambda box: f"{box.starts}-{box.shape}")
def test_a_part_and_a_slice_have_the_same_elements_in_the_same_order(box: Box) -> None:
    whole = torch.arange(60).view(WHOLE)
    part, runs = box.read(whole), _runs(box, WHOLE)
    for low, high in product(range(0, 61, 7), repeat=2):
        there, here, count = runs.within(low, max(low, high))
        piece = torch.zeros(max(0, high - low), dtype=torch.int64)
        assert part[there].numel() == count
        piece[here] = part[there]
        inside = [x for x in part.tolist() if low <= x < high]
        assert part[there].tolist() == inside
        assert all(piece[x - low] == x for x in inside)


def test_a_part_that_is_no_box_goes_by_numbers() -> None:
    runs = _runs(Box((), (4,), torch.tensor([9, 2, 7, 5])), (10,))
    there, here, count = runs.within(3, 8)
    assert (there.tolist(), here.tolist(), count) == ([2, 3], [4, 2], 2)


def test_a_cut_describes_and_places_what_a_replica_of_one_process_has() -> None:
    model = nn.Sequential(nn.Linear(130, 140), nn.Linear(140, 3).bfloat16(), nn.Linear(3, 7))
    view = FlatView(model)
    cut = Cut.of(dict(model.named_parameters()), [name for name, _ in model.named_parameters()], 2)
    assert cut.describe() == view.describe()
    assert [(s.name, s.start, s.stop, shape, dtype) for s, shape, dtype in cut.places()] == [
        (s.name, s.start, s.stop, shape, dtype) for s, shape, dtype in view.places()
    ]
    for number in range(len(cut.names)):
        (a, b), (c, d) = cut.piece(number, 0), cut.piece(number, 1)
        assert (a, b, d) == (0, c, torch.Size(cut.shapes[number]).numel())


def test_what_is_owed_is_dealt_out_to_the_slices_it_lies_in() -> None:
    model = nn.Linear(300, 300)
    cut = Cut.of(dict(model.named_parameters()), ["weight", "bias"], 3)
    owed = torch.arange(1.0, 40_001.0)
    part = {
        "params": torch.zeros(cut.numel), "snapshot": None,
        "residuals": {"": {"own": None, "first": 20_000, "owed": owed}},
    }  # fmt: skip
    again = torch.zeros(cut.numel)
    for rank, (start, _) in enumerate(cut.bounds):
        found = sliced_work(cut.bounds, rank, part)
        assert found is not None
        left = found["residuals"][""]
        again[start + left["first"] :][: left["owed"].numel()] = left["owed"]
    assert torch.equal(again[20_000:60_000], owed) and not again[:20_000].any() and not again[60_000:].any()


@pytest.mark.parametrize(
    ("method", "whole"),
    [
        (ftopt.DiLoCo(), False),
        (ftopt.StreamingDiLoCo(fragments=ftopt.fragments.Balanced(n=2), delay=2), False),
        (ftopt.LocalSGD(pacing=BySpeed(round_steps=20)), False),
        (ftopt.SyncSGD(), True),
        (ftopt.PAFT(sync_every=4), True),
        (ftopt.DecoupledDiLoCo(sync_every=4), True),
        (ftopt.SlowMo(inner_state="average"), True),
        (ftopt.DiLoCo(buffers="mean"), True),
    ],
)
def test_rank_0_has_all_of_what_is_not_done_in_slices(method: Method, whole: bool) -> None:
    assert needs_whole(method) == whole


def test_a_whole_fragment_is_a_slice_of_rank_0() -> None:
    model = nn.Linear(300, 300)
    cut = Cut.of(dict(model.named_parameters()), ["weight", "bias"], 3, whole=True)
    assert cut.bounds == [(0, 90_300), (90_300, 90_300), (90_300, 90_300)]


def test_a_ranks_group_has_all_that_the_outer_step_asks_a_group_for() -> None:
    island, group = (
        SimpleNamespace(leads=False),
        SimpleNamespace(replica="r0", policy=ftopt.FaultPolicy(), shards=(), standby=False),
    )
    found = RankGroup(group, island, lambda: "", Memory())  # type: ignore[arg-type]
    asked = {*ReplicaGroup.__annotations__, *(name for name in vars(ReplicaGroup) if not name.startswith("_"))}
    users = {"joins", "keep_ledger", "keep_global_batch", "members", "shards"}
    assert not [name for name in sorted(asked - users) if not hasattr(found, name)]


def test_changes_of_other_fragments_take_effect_while_a_round_is_awaited() -> None:
    """Else peers could not fetch these fragments, and the round would wait for these peers."""
    waited, released = list[object](), list[int]()

    def wait(fragment: int, *, timeout_s: float | None, until: Callable[[], bool]) -> bool:
        waited.append(timeout_s)
        return not until()

    group = SimpleNamespace(
        replica="r0", policy=ftopt.FaultPolicy(), shards=(), standby=False, units=None, tells_steps=False,
        tells_gradients=False, incarnation=1, closed=False, stopped=None, wait=wait,
    )  # fmt: skip
    found = RankGroup(group, SimpleNamespace(leads=True, say=lambda word: None), lambda: "", Memory())  # type: ignore[arg-type]
    found._worker = SimpleNamespace(fragments=[], release=released.append)  # type: ignore[assignment]
    found._host = SimpleNamespace(waits=lambda: not released, word=lambda: 1, taken=lambda word: None)  # type: ignore[assignment]
    assert found.wait(0)
    assert (waited, released) == ([None, None], [1, 1])
