"""What is told of an outer step, compared with a plain computation; and that it costs nobody else anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace as Named
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.step.outer import metrics
from ftopt.step.outer.metrics import OuterGradient, data_of_step, divergence
from ftopt.step.outer.reduction import Reduction
from ftopt.step.outer.usual import Sizes, Told
from ftopt.step.tensors.pieces import piece_of

STEPS, EVERY = 6, 2


def measured(gradients: list[Tensor], *, values: bool = False) -> list[dict[str, float | None]]:
    found, before, anchor = [], None, torch.ones_like(gradients[0])
    for gradient in gradients:
        now = OuterGradient(gradient.numel(), values=values, before=before)
        now.see_all(anchor, anchor - gradient if values else gradient)
        found.append(now.measured())
        before = now
    return found


@pytest.mark.parametrize("values", [False, True], ids=["gradients", "values"])
def test_norm_and_cosine_are_those_of_the_whole_gradients(values: bool) -> None:
    torch.manual_seed(0)
    first = torch.randn(3 * piece_of(torch.empty(1)) + 17)
    second = first + torch.randn_like(first)
    one, two = measured([first, second], values=values)
    assert one == {"gradient_norm": pytest.approx(first.norm().item(), rel=1e-5), "cosine": None}
    cosine = torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=0).item()
    assert two["gradient_norm"] == pytest.approx(second.norm().item(), rel=1e-5)
    assert two["cosine"] == pytest.approx(cosine, abs=1e-5)


def test_of_large_gradients_a_sample_gives_the_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_SAMPLED", 1 << 14)
    torch.manual_seed(0)
    first = torch.randn(1_000_003)
    second = first + torch.randn_like(first)
    _, two = measured([first, second])
    assert two["cosine"] == pytest.approx(math.sqrt(0.5), abs=0.02)
    assert two["gradient_norm"] == pytest.approx(second.norm().item(), rel=1e-5), "of the whole"


def test_what_is_not_finite_is_not_known() -> None:
    assert measured([torch.tensor([math.inf, 1.0])]) == [{"gradient_norm": None, "cosine": None}]
    assert divergence([Told(1.0, Sizes(1, 1.0, 1.0, 0.0, 0.0))], None) is None


class Losses(nn.Module):
    """A model whose contributions are easily told: each inner step moves it by a gradient of the replica's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))


def train(method: Callable[[], Method], on_event: Any) -> None:
    """Two replicas with SGD of rate 1, whose gradients are drawn from their number."""
    groups = ftopt.local_groups(
        2, policy=ftopt.FaultPolicy(start_replicas=2, grace_s=60.0, dead_after_s=30.0), on_event=on_event
    )

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        model = Losses()
        with ftopt.wrap(
            torch.optim.SGD(model.parameters(), lr=1.0), model, method(), group=groups[number]
        ) as optimizer:
            for _ in range(STEPS):
                model.weight.grad = torch.randn(5, generator=generator)
                optimizer.step()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, number) for number in range(2)]:
            done.result()


class Hears:
    outer_gradient = True

    def __init__(self) -> None:
        self.prepared: dict[tuple[str, int | None], dict[str, Any]] = {}

    def __call__(self, event: Event) -> None:
        if event.event == "prepare":
            self.prepared[event.replica, event.version] = dict(event.data)


def moves(number: int) -> list[Tensor]:
    """A replica's contribution to each round."""
    generator = torch.Generator().manual_seed(number)
    steps = [torch.randn(5, generator=generator) for _ in range(STEPS)]
    return [steps[at] + steps[at + 1] for at in range(0, STEPS, EVERY)]


@pytest.mark.parametrize(
    "method",
    [lambda: ftopt.DiLoCo(sync_every=EVERY), lambda: ftopt.LocalSGD(sync_every=EVERY)],
    ids=["diloco", "local"],
)
def test_an_outer_step_tells_its_size_norms_cosine_and_divergence(method: Callable[[], Method]) -> None:
    hears = Hears()
    train(method, hears)
    before = None
    for version, (mine, other) in enumerate(zip(moves(0), moves(1), strict=True), start=1):
        data, mean = hears.prepared["r0", version], (mine + other) / 2
        assert (data["size"], data["contributors"], data["steps"], data["staleness"]) == (2, 2, EVERY, 0)
        assert data["bytes"] == data["received"] > 0
        assert data["norm"] == pytest.approx(mine.norm().item(), rel=1e-4)
        assert data["gradient_norm"] == pytest.approx(mean.norm().item(), rel=1e-4)
        assert data["divergence"] == pytest.approx((mine - mean).norm().item(), rel=1e-3)
        cosine = None if before is None else torch.nn.functional.cosine_similarity(mean, before, dim=0).item()
        assert data["cosine"] == (None if cosine is None else pytest.approx(cosine, abs=1e-4))
        before = mean


def test_the_gradient_before_is_that_of_the_committed_attempt() -> None:
    reduction = Reduction.__new__(Reduction)
    reduction._group, reduction._gradients, reduction.lossy = Named(tells_gradients=True), {}, False  # type: ignore[assignment]
    fragment = Named(index=0, view=Named(trained=2, sliced=False), method=Named(execution=Named(values=False)))
    cosines = []
    for attempt, made in ((1, None), (2, 1), (3, 1), (4, 3), (5, None)):  # 2 fails; before 5 a state is fetched
        state = Named(made=None if made is None else Named(attempt=made))
        gradient = reduction._measure(Named(attempt=attempt), fragment, state)  # type: ignore[arg-type]
        assert gradient is not None
        gradient.see_all(torch.zeros(2), torch.tensor([1.0, float(attempt)]))
        cosines.append(gradient.measured()["cosine"])
    expected = [None, 3 / math.sqrt(2 * 5), 4 / math.sqrt(2 * 10), 13 / math.sqrt(10 * 17), None]
    assert cosines == [None if value is None else pytest.approx(value) for value in expected]


def test_nothing_is_measured_unless_a_subscriber_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(OuterGradient, "__init__", never)
    hears = Hears()
    train(lambda: ftopt.DiLoCo(sync_every=EVERY), hears.__call__)  # a function, which has no such attribute
    assert hears.prepared["r0", 1]["size"] == 2 and "gradient_norm" not in hears.prepared["r0", 1]


def test_a_loss_is_told_as_a_number_unless_reading_it_would_wait() -> None:
    assert data_of_step(None, None, 0.1) == {"lr": 0.1}
    data = data_of_step({"tokens": 3, "samples": 1}, torch.tensor(2.0), 0.1)
    assert data == {"tokens": 3, "samples": 1, "lr": 0.1, "loss": 2.0} and isinstance(data["loss"], float)
    elsewhere = torch.empty((), device="meta")
    assert data_of_step(None, elsewhere, 0.1)["loss"] is elsewhere
