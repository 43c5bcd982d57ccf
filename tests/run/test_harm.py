"""What a fault does to tensors, and where in a replica it finds them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import ftopt
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.run.fault_injector import FaultInjector
from ftopt.run.fault_spec import Fault
from ftopt.run.harm import corrupt, flip_bit, harm
from ftopt.step.outer.usual import Usual
from tests.optimizer.running import PATIENT
from tests.problems import seeded


def _spoilt(how: str, size: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    clean = torch.randn(100_000)
    corrupted = clean.clone()
    corrupt([corrupted], how, size, torch.Generator().manual_seed(1))
    return clean, corrupted


def test_noise_has_the_variance_it_was_given() -> None:
    clean, corrupted = _spoilt("noise", 0.01)
    assert abs(float((corrupted - clean).var()) / 0.01 - 1) < 0.03


def test_one_bit_of_one_element_flips() -> None:
    clean, corrupted = _spoilt("bit")
    changed = (clean.view(torch.int32) ^ corrupted.view(torch.int32)).nonzero()
    assert len(changed) == 1
    difference = int((clean.view(torch.int32) ^ corrupted.view(torch.int32))[changed[0]]) & 0xFFFFFFFF
    assert difference.bit_count() == 1


def test_an_element_is_stuck_and_all_are_biased() -> None:
    clean, corrupted = _spoilt("stuck", 7.0)
    assert float(corrupted[0]) == 7.0 and torch.equal(clean[1:], corrupted[1:])
    clean, corrupted = _spoilt("bias", 0.5)
    torch.testing.assert_close(corrupted, clean + 0.5)


def changed(tensors: list[torch.Tensor], bit: int, element: int | None) -> list[tuple[int, int, int]]:
    """(tensor, element, bit) of all bits that flip."""
    before = [t.clone() for t in tensors]
    flip_bit(tensors, bit=bit, element=element)
    found = []
    for number, (old, new) in enumerate(zip(before, tensors, strict=True)):
        integer = {2: torch.int16, 4: torch.int32}[old.element_size()]
        bits = (old.view(integer) ^ new.view(integer)).flatten()
        mask = (1 << 8 * old.element_size()) - 1
        found += [(number, int(i), (int(bits[i]) & mask).bit_length() - 1) for i in bits.nonzero().flatten()]
    return found


@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_a_bit_of_an_element_is_counted_through_all_tensors(bit: int) -> None:
    tensors = [torch.randn(3), torch.randn(2, 2), torch.tensor(5.0)]
    assert changed(tensors, bit, 5) == [(1, 2, bit)]
    assert changed(tensors, bit, 7 + 8) == [(2, 0, bit)], "beyond the end it starts again"
    assert changed([torch.randn(4, 3).t()], bit, 5) == [(0, 5, bit)], "whatever its strides are"


def test_by_default_the_greatest_element_is_hit_and_narrow_ones_have_fewer_bits() -> None:
    assert changed([torch.tensor([1.0, -3.0]), torch.tensor([2.0])], 22, None) == [(0, 1, 22)]
    assert changed([torch.ones(2, dtype=torch.bfloat16)], 31, 1) == [(0, 1, 15)]
    assert changed([], 3, None) == []


ALL = {
    "params": "inner",
    "grads": "inner",
    "inner": "propose",
    "anchor": "reduce",
    "outer": "inner",
    "payload": "payload",
    "sum": "reduce.after",
    "result": "prepare",
}


PRESENT, USUAL = 2, len(Usual._fields)
"""Beside the ten elements of the model: whether each parameter has a gradient, and what is usual in the job, which is
hit where the outer optimizer has no other state."""
EXPECTED = {
    ("anchor", "sync_sgd"): 10 + PRESENT,
    ("outer", "sync_sgd"): 10 + PRESENT,
    ("outer", "paft"): USUAL,
    **{(what, name): 10 + PRESENT for what in ("payload", "sum") for name in ("sync_sgd", "paft")},
    **{("result", name): 10 + PRESENT + USUAL for name in ("sync_sgd", "paft")},
}


@pytest.mark.parametrize("method", [ftopt.DiLoCo(sync_every=2), ftopt.PAFT(sync_every=2), ftopt.SyncSGD()])
@pytest.mark.parametrize("what", list(ALL))
def test_a_bit_flips_wherever_a_replica_has_numbers(what: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    hit: list[int] = []

    def flip(tensors: list[torch.Tensor], **how: int | None) -> None:
        hit.append(sum(t.numel() for t in tensors))
        flip_bit(tensors, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("ftopt.run.harm.flip_bit", flip)
    fault = Fault(do="corrupt", what=what, point=ALL[what], at_step=4, bit=0, element=3)
    injector = FaultInjector([fault], lambda event: None)

    def on_event(event: Event) -> None:
        if event.replica == "r0":
            injector(event)

    groups = ftopt.local_groups(2, policy=PATIENT, on_event=on_event)

    def replica(group: ftopt.ReplicaGroup) -> None:
        with seeded():
            model = nn.Linear(4, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = ftopt.wrap(inner, model, method, group=group)
        if group.replica == "r0":
            injector.learn(harm(optimizer, group))
        with optimizer:
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).square().sum().backward()
                optimizer.step()

    threads = [threading.Thread(target=replica, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert hit == [EXPECTED.get((what, method.name), 10)]
