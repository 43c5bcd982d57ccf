"""`ftopt.TensorBoard`: its files are read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

import ftopt
from ftopt.errors import UserError
from ftopt.events import Event

pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")


@pytest.mark.long
def test_the_same_metrics_are_in_a_jobs_own_files_and_a_next_life_adds_to_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for life, job, steps in ((1, "job", (10, 20)), (2, "job", (20, 30)), (1, "..", (40,))):
        made = ftopt.TensorBoard(tmp_path, every=1)
        made.attend(job, "r0")
        for step in steps:
            data = {"lr": 0.1, "loss": float(step + life)}
            made(Event("stepped", "r0", life, inner_step=step, data=data))
        made(Event("commit", "r0", life, 0, version=life, data={"joined": ["r1"], "absent": []}))
        made(Event("apply", "r0", life, 0, version=life, inner_step=steps[-1]))
        made.close(timeout_s=100.0)  # on a busy machine its process takes long to start
    read = EventAccumulator(str(tmp_path / "job" / "r0"))
    read.Reload()
    assert sorted((s.step, s.value) for s in read.Scalars("inner/loss")) == [(10, 11), (20, 21), (20, 22), (30, 32)]
    assert [s.step for s in read.Scalars("outer/inner_step")] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["__", "job"], "another job has a folder of its own"
    texts = [t.tensor_proto.string_val[0].decode() for t in read.Tensors("events/text_summary")]
    assert texts == ["commit: version 1: r1 joined", "commit: version 2: r1 joined"]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="must be a folder"):
        ftopt.TensorBoard("")
    with pytest.raises(UserError, match=r"TensorBoard\("):
        ftopt.TensorBoard()  # type: ignore[call-arg]
