"""Hugging Face's `Trainer`, with replicas in this process: what it saves, loads, evaluates, stops at and counts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.errors import UserError
from tests.integrations.running import needs
from tests.problems import flat

transformers = pytest.importorskip("transformers", reason="needs the extra `trainers`")
needs("accelerate")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from ftopt.checkpoint.reader import whole  # noqa: E402
from ftopt.integrations.hf import FtoptCallback  # noqa: E402
from ftopt.integrations.membership import Membership  # noqa: E402

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore:.*pin_memory.*")]


class Net(nn.Module):
    """As the trainer wants models: a loss first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Data:
    random = False

    def __init__(self, samples: int = 64) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.samples:
            raise IndexError(index)
        x = torch.arange(4.0) * (1 + index % 7) / 4
        return {"x": x.sin(), "labels": x[:1].cos()}


class Watch(TrainerCallback):
    """Calls a function at the end of each step."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self._act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._act(state)


class Run:
    """A trainer whose optimizer is wrapped."""

    def __init__(
        self,
        folder: Path,
        *,
        inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        group: ftopt.ReplicaGroup | None = None,
        loader: dict[str, Any] | None = None,
        checkpoints: Path | None = None,
        callbacks: list[TrainerCallback] = (),  # type: ignore[assignment]
        sync_every: int = 4,
        listens: bool = False,
        **settings: Any,
    ) -> None:
        self.model, self.group = Net(), group or ftopt.solo()
        method = ftopt.DiLoCo(sync_every=sync_every)
        self.optimizer = ftopt.wrap(
            inner(self.model.parameters(), lr=0.05), self.model, method, group=self.group, leave_on_signals=listens
        )
        kept = None if checkpoints is None else ftopt.Checkpoints(checkpoints, self.optimizer, every=1)
        settings = {"max_steps": 10, "save_strategy": "no", "per_device_train_batch_size": 4, **settings}
        arguments = TrainingArguments(
            str(folder), use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no", **settings
        )
        own = None if loader is None else ftopt.DataLoader(**loader, group=self.group, collate_fn=collate)

        class Own(Trainer):  # type: ignore[misc, valid-type]
            def get_train_dataloader(self) -> Any:
                return own if own is not None else super().get_train_dataloader()

        self.ours = FtoptCallback(self.optimizer, checkpoints=kept)
        self.trainer = Own(
            self.model, arguments, train_dataset=Data(), eval_dataset=Data(8), optimizers=(self.optimizer, None),
            callbacks=[self.ours, *callbacks],
        )  # fmt: skip

    def saved(self, step: int) -> Tensor:
        from safetensors.torch import load_file

        found = load_file(Path(self.trainer.args.output_dir) / f"checkpoint-{step}" / "model.safetensors")
        return torch.cat([found[name].float().reshape(-1) for name, _ in self.model.named_parameters()])

    def outer(self) -> Tensor:
        with self.optimizer.global_parameters():
            return flat(self.model)


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize("evaluates", ["steps", "no"])
def test_what_it_saves_are_the_outer_parameters_with_and_without_an_evaluation(tmp_path: Path, evaluates: str) -> None:
    outers: dict[int, Tensor] = {}
    watch = Watch(lambda state: outers.setdefault(state.global_step, run.outer()))
    run = Run(
        tmp_path, callbacks=[watch], save_strategy="steps", save_steps=3, eval_strategy=evaluates, eval_steps=3,
        save_total_limit=3,
    )  # fmt: skip
    run.trainer.train()
    for step in (6, 9, 10):
        assert torch.equal(run.saved(step), outers[step]), step
    assert not (tmp_path / "checkpoint-3").exists(), "save_total_limit"
    assert torch.equal(run.saved(10), flat(run.model)), "the last one is of the end, with all steps"
    assert run.optimizer.pending_steps == 0 and run.optimizer.inner_step == 10


def test_it_has_left_before_the_best_model_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(
        tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,  # the worst one, which is the first
    )  # fmt: skip
    run.trainer.train()
    assert torch.equal(flat(run.model), run.saved(2))
    before = run.trainer.evaluate()["eval_loss"]
    assert torch.equal(flat(run.model), run.saved(2)), "an evaluation leaves the user's model alone"
    assert before == run.trainer.state.best_metric
    assert run.optimizer._core.closed and "loaded" not in caplog.text


def test_early_stopping_leaves_too(tmp_path: Path) -> None:
    run = Run(
        tmp_path, callbacks=[EarlyStoppingCallback(1)], save_strategy="steps", save_steps=2, eval_strategy="steps",
        eval_steps=2, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, max_steps=30,
    )  # fmt: skip
    run.trainer.train()
    assert run.optimizer.inner_step < 30 and run.optimizer.pending_steps == 0 and run.optimizer._core.closed
    assert torch.equal(flat(run.model), run.saved(2))


def test_a_prediction_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    def digest(predicts: bool) -> str:
        def look(state: Any) -> None:
            if predicts and state.global_step % 3 == 0:
                assert torch.equal(run.outer(), (run.trainer.predict(Data(8)), flat(run.model))[1])

        run = Run(tmp_path, callbacks=[Watch(look)])
        run.trainer.train()
        return run.optimizer.digest()

    assert digest(True) == digest(False)


def test_it_counts_schedules_and_ends_as_the_trainer_alone_does(tmp_path: Path) -> None:
    rates: list[float] = []
    watch = Watch(lambda state: rates.append(run.optimizer.param_groups[0]["lr"]))
    run = Run(tmp_path, callbacks=[watch], gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2)
    assert run.trainer.train().global_step == run.optimizer.inner_step == 12  # 16 micro-batches an epoch: 5 and a rest
    assert rates == pytest.approx([0.05 * (1 - step / 12) for step in range(1, 13)])


def test_several_calls_of_train_go_into_one_block_and_are_refused_without(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.train()
    with pytest.raises(UserError, match="has left its job, at the end of an earlier run"):
        run.trainer.train()
    run = Run(tmp_path)
    with run.optimizer:
        run = Run(tmp_path) if False else run
        ours = FtoptCallback(run.optimizer)
        run.trainer.remove_callback(run.ours)
        run.trainer.add_callback(ours)
        run.trainer.train()
        assert run.optimizer.inner_step == 10
        assert torch.equal(flat(run.model), run.outer()), "between two calls: the global parameters"
        run.trainer.args.max_steps = 15
        run.trainer.train()
        assert run.optimizer.inner_step == run.trainer.state.global_step == 15
    assert run.optimizer.local_steps == 15


def test_after_an_error_in_the_middle_the_replica_can_leave_at_once(tmp_path: Path) -> None:
    def fail(state: Any) -> None:
        if state.global_step == 5:
            raise KeyError("mine")

    run = Run(tmp_path, callbacks=[Watch(fail)])
    with pytest.raises(KeyError, match="mine"):
        run.trainer.train()
    run.optimizer.close(flush=False)
    assert run.optimizer.inner_step == 5


def test_a_replica_that_comes_back_when_the_job_is_done_takes_no_step(tmp_path: Path) -> None:
    first = Run(tmp_path / "a", checkpoints=tmp_path / "job", max_steps=8)
    first.trainer.train()
    steps: list[int] = []
    again = Run(
        tmp_path / "b",
        checkpoints=tmp_path / "job",
        max_steps=8,
        callbacks=[Watch(lambda s: steps.append(s.global_step))],
    )
    again.trainer.train()
    assert again.trainer.state.global_step == 8 and again.optimizer.local_steps == first.optimizer.local_steps
    assert again.optimizer.digest() == first.optimizer.digest()
    assert torch.equal(flat(again.model), flat(first.model))


@pytest.mark.parametrize("also", [False, True], ids=["job's", "trainer's too"])
def test_a_job_goes_on_from_its_checkpoints(tmp_path: Path, also: bool) -> None:
    """With the trainer's own checkpoint, too: its weights are loaded before, and the job's are what counts."""

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 8:
                raise KeyboardInterrupt

    loader = {"dataset": Data(), "batch_size": 4, "epochs": None}
    plain = Run(tmp_path / "a", max_steps=16, loader=loader)
    plain.trainer.train()
    first = Run(
        tmp_path / "b", max_steps=16, loader=loader, checkpoints=tmp_path / "job", callbacks=[Stop()],
        save_strategy="steps", save_steps=3,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        first.trainer.train()
    first.ours._job.checkpoints.close()
    first.optimizer.close(flush=False)
    again = Run(tmp_path / "c", max_steps=16, loader=loader, checkpoints=tmp_path / "job")
    again.trainer.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3") if also else None)
    assert again.optimizer.start_step in (4, 8), "the last one that was whole"
    assert again.trainer.state.global_step == 16
    assert again.optimizer.digest() == plain.optimizer.digest()


def test_a_new_job_from_the_trainers_checkpoint_is_refused(tmp_path: Path) -> None:
    first = Run(tmp_path, save_strategy="steps", save_steps=5)
    first.trainer.train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = Run(tmp_path, inner=torch.optim.SGD, save_strategy="steps", save_steps=5)
    with pytest.raises(UserError, match=r"resumes at step 5, and the job begins at step 0.*another output_dir"):
        again.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert again.optimizer.local_steps == 0 and again.optimizer._core.closed
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_the_loader_of_a_job_gives_each_micro_batch_to_one_step(tmp_path: Path) -> None:
    """11 micro-batches, 3 a step: the last two are a step of their own, since no more come."""
    drawn: list[int] = []
    loader = {"dataset": Data(44), "batch_size": 4, "epochs": 1, "accumulate": 3}
    run = Run(tmp_path, loader=loader, gradient_accumulation_steps=3, max_steps=50)
    units = run.group.units
    assert units is not None
    draw = units.draw
    units.draw = lambda unit: (drawn.append(unit), draw(unit))[1]  # type: ignore[method-assign]
    run.trainer.train()
    assert drawn == list(range(11))
    assert run.optimizer.inner_step == run.trainer.state.global_step == 4
    assert units.ended and run.optimizer.pending_steps == 0


def test_a_job_ends_at_the_end_of_its_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, loader={"dataset": Data(), "batch_size": 4, "epochs": 2}, max_steps=50)
    run.trainer.train()
    assert run.optimizer.inner_step == 32 and "has ended at step 32 of the job's 50" in caplog.text
    assert "the data have ended after 2 epochs, at inner step 32" in caplog.text and "no batch" not in caplog.text


def test_logged_losses_are_those_of_the_steps_taken_here(tmp_path: Path) -> None:
    first = Run(tmp_path / "a", checkpoints=tmp_path / "job", max_steps=8)
    first.trainer.train()
    told: list[dict[str, Any]] = []

    class Logs(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            told.append(dict(logs))

    again = Run(tmp_path / "b", checkpoints=tmp_path / "job", max_steps=12, callbacks=[Logs()])
    again.trainer.args.logging_strategy, again.trainer.args.logging_steps = "steps", 2
    losses: list[float] = []
    compute = again.trainer.compute_loss
    again.trainer.compute_loss = lambda *a, **k: (losses.append(float((x := compute(*a, **k)).detach())), x)[1]
    result = again.trainer.train()
    assert again.optimizer.start_step == 8
    assert told[0]["loss"] == pytest.approx(sum(losses[:2]) / 2)
    assert told[1]["loss"] == pytest.approx(sum(losses[2:4]) / 2)
    group: Any = again.optimizer._core.group
    assert group.session.heartbeats.losses.take() == pytest.approx(told[0]["loss"], rel=1e-5), "for the live page"
    assert result.metrics["train_loss"] == pytest.approx(sum(losses) / 4)


def test_a_schedule_free_optimizer_trains_inside(tmp_path: Path) -> None:
    needs("schedulefree")
    from schedulefree import AdamWScheduleFree

    run = Run(
        tmp_path, inner=AdamWScheduleFree, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=5,
        max_steps=12, lr_scheduler_type="constant",
    )  # fmt: skip
    run.trainer.train()
    assert run.optimizer.inner_step == 12
    assert torch.equal(run.saved(12), run.outer())


def test_a_step_that_the_scaler_skips_is_no_step_of_the_job() -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    model = Net()
    outer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.05), model, ftopt.DiLoCo(sync_every=4), group=ftopt.solo()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(outer, scaler=scaler)
    with outer:
        for step in range(8):
            batch = collate([Data()[i] for i in range(4)])
            loss = scaler.scale(model(**batch)["loss"])
            (loss * (float("inf") if step % 3 == 1 else 1.0)).backward()
            optimizer.step()
            assert optimizer.step_was_skipped == (step % 3 == 1)
            optimizer.zero_grad()
        assert outer.inner_step == outer.local_steps == 5
        assert bool(torch.isfinite(flat(model)).all())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_hands_in_the_pending_steps_and_saves_the_version_that_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    watch = Watch(lambda state: os.kill(os.getpid(), number) if state.global_step == 6 else None)
    run = Run(tmp_path, callbacks=[watch], checkpoints=tmp_path / "job", listens=True)
    with pytest.raises(SystemExit) as ended:
        run.trainer.train()
    assert ended.value.code == 0
    assert run.optimizer._core.closed, "before train() has ended"
    assert run.optimizer.local_steps == run.optimizer.status.committed_step == 7, "it ends at a step's end"
    assert torch.equal(flat(run.model), run.outer())
    assert len(whole(tmp_path / "job")) == 2
    assert "none of its 7 inner steps is pending; to go on: " in caplog.messages[-1]


def test_a_signal_ends_an_evaluation_too(tmp_path: Path) -> None:
    class Long(TrainerCallback):  # type: ignore[misc]
        batches = 0

        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            self.batches += 1
            os.kill(os.getpid(), signal.SIGTERM)

    long = Long()
    run = Run(
        tmp_path, callbacks=[long], eval_strategy="steps", eval_steps=6, per_device_eval_batch_size=1, listens=True
    )
    with pytest.raises(SystemExit):
        run.trainer.train()
    assert long.batches == 1, "the signal comes after ftopt's callback has looked for one, before the second batch"
    assert run.optimizer.local_steps == run.optimizer.status.committed_step == 6


def leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's inner step goes from 5 to 21."""
    step = Membership.step.fget
    assert step is not None
    monkeypatch.setattr(Membership, "step", property(lambda self: (x := step(self)) + 15 * (x > 5)))


def test_evaluations_saves_and_logs_of_steps_that_the_job_leaps_over_are_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaps(monkeypatch)
    found: dict[str, list[int]] = {"evaluate": [], "save": [], "log": []}

    class Note(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found["evaluate"].append(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found["save"].append(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            found["log"] += [state.global_step] * ("loss" in logs)

    run = Run(
        tmp_path, callbacks=[Note()], max_steps=33, eval_strategy="steps", eval_steps=10, save_strategy="steps",
        save_steps=10,
    )  # fmt: skip
    run.trainer.args.logging_strategy, run.trainer.args.logging_steps = "steps", 10
    run.trainer.train()
    assert found == {"evaluate": [21, 30, 33], "save": [21, 30, 33], "log": [21, 30]}


def test_a_leap_over_the_planned_end_evaluates_and_saves_the_last_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaps(monkeypatch)
    run = Run(tmp_path, max_steps=19, eval_strategy="steps", eval_steps=50, save_strategy="steps", save_steps=50)
    run.trainer.train()
    assert run.optimizer.local_steps == 6 and torch.equal(run.saved(21), flat(run.model))


def test_wrong_arguments_are_refused() -> None:
    model = Net()
    with pytest.raises(UserError, match="optimizer is a SGD; give the one"):
        FtoptCallback(torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    outer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=4), group=ftopt.solo()
    )
    with pytest.raises(UserError, match="checkpoints is a str; must be"):
        FtoptCallback(outer, checkpoints="folder")  # type: ignore[arg-type]


def test_a_trainer_of_another_optimizer_or_another_model_is_refused_before_it_trains(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.model = run.trainer.model_wrapped = Net()
    with pytest.raises(UserError, match="has no parameter of the optimizer"):
        run.trainer.train()
    own = Trainer(run.model, run.trainer.args, train_dataset=Data(), callbacks=[FtoptCallback(run.optimizer)])
    with pytest.raises(UserError, match="optimizer, of type AdamW, is not the one of FtoptCallback"):
        own.train()


def test_what_would_make_a_loader_of_the_jobs_loader_is_refused_with_a_message() -> None:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.data_loader import prepare_data_loader

    loader = ftopt.DataLoader(Data(), 4)
    assert Accelerator(cpu=True).prepare(loader) is loader, "prepare() leaves it alone"
    for call in (lambda: skip_first_batches(loader, 2), lambda: prepare_data_loader(loader)):
        with pytest.raises(AttributeError, match=r"the job hands its batches out, .*iterate over it as it is"):
            call()
