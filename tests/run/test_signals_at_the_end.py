"""A signal to a replica, or to a run, whose job is done already."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftopt.cli import report
from ftopt.optimizer.ending.at_exit import Raised
from ftopt.optimizer.ending.hand_in import warn_left
from ftopt.run.ranks import ALONE
from ftopt.run.supervised import Ended
from ftopt.run.train import Trainer, leaving_on_signals


def test_a_replica_whose_job_is_done_does_not_say_that_it_hands_in_steps(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[bool] = []
    trainer: Any = SimpleNamespace(over=False, started=True, at_end=True, ranks=ALONE, replica="r0")
    trainer.stop = lambda: stopped.append(True)
    with caplog.at_level(logging.WARNING), leaving_on_signals(cast("Trainer", trainer)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not caplog.messages and not stopped
        trainer.at_end = False
        with pytest.raises(Ended):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_replica_of_a_run_that_has_left_is_not_ended_by_the_runners_word_that_the_run_is_over() -> None:
    trainer: Any = SimpleNamespace(over=False, started=True, at_end=False, ranks=ALONE, replica="r0")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with leaving_on_signals(cast("Trainer", trainer), supervised=True):
            pass
        os.kill(os.getpid(), signal.SIGTERM)  # while it closes wandb's files, say
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    with leaving_on_signals(cast("Trainer", trainer)):
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("early", [False, True])
def test_steps_pending_at_the_jobs_end_came_too_late_for_its_last_outer_step(
    early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fragment = SimpleNamespace(pending_steps=12, by_job=False, index=0)
    group = SimpleNamespace(outstanding=lambda index: False)
    outer: Any = SimpleNamespace(fragments=[fragment], shared=SimpleNamespace(group=group))
    warn_left(outer, "r1", Raised().why_at_once(early=early), apart=False)
    (said,) = caplog.messages
    if early:
        assert said.endswith("no committed state contains: it left at once, after an exception or by flush=False")
    else:
        assert said == (
            "replica r1 has left with 12 inner steps that no committed state contains: it is done, and they came too "
            "late for its last outer step"
        )


def test_ctrl_c_while_the_report_is_written_ends_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftopt.watch.report.write.write", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    report.after(tmp_path, "the job is done; ")
    assert capsys.readouterr().out == (
        f"the job is done; the report was interrupted; to write it: ftopt report {tmp_path}\n"
    )
