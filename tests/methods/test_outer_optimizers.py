from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from ftopt.methods import DiLoCo, Round, outer_optimizers
from ftopt.outer import SGD, Adam, ConstantRate, CosineRate, OuterOptimizer, Torch
from ftopt.step.outer.reduction import outer_step
from ftopt.transport.local import LocalTransport
from tests.optimizer.running import together, train
from tests.problems import problem
from tests.reference.diloco import diloco
from tests.versions import needs_muon

SCHEDULES = [ConstantRate(), ConstantRate(warmup=4), CosineRate(steps=15, warmup=3, floor=0.2)]
BUILT_IN: list[tuple[OuterOptimizer, str, dict[str, object]]] = [
    (SGD(lr=0.7, momentum=0.9, nesterov=True), "SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    (SGD(lr=0.4, momentum=0.5), "SGD", {"lr": 0.4, "momentum": 0.5}),
    (SGD(lr=1.0), "SGD", {"lr": 1.0}),
    (Adam(lr=0.3), "Adam", {"lr": 0.3, "betas": (0.9, 0.95), "eps": 0.1}),
    (Adam(lr=0.1, betas=[0.5, 0.99], eps=1e-3), "Adam", {"lr": 0.1, "betas": (0.5, 0.99), "eps": 1e-3}),
]
ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
RULES = [rule for rule, _, _ in BUILT_IN] + [
    SGD(momentum=0.9, schedule=CosineRate(steps=15)),
    Adam(schedule=ConstantRate(warmup=4)),
    Torch(cls="torch.optim.RMSprop", args={"lr": 0.1}, schedule=CosineRate(steps=15)),
]

# torch.randn itself depends on the CPU's capability; integers do not.
_PROGRAM = """
import hashlib, torch
from ftopt.outer import SGD, Adam, CosineRate
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(7)
def numbers():
    return torch.randint(-(2**20), 2**20, (10_007,), generator=generator).float() / 1_000_003
sha = hashlib.sha256()
for rule in (SGD(lr=0.7, momentum=0.9, nesterov=True), Adam(schedule=CosineRate(steps=15, warmup=3))):
    anchor = numbers()
    state = rule.init(anchor)
    for _ in range(20):
        anchor, state = rule.step(anchor, state, numbers() / 997)
    sha.update(anchor.numpy().tobytes())
print(torch.backends.cpu.get_cpu_capability(), sha.hexdigest())
"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize(("rule", "cls", "args"), BUILT_IN, ids=str)
def test_built_in_ones_equal_torchs(
    rule: OuterOptimizer, cls: str, args: dict[str, object], schedule: ConstantRate | CosineRate
) -> None:
    rule = dataclasses.replace(rule, schedule=schedule)  # type: ignore[type-var]
    theirs = torch.randn(501)
    ours, state = theirs.clone(), rule.init(theirs)
    reference = getattr(torch.optim, cls)([theirs], **args)
    for t in range(1, 21):
        reference.param_groups[0]["lr"] = args["lr"] * schedule.factor(t)
        theirs.grad = torch.randn(501)
        ours, state = rule.step(ours, state, theirs.grad.clone())
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", ELEMENTWISE)
def test_a_torch_class_computes_what_it_computes_also_from_a_state_that_was_handed_on(cls: str) -> None:
    args = {"lr": 0.1, "momentum": 0.9} if cls == "SGD" else {"lr": 0.1}
    rule = Torch(cls=f"torch.optim.{cls}", args=args)
    theirs = torch.randn(501)
    ours, state = theirs.clone(), rule.init(theirs)
    reference = getattr(torch.optim, cls)([theirs], **args)
    names = {name: (t.shape, t.dtype) for name, t in state.items()}
    for _ in range(20):
        theirs.grad = torch.randn(501)
        ours, state = rule.step(ours, state, theirs.grad.clone())
        reference.step()
        assert names == {name: (t.shape, t.dtype) for name, t in state.items()}
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length", [1, 3, 7, 501])
def test_shares_that_are_gathered_are_the_whole_and_the_same_bits_for_all(length: int) -> None:
    method = DiLoCo(outer=Torch(cls="torch.optim.NAdam", args={"lr": 0.1}))
    start, gradients = torch.randn(length), [torch.randn(length) for _ in range(5)]
    alone, whole_state = start.clone(), method.outer.init(start)
    for gradient in gradients:
        alone, whole_state = method.outer.step(alone, whole_state, gradient)
    transport = LocalTransport()

    def member(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        collective = transport.connect(key="k", rank=rank, size=4)
        collective.open()
        anchor, state = start, method.init(start)
        for version, gradient in enumerate(gradients):
            at = Round(0, version + 1, version, ())
            anchor, state = outer_step(method, anchor, state, gradient.clone(), at, collective)
        return anchor, state

    members = together([lambda rank=rank: member(rank) for rank in range(4)])
    for anchor, state in members:
        assert torch.equal(anchor, members[0][0])
        assert all(torch.equal(state[name], t) for name, t in members[0][1].items())
        torch.testing.assert_close(anchor, alone, rtol=0, atol=1e-6)
        torch.testing.assert_close(state, whole_state, rtol=0, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "outside",
    [
        (Adam(lr=0.1), "Adam", {"lr": 0.1, "betas": (0.9, 0.95), "eps": 0.1}),
        (Torch(cls="torch.optim.RMSprop", args={"lr": 0.01}), "RMSprop", {"lr": 0.01}),
    ],
    ids=["adam", "rmsprop"],
)
def test_diloco_with_other_optimizers_outside_equals_its_paper(
    outside: tuple[OuterOptimizer, str, dict[str, object]], replicas: int
) -> None:
    rule, cls, args = outside
    expected = diloco(
        problem(),
        replicas=replicas,
        sync_every=10,
        steps=60,
        outer=lambda theta: getattr(torch.optim, cls)(theta, **args),
    )
    anchors = train(problem(), DiLoCo(sync_every=10, outer=rule), replicas=replicas, steps=60)
    for anchor in anchors:
        torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(anchor, anchors[0], strict=True))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_step_leaves_anchor_and_state_alone_and_shares_no_memory_with_them(rule: OuterOptimizer) -> None:
    anchor, gradient = torch.randn(64), torch.randn(64)
    _, state = rule.step(anchor, rule.init(anchor), gradient.clone())
    kept = [t.clone() for t in (anchor, *state.values())]
    new_anchor, new_state = rule.step(anchor, state, gradient)
    new_anchor.zero_()
    for tensor in new_state.values():
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept, (anchor, *state.values()), strict=True))


def test_the_rate_warms_up_and_comes_down() -> None:
    assert [ConstantRate(warmup=4).factor(t) for t in (1, 2, 4, 5, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [ConstantRate().factor(t) for t in (1, 2)] == [1.0, 1.0]
    cosine = CosineRate(steps=12, warmup=2, floor=0.2)
    assert [cosine.factor(t) for t in (1, 2, 7, 12, 13)] == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])


@pytest.mark.long
def test_unlike_cpus_compute_the_same_bits() -> None:
    lines = []
    for capability in ("default", "avx2"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        lines.append(run.stdout.split())
    if len({line[0] for line in lines}) == 1:
        pytest.skip(f"this machine has one CPU capability only: {lines[0][0]}")
    assert len({line[-1] for line in lines}) == 1, lines


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.execution.sharded], ids=repr)
def test_a_gpu_computes_the_same_bits(rule: OuterOptimizer) -> None:
    anchor = torch.randn(100_003)
    gradients = [torch.randn(100_003) for _ in range(5)]
    results = []
    for device in ("cpu", "cuda"):
        now, state = anchor.to(device), rule.init(anchor.to(device))
        for gradient in gradients:
            now, state = rule.step(now, state, gradient.to(device, copy=True))  # it may be overwritten
        results.append(now.cpu())
    assert torch.equal(*results)


def test_square_roots_are_rounded_correctly() -> None:
    x = 2 * torch.rand(10_007)
    assert torch.equal(outer_optimizers._sqrt_(x.clone()), x.double().sqrt().float())
    assert outer_optimizers._sqrt_(torch.tensor([-1.0, math.nan])).isnan().all()


def test_nesterov_by_hand() -> None:
    rule = SGD(lr=0.5, momentum=0.5, nesterov=True)
    anchor, state = rule.step(torch.tensor([1.0]), rule.init(torch.zeros(1)), torch.tensor([1.0]))
    assert (anchor.item(), state["momentum"].item()) == (0.25, 1.0)  # u = 1, d = 1 + 0.5 = 1.5
    anchor, state = rule.step(anchor, state, torch.tensor([2.0]))
    assert (anchor.item(), state["momentum"].item()) == (-1.375, 2.5)  # u = 0.5 + 2, d = 2 + 1.25 = 3.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.0}, "outer.lr=0.0"),
        ({"lr": float("nan")}, "outer.lr=nan"),
        ({"momentum": 1.0}, "outer.momentum=1.0"),
        ({"nesterov": True}, "has no effect"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_use(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SGD(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Adam(lr=0.0), "outer.lr=0.0"),
        (lambda: Adam(betas=[0.9, 1.0]), "two numbers in"),
        (lambda: Adam(eps=0.0), "outer.eps=0.0"),
        (lambda: ConstantRate(warmup=-1), "schedule.warmup=-1"),
        (lambda: CosineRate(steps=5, warmup=5), "schedule.steps=5; must be a whole number of outer steps, at least 6"),
        (lambda: CosineRate(steps=5, floor=2.0), "schedule.floor=2.0"),
        (lambda: Torch(cls="torch.optim.RMSprob"), "there is no such class"),
        (lambda: Torch(cls="torch.Tensor"), "is no torch.optim.Optimizer"),
        (lambda: Torch(args={"rate": 1.0}), "unexpected keyword argument 'rate'"),
        (lambda: Torch(args={"lr": torch.tensor(1.0)}), "must be numbers, strings and lists"),
        (lambda: Torch(cls="torch.optim.LBFGS"), "closure"),
        pytest.param(lambda: Torch(cls="torch.optim.Muon"), "only supports 2D", marks=needs_muon),
        (lambda: Torch(cls="torch.optim.Adafactor"), "looks at the whole tensor"),
        (lambda: Torch(cls="torch.optim.SparseAdam"), "dense gradients"),
    ],
)
def test_what_cannot_be_an_outer_optimizer_is_refused_with_the_reason(
    make: Callable[[], OuterOptimizer], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make()
