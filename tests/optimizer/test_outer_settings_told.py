"""What a replica says about its outer optimizer at the start."""

from __future__ import annotations

import logging

import pytest

import ftopt
from tests.problems import problem

TASK = problem()


def _told(caplog: pytest.LogCaptureFixture, method: ftopt.methods.Method, planned: int) -> list[tuple[int, str]]:
    caplog.set_level(logging.INFO, logger="ftopt.optimizer.joining")
    model = TASK.model(0)
    optimizer = ftopt.wrap(TASK.inner(model.parameters()), model, method, group=ftopt.solo())
    with optimizer:
        next(optimizer.steps(planned))
    return [(record.levelno, record.getMessage()) for record in caplog.records if "outer" in record.getMessage()]


def test_the_settings_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    line = "outer optimizer: sgd, lr=1, momentum=0.25; gain 1.33, memory 67 inner steps"
    assert _told(caplog, ftopt.DiLoCo(sync_every=50), 600) == [(logging.INFO, line)]


def test_settings_that_do_not_suit_the_planned_steps_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    told = _told(caplog, ftopt.DiLoCo(sync_every=50, outer="paper"), 600)
    warnings = [text for level, text in told if level == logging.WARNING]
    assert len(warnings) == 2 and all("use outer=auto" in text for text in warnings)


def test_another_method_has_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    assert _told(caplog, ftopt.LocalSGD(sync_every=300), 600) == []
