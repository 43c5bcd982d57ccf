"""What replicas of one job must have alike is compared when they join; what may differ on purpose is said once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import ftopt
from ftopt._connect import local_groups
from ftopt.errors import Refused, UserError
from ftopt.optimizer.ending.at_exit import Raised
from ftopt.step.inner import Inner
from ftopt.step.outer.fingerprint import kinds_of, own_lines
from tests.optimizer.running import PATIENT, together

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(lr: float = 0.01, **settings: float) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, **settings)  # type: ignore[arg-type]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def run(
    *inners: Make,
    policy: ftopt.FaultPolicy = PATIENT,
    start_steps: tuple[int, ...] = (0, 0),
    planned: tuple[int, ...] = (0, 0),
    begun: list[int] | None = None,
) -> list[str]:
    """Both replicas take a step; returns why each was refused, "" for one that was not. ``begun``: where each began."""
    groups = local_groups(len(inners), policy=replace(policy, start_replicas=1))
    first, second = threading.Event(), threading.Event()

    def replica(m: int) -> str:
        if m:
            assert first.wait(60)
        model = nn.Linear(2, 1)
        method = ftopt.LocalSGD(sync_every=100)
        optimizer = ftopt.wrap(inners[m](model), model, method, group=groups[m], start_step=start_steps[m])
        optimizer._core.joining.planned = planned[m]
        try:
            with optimizer:
                if begun is not None:
                    begun.append(optimizer.start_step)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                first.set()
                while not m and len(inners) > 1 and not second.wait(0.01):  # else the job may be over
                    optimizer.sync(propose=False)
                second.set()
        except Refused as refused:
            return str(refused)
        finally:
            second.set()
        return ""

    return together([lambda m=m: replica(m) for m in range(len(inners))])


def test_replicas_that_train_alike_are_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert run(adamw(), adamw()) == ["", ""]
    assert "trains otherwise" not in caplog.text


def test_another_inner_optimizer_is_refused() -> None:
    why = run(adamw(), sgd)[1]
    assert "inner optimizer: SGD here, AdamW in the job" in why


def test_another_inner_optimizer_is_allowed_by_a_setting(caplog: pytest.LogCaptureFixture) -> None:
    assert run(adamw(), sgd, policy=replace(PATIENT, inner="ignore")) == ["", ""]
    assert "trains otherwise" not in caplog.text


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (adamw(0.1), "learning rate: 0.1 here, 0.01 there"),
        (adamw(weight_decay=0.5), "settings of the inner optimizer: "),
    ],
)
def test_another_rate_is_told_once(inner: Make, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert run(adamw(), inner) == ["", ""]
    assert caplog.text.count(f"it trains otherwise than r0, which connected first: {told}") >= 1


def test_a_new_job_begins_at_a_step() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=ftopt.solo(), start_step=25)
    schedule = CosineAnnealingLR(optimizer, 100)
    rates = []
    with optimizer:
        assert optimizer.start_step == optimizer.inner_step == 25
        while optimizer.inner_step < 30:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
    alone = CosineAnnealingLR(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0), 100)
    alone.optimizer.step()
    for _ in range(27):
        alone.step()
    assert rates[2] == pytest.approx(alone.get_last_lr()[0])
    assert (optimizer.status.committed_step, optimizer.local_steps) == (30, 5)


def test_other_planned_steps_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert run(adamw(), adamw(), planned=(300, 200)) == ["", ""]
    assert "planned inner steps: 200 here, 300 there" in caplog.text


def test_who_joins_goes_where_the_job_is_whatever_its_own_step(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[int] = []
    assert run(adamw(), adamw(), start_steps=(25, 7), begun=begun) == ["", ""]
    assert begun[0] == 25 and begun[1] in (25, 26)  # the first one's step may be in a version by then
    assert "trains otherwise" not in caplog.text


def test_an_optimizer_that_computes_its_rate_can_be_compared() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as Adafactor in transformers has it
    assert "own learning rate" not in own_lines(Inner([optimizer]))


def test_what_a_schedule_or_a_restored_state_has_changed_is_not_compared() -> None:
    def made(kind: str) -> dict[str, str]:
        model = nn.Linear(2, 1)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
        if kind == "named":
            inner = torch.optim.AdamW(model.named_parameters(), lr=0.01, weight_decay=0.0, betas=[0.9, 0.999])  # type: ignore[arg-type]
        schedule = OneCycleLR(inner, 0.01, total_steps=100, div_factor=1.0) if kind == "one cycle" else None
        for _ in range(5 if kind in ("one cycle", "stepped") else 0):
            model(torch.ones(1, 2)).sum().backward()
            inner.step()
            if schedule is not None:
                schedule.step()
        if kind == "stepped":
            inner.param_groups[0]["lr"] = 0.004
        return own_lines(Inner([inner]))

    fresh = made("fresh")
    assert fresh["own learning rate"] == "0.01"
    for kind in ("named", "one cycle", "stepped"):
        lines = made(kind)
        assert {name: lines[name] for name in fresh.keys() & lines.keys()} == {
            name: fresh[name] for name in fresh.keys() & lines.keys()
        }, kind
    assert "own learning rate" not in made("stepped")


def test_the_lines_of_an_optimizer_a_parameter_are_short() -> None:
    inner = Inner([torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.01 * (1 + i)) for i in range(700)])
    assert kinds_of(inner) == "700 x AdamW"
    assert max(map(len, own_lines(inner).values())) < 400


@pytest.mark.parametrize(("raised", "said"), [(None, ""), (ValueError("no"), "ValueError: no"), (SystemExit(143), "")])
def test_what_ends_a_loop_is_an_error_or_none(raised: BaseException | None, said: str) -> None:
    try:
        raise MemoryError  # as in a retry with a smaller batch
    except MemoryError:
        ends = Raised()
        assert ends.error() is None and ends.text() == ""
        if raised is not None:
            try:
                raise raised
            except BaseException:
                assert ends.error() is raised and ends.text() == said


def test_an_error_without_a_text_is_named() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("a tensor of a device that is gone")

    ends = Raised()
    try:
        raise Odd
    except Odd:
        assert ends.text() == "Odd"


@pytest.mark.parametrize("wrong", [-1, 1.5, "25", 2**60])
def test_a_step_to_begin_at_is_a_whole_number(wrong: object) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UserError, match=r"start_step="):
        ftopt.wrap(sgd(model), model, ftopt.LocalSGD(sync_every=2), group=ftopt.solo(), start_step=wrong)  # type: ignore[arg-type]
