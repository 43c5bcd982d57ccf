from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups, solo
from ftopt.fragments import Balanced
from ftopt.methods import ContributionStats, DecoupledDiLoCo, ReplicaView, Round, Span, StreamingDiLoCo
from ftopt.methods.aggregation import CANCELLED, directions_, lengthened_, lengths, norm
from ftopt.optimizer import wrap
from ftopt.outer import SGD
from ftopt.step.tensors.flat import parameters
from ftopt.sync.group import Contribution
from tests.optimizer.running import PATIENT, together, train_and_look
from tests.problems import Problem, alike, flat, problem
from tests.reference.decoupled import radial, rda
from tests.reference.streaming import streaming

H, STEPS, LONG_S = 12, 100, 60.0
LAYOUT = (Span("a", 0, 30), Span("embedding", 30, 50, embedding=True), Span("b", 50, 120))


def _aggregate(vs: list[Tensor], weights: list[float], layout: tuple[Span, ...] = LAYOUT) -> Tensor:
    """What the members of a quorum make of their displacements."""
    method, n = DecoupledDiLoCo(), vs[0].numel()
    zero = torch.zeros(n)
    mines = [ReplicaView(zero, zero, -v, layout, alone=len(vs) == 1) for v in vs]
    shares = tuple(w / sum(weights) for w in weights)
    mean = torch.zeros(n)
    for mine, share in zip(mines, shares, strict=True):
        mean += method.payload(mine, torch.empty(n)) * share
    scalars = tuple(method.scalars(mine) for mine in mines)
    return method.aggregation.aggregate(mean, Round(0, 1, 0, layout, shares=shares, scalars=scalars))


@pytest.mark.parametrize("members", [1, 2, 5])
def test_tensor_by_tensor_it_is_the_papers_average_and_of_embeddings_the_mean(members: int) -> None:
    vs = [torch.randn(120) * 10.0**-k for k in range(members)]
    weights = [1.0 + k for k in range(members)]
    found = _aggregate(vs, weights)
    for span in LAYOUT:
        parts = [v[span.start : span.stop] for v in vs]
        plain = sum((w * p for w, p in zip(weights, parts, strict=True)), torch.zeros(1)) / sum(weights)
        expected = plain if span.embedding else rda(parts, weights)
        torch.testing.assert_close(found[span.start : span.stop], expected, rtol=1e-5, atol=1e-6)


def test_of_one_learner_it_is_its_displacement_bit_for_bit() -> None:
    v = torch.randn(120)
    assert torch.equal(_aggregate([v], [7.0]), v)


def test_what_fp4_left_out_of_directions_is_not_taken_for_a_displacement() -> None:
    """When the others leave, the last one's payload is its displacement, which arrives as it is."""
    task = problem("mlp", "sgd")
    models = [task.model(0) for _ in range(2)]
    groups = local_groups(2, policy=PATIENT)
    method = DecoupledDiLoCo(sync_every=5, fragments=Balanced(n=1), delay=0, outer=SGD(lr=1.0), codec="fp4")
    moved = list[float]()

    def replica(m: int) -> None:
        optimizer = wrap(task.inner(models[m].parameters()), models[m], method, group=groups[m])
        with optimizer:
            for step in range(40 if m else 20):
                optimizer.zero_grad()
                task.backward(models[m], m, step)
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 if step < 20 else 0.0  # then nothing moves but what is left over
                before = flat(models[m])
                optimizer.step()
                if step >= 20:
                    moved.append(float((flat(models[m]) - before).abs().max()))

    together([lambda m=m: replica(m) for m in range(2)])
    assert max(moved) == 0.0


def test_unlike_directions_keep_their_length() -> None:
    vs = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 5.0])]
    found = _aggregate(vs, [1.0, 1.0], (Span("a", 0, 2),))
    torch.testing.assert_close(found, torch.tensor([4.0, 4.0]) / math.sqrt(2))


def test_directions_that_cancel_give_the_plain_mean_and_no_noise() -> None:
    v = torch.randn(1000)
    layout = (Span("a", 0, 1000),)
    noise = torch.randn(1000) * 1e-6
    found = _aggregate([v, -v + noise], [1.0, 1.0], layout)
    assert norm(found) < CANCELLED * norm(v)
    torch.testing.assert_close(found, noise / 2, rtol=0, atol=1e-6)
    assert not _aggregate([v, -v], [1.0, 1.0], layout).any()
    assert not _aggregate([torch.zeros(1000)] * 2, [1.0, 1.0], layout).any()


def test_the_norm_is_that_of_fp64_whatever_the_scale_and_the_order() -> None:
    for scale in (1e-30, 1e-3, 1.0, 1e30):
        x = torch.randn(3_000_001) * scale
        assert norm(x) == pytest.approx(float(torch.linalg.vector_norm(x.double())), rel=1e-8)
    x[0] = 1e6 * scale  # one that outweighs all others
    assert norm(x) == pytest.approx(float(torch.linalg.vector_norm(x.double())), rel=1e-6)
    y = torch.randn(1 << 20)
    assert norm(y) == norm(y.flip(0)) == norm(y[torch.randperm(1 << 20)])
    assert norm(torch.zeros(5)) == norm(torch.empty(0)) == 0.0
    assert math.isnan(norm(torch.tensor([1.0, float("nan")])))
    assert norm(torch.tensor([1.0, float("-inf")])) == math.inf
    assert norm(torch.tensor([1e-45, 0.0])) == pytest.approx(1e-45, rel=0.5)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_bits() -> None:
    x = torch.randn(3_000_001)
    assert norm(x) == norm(x.cuda())
    layout = (Span("a", 0, 3_000_001),)
    mean = directions_(x, layout) * 0.3
    assert torch.equal(lengthened_(mean.clone(), layout, [2.0]), lengthened_(mean.cuda(), layout, [2.0]).cpu())


def test_lengths_and_directions_leave_embeddings_out() -> None:
    v = torch.randn(120)
    assert lengths(v, LAYOUT) == (norm(v[:30]), norm(v[50:]))
    directed = directions_(v.clone(), LAYOUT)
    assert torch.equal(directed[30:50], v[30:50])
    assert norm(directed[:30]) == pytest.approx(1.0, rel=1e-6)
    assert torch.equal(lengthened_(directed.clone(), LAYOUT, (1.0, 1.0))[30:50], v[30:50])


def test_weights_are_tokens_times_tokens_a_step() -> None:
    method = DecoupledDiLoCo()
    assert method.weight(ContributionStats(steps=10, tokens=400)) == 400 * 40
    assert method.weight(ContributionStats(steps=10, tokens=0)) == 10.0, "nobody counts"
    assert method.weight(ContributionStats(steps=0, tokens=0)) == 0.0


@alike
def embedded(seed: int) -> nn.Module:
    """Has an embedding; the input's first four numbers pick rows."""
    torch.manual_seed(seed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 6)
            self.first = nn.Linear(4, 6)
            self.second = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows = (x[:, 0] * 100).long() % 7
            out: Tensor = self.second(torch.tanh(self.embedding(rows) + self.first(x[:, 4:])))
            return out

    return Model()


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("inner", ["adamw", "sgd"])
def test_decoupled_equals_its_paper_bit_for_bit(inner: str, replicas: int) -> None:
    task = Problem(embedded, problem("mlp", inner).inner)
    rule = Balanced(n=3)
    method = DecoupledDiLoCo(sync_every=H, fragments=rule, wait_for_result_s=LONG_S, adaptive_grace=0.0)
    names = method.partition(parameters(task.model(0)))

    theta, params = streaming(
        task,
        replicas=replicas,
        fragments=names,
        sync_every=H,
        delay=2,
        steps=STEPS,
        combine=radial(["embedding.weight"]),
    )
    for m, ours in enumerate(train_and_look(task, method, replicas=replicas, steps=STEPS)):
        torch.testing.assert_close(ours.anchor, list(theta.values()), rtol=0, atol=0)
        torch.testing.assert_close(ours.params, params[m], rtol=0, atol=0)


def test_contributions_tell_how_long_training_goes_on_without_the_result() -> None:
    task, group = problem("deep"), solo()
    model = task.model(0)
    offered: list[Contribution] = []
    propose = group.propose

    def offer(contribution: Contribution, **how: Any) -> None:
        offered.append(contribution)
        propose(contribution, **how)

    group.propose = offer  # type: ignore[method-assign]
    method = DecoupledDiLoCo(sync_every=6, fragments=Balanced(n=2), delay=3, adaptive_grace=0.5)
    now = 0.0
    optimizer = wrap(task.inner(model.parameters()), model, method, group=group)
    optimizer._core.training.clock = lambda: now
    with optimizer:
        for step in range(12):
            optimizer.zero_grad()
            task.backward(model, 0, step)
            now += 1.0
            optimizer.step()
    assert all(c.grace == 0.5 for c in offered)
    assert offered[0].overlap_s == pytest.approx(3 * 1.0)
    assert DecoupledDiLoCo(adaptive_grace=0.0).overlap.adaptive_grace == StreamingDiLoCo().overlap.adaptive_grace == 0.0
    with pytest.raises(ValueError, match="adaptive_grace=-1"):
        DecoupledDiLoCo(adaptive_grace=-1)


@pytest.mark.parametrize("codec", ["int8", "fp4"])
def test_directions_go_through_a_codec_and_replicas_stay_alike(codec: str) -> None:
    task = problem("deep", "sgd")
    method = DecoupledDiLoCo(sync_every=6, fragments=Balanced(n=2), wait_for_result_s=LONG_S, adaptive_grace=0.0)
    exact = train_and_look(task, method, replicas=2, steps=40)
    coded = train_and_look(task, method, replicas=2, steps=40, codec=codec)
    assert all(torch.equal(a, b) for a, b in zip(coded[0].anchor, coded[1].anchor, strict=True))
    start = torch.cat([p.detach().reshape(-1) for p in task.model(0).parameters()])
    moved = torch.cat([t.reshape(-1) for t in exact[0].anchor]) - start
    off = torch.cat([t.reshape(-1) for t in coded[0].anchor]) - start - moved
    assert norm(off) < 0.25 * norm(moved)
