"""Parameters frozen in place: who reads them sees what they were, and nothing is lost when training goes on."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.fragments import Strided
from ftopt.methods import DiLoCo, StreamingDiLoCo
from ftopt.optimizer import wrap
from ftopt.outer import SGD
from ftopt.step.outer.frozen import Assumed, Frozen
from ftopt.step.tensors.flat import FlatView
from tests.optimizer.running import PATIENT, together
from tests.problems import problem

TASK = problem("mlp", "sgd")


def _view() -> tuple[nn.Module, FlatView]:
    model = nn.Linear(30, 7)
    return model, FlatView(model)


def _read(frozen: Frozen, numel: int) -> Tensor:
    out = torch.empty(numel)
    with frozen.parts(64) as parts:
        for part, where in parts:
            out[where] = part.reshape(-1)
    return out


def test_in_place_and_then_as_a_copy_they_are_what_they_were() -> None:
    model, view = _view()
    expected, frozen = view.read(view.empty()), Frozen(view)
    assert frozen.copy is None
    assert torch.equal(_read(frozen, view.numel), expected)
    frozen.thaw(keep=True)
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(_read(frozen, view.numel), expected)
    assert torch.equal(frozen.flat(), expected)


def test_who_comes_after_the_decision_is_told_so() -> None:
    _, view = _view()
    frozen = Frozen(view)
    frozen.thaw(keep=False)
    with pytest.raises(InterruptedError, match="have moved on"):
        _read(frozen, view.numel)


def test_the_parameters_do_not_change_under_a_reader() -> None:
    _, view = _view()
    frozen, thawed = Frozen(view), threading.Event()

    def thaw() -> None:
        frozen.thaw(keep=False)
        thawed.set()

    with frozen.parts(64):
        thread = threading.Thread(target=thaw)
        thread.start()
        assert not thawed.wait(0.05)
    thread.join(60.0)
    assert thawed.is_set()


def test_a_payload_that_was_made_is_used_once_and_for_what_it_was_made() -> None:
    frozen, made = Frozen(_view()[1]), torch.ones(3)
    frozen.offer(Assumed(), made)
    assert frozen.take(Assumed(0.5)) is made and torch.equal(made, torch.full((3,), 0.5))
    assert frozen.take(Assumed(0.5)) is None
    frozen.offer(Assumed(0.5), made)
    assert frozen.take(Assumed(0.25)) is None
    frozen.offer(Assumed(), made)
    assert frozen.take(Assumed(alone=True)) is None


def test_a_blocking_round_copies_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(Frozen, "flat", lambda self: copied.append("flat"))
    monkeypatch.setattr(FlatView, "empty", lambda self: copied.append("empty") or torch.empty(self.numel))
    models, groups = [TASK.model(0) for _ in range(2)], local_groups(2, policy=PATIENT)

    def replica(m: int) -> int:
        with wrap(TASK.inner(models[m].parameters()), models[m], DiLoCo(sync_every=3), group=groups[m]) as optimizer:
            copied.clear()
            for step in range(9):
                optimizer.zero_grad()
                TASK.backward(models[m], m, step)
                optimizer.step()
            assert optimizer.status.versions == (3,)
        return len(copied)

    assert together([lambda m=m: replica(m) for m in range(2)]) == [0, 0]  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:.*no tokens were counted")
def test_who_weighs_nothing_sends_nothing_although_its_payload_was_made_and_its_steps_stay_pending() -> None:
    models, groups = [TASK.model(0) for _ in range(3)], local_groups(3, policy=PATIENT)
    method = DiLoCo(sync_every=1, weights="tokens", outer=SGD(lr=1.0))
    own: dict[int, Tensor] = {}
    before = next(models[0].parameters()).detach().clone()

    def replica(m: int) -> Tensor:
        inner, parameter = torch.optim.SGD(models[m].parameters(), lr=0.1), next(models[m].parameters())
        with wrap(inner, models[m], method, group=groups[m]) as optimizer:
            TASK.backward(models[m], m, 0)
            assert parameter.grad is not None
            own[m] = parameter.detach() - 0.1 * parameter.grad
            optimizer.log(tokens=5 if m < 2 else 0)
            optimizer.step()
            assert optimizer.pending_steps == (m == 2)
            return parameter.detach().clone()

    afters = together([lambda m=m: replica(m) for m in range(3)])  # type: ignore[misc]
    mean = (own[0] + own[1]) / 2
    for m, after in enumerate(afters):
        torch.testing.assert_close(after, mean + (own[m] - before if m == 2 else 0))


def test_parameters_that_are_not_finite_are_given_up_with_delay() -> None:
    method = StreamingDiLoCo(sync_every=4, delay=2, fragments=Strided(n=1), wait_for_result_s=60.0)
    models, groups = [TASK.model(0) for _ in range(2)], local_groups(2, policy=PATIENT)

    def replica(m: int) -> tuple[int, bool]:
        with wrap(TASK.inner(models[m].parameters()), models[m], method, group=groups[m]) as optimizer:
            for step in range(12):
                optimizer.zero_grad()
                TASK.backward(models[m], m, step)
                if m == 1 and step == 3:
                    next(models[m].parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
                optimizer.step()
            optimizer.sync(propose=False)
        return optimizer.local_steps, all(bool(p.isfinite().all()) for p in models[m].parameters())

    assert together([lambda m=m: replica(m) for m in range(2)]) == [(12, True), (12, True)]  # type: ignore[misc]
