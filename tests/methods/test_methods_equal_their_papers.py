from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ftopt.methods import DiLoCo, LocalSGD, ReplicaView, Round
from tests.forkserver import CONTEXT
from tests.optimizer.running import train
from tests.problems import problem
from tests.reference.diloco import diloco
from tests.reference.local_sgd import local_sgd

REPLICAS, STEPS, SYNC_EVERY = 4, 100, 10
CASES = pytest.mark.parametrize(("model", "inner"), [("linear", "sgd"), ("mlp", "adamw")])
PRODUCT = pytest.mark.parametrize(
    ("inner", "replicas"), [(inner, replicas) for inner in ("sgd", "adamw") for replicas in (1, 2, 4)]
)


@CASES
def test_diloco_equals_its_paper_with_torchs_own_sgd_outside(model: str, inner: str) -> None:
    expected = diloco(
        problem(model, inner),
        replicas=REPLICAS,
        sync_every=SYNC_EVERY,
        steps=STEPS,
        outer=lambda theta: torch.optim.SGD(theta, lr=0.7, momentum=0.9, nesterov=True),
    )
    for anchor in train(
        problem(model, inner), DiLoCo(sync_every=SYNC_EVERY, outer="paper"), replicas=REPLICAS, steps=STEPS
    ):
        torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)


@pytest.mark.long
@PRODUCT
def test_diloco_equals_its_equations_bit_for_bit(inner: str, replicas: int) -> None:
    expected = diloco(problem("mlp", inner), replicas=replicas, sync_every=SYNC_EVERY, steps=STEPS)
    for anchor in train(
        problem("mlp", inner), DiLoCo(sync_every=SYNC_EVERY, outer="paper"), replicas=replicas, steps=STEPS
    ):
        assert all(torch.equal(a, b) for a, b in zip(anchor, expected, strict=True))


@pytest.mark.long
@PRODUCT
def test_local_sgd_equals_its_equations_bit_for_bit(inner: str, replicas: int) -> None:
    expected = local_sgd(problem("mlp", inner), replicas=replicas, sync_every=SYNC_EVERY, steps=STEPS)
    for anchor in train(problem("mlp", inner), LocalSGD(sync_every=SYNC_EVERY), replicas=replicas, steps=STEPS):
        assert all(torch.equal(a, b) for a, b in zip(anchor, expected, strict=True))


def test_three_replicas_whose_shares_do_not_round_equal_the_paper_too() -> None:
    expected = diloco(problem(), replicas=3, sync_every=7, steps=35)
    for anchor in train(problem(), DiLoCo(sync_every=7, outer="paper"), replicas=3, steps=35):
        assert all(torch.equal(a, b) for a, b in zip(anchor, expected, strict=True))


def test_local_sgd_equals_torchs_periodic_model_averager(tmp_path: object) -> None:
    results = _averager_processes(f"file://{tmp_path}/store")
    anchors = train(problem(), LocalSGD(sync_every=SYNC_EVERY), replicas=2, steps=60)
    for ours, theirs in zip(anchors, results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def _averager_processes(url: str) -> list[list[torch.Tensor]]:
    queue = CONTEXT.SimpleQueue()
    workers = [CONTEXT.Process(target=_averager, args=(rank, url, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    results = dict(queue.get() for _ in workers)
    for worker in workers:
        worker.join(100)
        assert worker.exitcode == 0
    return [[torch.tensor(values) for values in results[rank]] for rank in range(2)]


def _averager(rank: int, url: str, queue: object) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    task = problem()
    model = task.model(0)
    inner = task.inner(model.parameters())
    averager = PeriodicModelAverager(period=SYNC_EVERY, warmup_steps=SYNC_EVERY - 1)
    for step in range(60):
        inner.zero_grad()
        task.backward(model, rank, step)
        inner.step()
        averager.average_parameters(model.parameters())
    queue.put((rank, [p.tolist() for p in model.parameters()]))  # type: ignore[attr-defined]
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("method", [DiLoCo(sync_every=10), LocalSGD(sync_every=10)], ids=["diloco", "local_sgd"])
def test_a_bf16_anchor_moves_as_far_as_an_fp32_one(method: DiLoCo | LocalSGD) -> None:
    start = torch.cat([p.detach().reshape(-1) for p in problem("mlp").model(0).bfloat16().float().parameters()])
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        (anchor, *_) = train(problem("mlp", "sgd"), method, replicas=4, steps=200, dtype=dtype)
        moved[dtype] = float((torch.cat([t.reshape(-1) for t in anchor]) - start).norm())
    assert moved[torch.bfloat16] == pytest.approx(moved[torch.float32], rel=0.05)


@pytest.mark.parametrize("method", [DiLoCo(sync_every=1), LocalSGD(sync_every=1)], ids=["diloco", "local_sgd"])
def test_rounds_without_training_leave_a_bf16_anchor_where_it_is(method: DiLoCo | LocalSGD) -> None:
    anchor = torch.randn(1000)
    start = anchor.bfloat16().float()
    outer = method.init(anchor)
    now = anchor
    for version in range(1, 21):
        mine = ReplicaView(anchor=now, start=start, params=start, layout=())
        shares = [method.payload(mine, torch.empty(1000)) * 0.25 for _ in range(4)]
        now, outer = method.outer_step(now, outer, sum(shares[1:], shares[0]), Round(0, version, version, ()))
    torch.testing.assert_close(now, anchor, rtol=0, atol=1e-6)
    assert not torch.equal(now, now.bfloat16().float()), "the anchor was pulled to the bf16 grid"
