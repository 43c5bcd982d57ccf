from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.methods import PAFT, Method, SlowMo
from ftopt.optimizer import wrap
from ftopt.run.harm import corrupt
from ftopt.triggers import PAFTRatio, SignalToNoise
from tests.optimizer.running import PATIENT, Noise, together, train_and_look
from tests.problems import Problem, alike, problem
from tests.reference.paft import paft

REPLICAS, STEPS, SIGMA = 4, 60, 0.01


def white(replica: int, step: int, gradients: list[Tensor]) -> None:
    """Normal noise of deviation SIGMA on every element."""
    chance = torch.Generator().manual_seed(1000 * step + replica)
    for gradient in gradients:
        gradient.add_(torch.randn(gradient.shape, generator=chance) * SIGMA)


def train(
    task: Problem,
    method: Method,
    *,
    steps: int = STEPS,
    spoil: Noise = white,
    watch: Callable[[Event], None] = lambda event: None,
    look: Callable[[int, list[nn.Module]], None] = lambda step, models: None,
) -> list[list[Tensor]]:
    """Trains with corrupted gradients; ``look`` is called by one replica while all wait at the end of a step."""
    models = [task.model(0) for _ in range(REPLICAS)]
    steps_done = [0] * REPLICAS

    def on_event(event: Event) -> None:
        watch(event)
        if event.event == "aggregated":
            m = int(event.replica[1:])
            spoil(m, steps_done[m] + 1, [p.grad for p in models[m].parameters() if p.grad is not None])

    groups = local_groups(REPLICAS, policy=PATIENT, on_event=on_event)
    barrier = threading.Barrier(REPLICAS, timeout=60.0)

    def replica(m: int) -> list[Tensor]:
        optimizer = wrap(task.inner(models[m].parameters()), models[m], method, group=groups[m])
        with optimizer:
            for step in range(steps):
                optimizer.zero_grad()
                task.backward(models[m], m, step)
                optimizer.step()
                steps_done[m] += 1
                barrier.wait()
                if m == 0:
                    look(step + 1, list(models))
                barrier.wait()
            return [p.detach().clone() for p in models[m].parameters()]

    return together([lambda m=m: replica(m) for m in range(REPLICAS)])


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_paft_equals_its_paper_bit_for_bit_under_noise(inner: str, overlap: bool) -> None:
    task = problem("mlp", inner)
    expected = paft(task, replicas=REPLICAS, sync_every=10, steps=STEPS, noise=white, overlap=overlap)
    for ours, theirs in zip(train(task, PAFT(sync_every=10, delay=int(overlap))), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), f"off by {float((a - b).abs().max())}"


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
@pytest.mark.slow
def test_until_the_outer_start_step_parameters_are_averaged_after_every_step(overlap: bool) -> None:
    task = problem("mlp", "sgd")
    expected = paft(task, replicas=REPLICAS, steps=STEPS, noise=white, outer_start=23, sync_every=10, overlap=overlap)
    method = PAFT(sync_every=10, delay=int(overlap), average_until_step=23)
    for ours, theirs in zip(train(task, method), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@alike
def wide(seed: int) -> nn.Module:
    """Enough elements for their squares to have a mean."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 4))


@pytest.mark.long
def test_drift_between_two_averages_follows_the_law_for_plain_sgd() -> None:
    """E|mean - params_m|^2 = ((M - 1) / M) d sigma^2 sum eta^2, within 5 %."""
    lr, period, found = 0.05, 50, list[float]()

    def look(step: int, models: list[nn.Module]) -> None:
        if step % period == period - 1:
            flats = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models]
            mean = torch.stack(flats).mean(0)
            found.append(sum(float((mean - f).square().sum()) for f in flats) / len(flats))

    task = Problem(wide, lambda parameters: torch.optim.SGD(parameters, lr=lr))
    train(task, PAFT(sync_every=period), steps=4 * period, look=look)
    d = sum(p.numel() for p in wide(0).parameters())
    law = (REPLICAS - 1) / REPLICAS * d * SIGMA**2 * (period - 1) * lr**2
    assert sum(found) / len(found) == pytest.approx(law, rel=0.05)


@pytest.mark.parametrize(
    ("inner", "keys"),
    [pytest.param("sgd", ["momentum_buffer"], marks=pytest.mark.long), ("adamw", ["exp_avg", "exp_avg_sq"])],
)
def test_moments_are_averaged_on_request(inner: str, keys: list[str]) -> None:
    made: list[torch.optim.Optimizer] = []

    def keep(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(problem("mlp", inner).inner(parameters))
        return made[-1]

    task = Problem(problem("mlp").model, keep)
    for inner_state in ("keep", "average"):
        made.clear()
        train(task, PAFT(sync_every=10, inner_state=inner_state), steps=20)
        states = [list(optimizer.state.values()) for optimizer in made]
        alike = [torch.equal(states[0][i][key], s[i][key]) for s in states[1:] for i in range(4) for key in keys]
        assert all(alike) if inner_state == "average" else not any(alike)


def test_moments_of_an_optimizer_without_any_are_refused() -> None:
    task = Problem(problem("mlp").model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(UserError, match="use inner_state=keep"):
        train(task, PAFT(sync_every=10, inner_state="average"), steps=1)


@pytest.mark.parametrize("method", [PAFT(sync_every=10, inner_state="average"), SlowMo(inner_state="average")])
def test_moments_are_not_rounded(method: Method) -> None:
    """A second moment that a codec has made negative, or nearly 0, made parameters of 1e23."""
    with pytest.raises(UserError, match=r"codec=int8 .* use codec=fp32, or inner_state=keep"):
        train_and_look(problem("mlp", "adamw"), method, replicas=1, steps=1, codec="int8")


@dataclass(frozen=True)
class Scaled(Problem):
    """The loss of a `Problem` times ``by``."""

    by: float = 1.0

    def backward(self, model: nn.Module, replica: int, step: int) -> Tensor:
        """The gradients times ``by`` too."""
        loss = super().backward(model, replica, step)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(self.by)
        return loss * self.by


def noisy(deviation: float) -> Noise:
    """What the fault ``noise`` does to a replica's gradients."""
    chances = [torch.Generator().manual_seed(m) for m in range(REPLICAS)]

    def spoil(replica: int, step: int, gradients: list[Tensor]) -> None:
        corrupt(gradients, "noise", deviation**2, chances[replica])

    return spoil


def periods(task: Problem, method: PAFT, *, deviation: float, steps: int = 60) -> list[int]:
    """The steps between two averages, of a training with this noise in each replica's gradients."""
    averaged = [0]

    def watch(event: Event) -> None:
        if (event.event, event.replica, event.fragment) == ("propose", "r0", 1):
            averaged.append(event.inner_step)

    train(task, method, steps=steps, spoil=noisy(deviation), watch=watch)
    return [after - before for before, after in pairwise(averaged)]


INNERS: dict[str, Callable[[float], Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]]] = {
    "sgd": lambda scale: lambda parameters: torch.optim.SGD(parameters, lr=0.1 / scale),
    "momentum": lambda scale: lambda parameters: torch.optim.SGD(parameters, lr=0.01 / scale, momentum=0.9),
    "adamw": lambda scale: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-12),
}
"""Inner optimizers that take the same steps when the loss is multiplied by a number."""


@pytest.mark.long
@pytest.mark.parametrize(("inner", "deviation"), [("sgd", 0.05), ("momentum", 0.1), ("adamw", 0.3)])
def test_signal_to_noise_is_the_same_in_whatever_units_the_loss_is(inner: str, deviation: float) -> None:
    method, found = PAFT(sync_every=32, trigger=SignalToNoise(initial=8, most=32)), list[list[int]]()
    for scale in (1e-3, 1.0, 1e3):
        task = Scaled(wide, INNERS[inner](scale), scale)
        found.append(periods(task, method, deviation=deviation * scale))
    assert found[0] == found[1] == found[2]
    assert found[1][0] == 8 and all(1 <= period < 32 for period in found[1][1:]), found[1]


@pytest.mark.long
@pytest.mark.parametrize("delay", [0, 1])
def test_the_more_noise_there_is_the_more_often_signal_to_noise_averages(delay: int) -> None:
    task = Problem(wide, INNERS["sgd"](1.0))
    method = PAFT(sync_every=16, delay=delay, trigger=SignalToNoise(initial=4, most=16))
    found = [periods(task, method, deviation=deviation) for deviation in (0.0, 0.05, 0.3)]
    assert found[0][:4] == [4, 16, 16, 16], "without any it is the longest period"
    assert max(found[2][2:]) <= 6 and len(found[2]) > 1.5 * len(found[1]) > 2 * len(found[0]), found


@pytest.mark.long
def test_the_ratio_of_the_paper_changes_with_the_units_of_the_loss() -> None:
    """What `SignalToNoise` is for: under AdamW the gradient scales with the loss, and the drift does not."""
    method = PAFT(sync_every=50, trigger=PAFTRatio(initial=8, most=50))
    small, large = (
        periods(Scaled(wide, INNERS["adamw"](scale), scale), method, deviation=0.1 * scale) for scale in (1e-3, 1e3)
    )
    assert small[:3] == [8, 1, 1] and large[:2] == [8, 50]
