from __future__ import annotations

import pytest
import torch

from ftopt.methods import LocalSGD, SyncSGD
from tests.optimizer.running import train_and_look
from tests.problems import Problem, problem
from tests.reference.sync_sgd import sync_sgd

STEPS = 100


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_sync_sgd_equals_one_model_with_the_mean_gradient_bit_for_bit(inner: str, replicas: int) -> None:
    expected = sync_sgd(problem("mlp", inner), replicas=replicas, steps=STEPS)
    for ours in train_and_look(problem("mlp", inner), SyncSGD(), replicas=replicas, steps=STEPS):
        assert all(torch.equal(a, b) for a, b in zip(ours.params, expected, strict=True))


def test_the_mean_gradient_is_clipped() -> None:
    expected = sync_sgd(problem("mlp", "sgd"), replicas=2, steps=30, clip_norm=0.2)
    for ours in train_and_look(problem("mlp", "sgd"), SyncSGD(clip_norm=0.2), replicas=2, steps=30):
        assert all(torch.equal(a, b) for a, b in zip(ours.params, expected, strict=True))


def test_gradients_have_no_time_before_they_are_averaged() -> None:
    with pytest.raises(ValueError, match=r"average_until_step=5; sync_sgd averages gradients .* leave it at 0"):
        SyncSGD(average_until_step=5)


def test_there_is_no_round_of_parameters_that_buffers_could_go_with() -> None:
    with pytest.raises(ValueError, match=r"buffers=mean; sync_sgd exchanges gradients alone.* use buffers=local"):
        SyncSGD(buffers="mean")


@pytest.mark.long
def test_local_sgd_that_averages_every_step_of_plain_sgd_is_sync_sgd() -> None:
    plain = Problem(problem("mlp").model, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    ours = train_and_look(plain, SyncSGD(), replicas=4, steps=STEPS)
    theirs = train_and_look(plain, LocalSGD(sync_every=1), replicas=4, steps=STEPS)
    torch.testing.assert_close([o.params for o in ours], [t.params for t in theirs], rtol=0, atol=1e-6)
