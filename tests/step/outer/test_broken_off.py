"""An outer step that fails in its middle leaves the committed state and the contribution as they were."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.methods import DiLoCo
from ftopt.optimizer import wrap
from ftopt.step.outer.reduction import Reduction
from ftopt.step.tensors import pieces
from ftopt.sync.group import AttemptView, Collective, Reduced
from tests.optimizer.running import PATIENT, anchor, together

ROUNDS = 3
PIECES = 3


def trained() -> list[Tensor]:
    """Each replica's anchor after a few rounds of two."""
    groups = local_groups(2, policy=PATIENT)
    all_have_looked = threading.Barrier(2, timeout=60.0)
    torch.manual_seed(0)
    start = torch.randn(64 * PIECES, pieces._ON_CPU // 64) * 0.1

    def replica(m: int) -> Tensor:
        model = nn.Linear(pieces._ON_CPU // 64, 64 * PIECES, bias=False)
        model.weight.data.copy_(start)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with wrap(inner, model, DiLoCo(sync_every=1), group=groups[m]) as optimizer:
            for step in range(ROUNDS):
                chance = torch.Generator().manual_seed(10 * m + step)
                model.weight.grad = torch.randn(model.weight.shape, generator=chance) * 0.01
                optimizer.step()
            groups[m].wait(0)
            found = torch.cat([tensor.reshape(-1) for tensor in anchor(optimizer, model)])
            all_have_looked.wait()  # a replica that leaves while an attempt runs again has others in the next one
        return found

    return together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]


@pytest.mark.parametrize("at", range(PIECES))
def test_a_step_that_fails_in_its_middle_leaves_the_state_as_it_was(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_AT_ONCE", 1)  # or a kernel steps all pieces in one call
    expected = trained()
    step, reduce = pieces.Steps._step, Reduction.reduce
    failed, kept = set[int](), list[bool]()
    here = threading.local()

    def breaks(self: pieces.Steps, number: int) -> None:
        step(self, number)
        if number == at and here.version < ROUNDS and here.version not in failed:
            failed.add(here.version)  # a replica that fails twice in a row is kept out of the next attempt
            raise ConnectionError("broken off")

    def looks(self: Reduction, attempt: AttemptView, collective: Collective) -> Reduced:
        here.version = attempt.version
        fragment = self.fragments[attempt.fragment]
        state, snapshot = fragment.state, fragment.snapshot
        before = {name: tensor.clone() for name, tensor in state.tensors().items()}
        try:
            return reduce(self, attempt, collective)
        except ConnectionError:
            same = all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
            kept.append(same and not state.damage() and fragment.state is state and fragment.snapshot is snapshot)
            raise

    monkeypatch.setattr(pieces.Steps, "_step", breaks)
    monkeypatch.setattr(Reduction, "reduce", looks)
    found = trained()
    assert failed == set(range(1, ROUNDS)) and kept and all(kept)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(found[0], found[1])
