"""The losses that a training thread tells, on their way into the heartbeats."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from torch import nn

from ftopt._connect import local_groups
from ftopt.data.loader import DataLoader
from ftopt.methods import DiLoCo, SyncSGD
from ftopt.optimizer import wrap
from ftopt.step.outer.counters import StepTotals
from ftopt.sync.protocol.limits import MAX_LOSS
from ftopt.sync.replica.tally import Losses

MODES = [pytest.param(float, id="floats"), pytest.param(torch.tensor, id="tensors")]


@pytest.mark.parametrize("kind", MODES)
def test_a_heartbeat_has_the_mean_of_the_steps_since_one_asked_for_it(kind: Any) -> None:
    losses = Losses()
    assert losses.take() is None, "none is known"
    losses.add(kind(8.0))
    for loss in (1.0, 2.0):
        losses.add(kind(loss))
    assert losses.take() == 8
    assert losses.take() == 8, "while no step is taken"
    losses.add(kind(6.0))
    assert losses.take() == 3, "of 1, 2 and 6"


def test_a_tensor_is_read_once_per_heartbeat_and_counts_as_it_was() -> None:
    losses, loss = Losses(), torch.tensor(1.0)
    losses.add(loss)
    loss.fill_(5.0)  # as a captured graph does
    assert losses.take() == 1
    losses.add(loss)
    for _ in range(10):
        losses.add(torch.tensor(1.0, device="meta"))  # which cannot be read
    assert losses.take() == 5


def test_a_loss_on_another_device_begins_a_new_mean() -> None:
    losses = Losses()
    losses.add(torch.tensor(8.0))
    losses.add(torch.tensor(1.0, device="meta"))
    assert losses.take() == 8
    losses.add(torch.tensor(3.0))
    assert losses.take() == 3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_losses_of_two_cards_are_added_up() -> None:
    losses, totals = Losses(), StepTotals()
    for index in (0, 1, 0):
        loss = torch.ones((), device=f"cuda:{index}")
        losses.add(loss)
        totals = totals.plus(0.1, loss, None)
    assert totals.mean_loss(StepTotals()) == 1


@pytest.mark.gpu
def test_training_does_not_wait_for_a_loss_on_a_gpu() -> None:
    losses = Losses()
    torch.cuda._sleep(1 << 30)  # half a second or more
    loss = torch.ones((), device="cuda")
    for _ in range(100):
        losses.add(loss)
    assert losses.take() is None, "the device is not there yet, and nothing has waited for it"
    torch.cuda.synchronize()
    losses.add(loss)
    assert losses.take() == 1


@pytest.mark.parametrize(
    ("loss", "told"),
    [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (2 * MAX_LOSS, "inf"), (1 / 3, 0.333333)],
)
def test_a_loss_that_json_does_not_have_is_a_word(loss: float, told: float | str) -> None:
    losses = Losses()
    losses.add(loss)
    assert losses.take() == told


@pytest.mark.parametrize("method", [DiLoCo(sync_every=100), SyncSGD()], ids=["diloco", "sync_sgd"])
@pytest.mark.parametrize("way", ["count", "closure"])
def test_what_is_counted_comes_to_the_coordinator(method: Any, way: str) -> None:
    (group,) = local_groups(1)
    model = nn.Linear(2, 1)
    with wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=group) as optimizer:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2)).sum() * 0 + 2.5
            loss.backward()
            return loss

        if way == "closure":
            optimizer.step(closure)
        else:
            optimizer.log(loss=closure())
            optimizer.step()
        hub = group.session.connection._link._hub  # type: ignore[attr-defined]

        async def known() -> float | str | None:
            async with asyncio.timeout(60):
                while (loss := hub.job.status()["replicas"][0]["loss"]) is None:
                    await asyncio.sleep(0.01)
            return loss  # type: ignore[no-any-return]

        assert group.session.network.submit(known()).result(60) == 2.5  # type: ignore[attr-defined]


def test_a_loss_that_cannot_be_read_leaves_its_step_counted_with_its_samples() -> None:
    (group,) = local_groups(1)
    model = nn.Linear(2, 1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, DiLoCo(sync_every=100), group=group)
    loader = DataLoader(torch.ones(8, 2), 2, group=group)
    optimizer.__enter__()
    try:
        model(next(iter(loader))).sum().backward()
        optimizer.log(loss=torch.zeros((), device="meta"))
        with pytest.raises(RuntimeError, match="meta"):
            optimizer.step()
        assert optimizer.local_steps == 1
        used, _ = group.units.kept()  # type: ignore[union-attr]
        assert sum(stop - start for start, stop in used) == 1
    finally:
        optimizer.close(flush=False)
