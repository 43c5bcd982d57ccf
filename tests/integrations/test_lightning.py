"""Lightning's `Trainer` and Fabric, with replicas in this process: what is saved, validated, counted and left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ftopt
from ftopt.checkpoint.reader import whole
from ftopt.errors import UserError
from tests.integrations.running import needs
from tests.problems import flat
from tests.run.running import until

pytest.importorskip("lightning", reason="needs the extra `trainers`")

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from ftopt.integrations.lightning import FtoptCallback
from ftopt.integrations.membership import Membership

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
    pytest.mark.filterwarnings("ignore:.*logging interval"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:.*without a checkpoint callback"),
]


class Data:
    random = False

    def __init__(self, samples: int = 64) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4.0) * (1 + index % 7) / 4
        return x.sin(), x[:1].cos()


class Module(LightningModule):
    """Its optimizer is wrapped."""

    def __init__(
        self,
        group: ftopt.ReplicaGroup | None = None,
        *,
        manual: bool = False,
        inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        schedules: bool = False,
        listens: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.group, self.inner, self.schedules = group or ftopt.solo(), inner, schedules
        self.listens = listens
        self.automatic_optimization = not manual
        self.validated: list[Tensor] = []
        self.batches = 0
        self.act: Callable[[], object] = lambda: None

    def configure_optimizers(self) -> Any:
        inner = self.inner(self.parameters(), lr=0.05)
        method = ftopt.DiLoCo(sync_every=4)
        self.optimizer = ftopt.wrap(inner, self, method, group=self.group, leave_on_signals=self.listens)
        if not self.schedules:
            return self.optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, total_iters=16)
        return [self.optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        self.batches += 1
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.validated.append(flat(self))
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.act()

    def outer(self) -> Tensor:
        with self.optimizer.global_parameters():
            return flat(self)


def trainer(folder: Path, *callbacks: Callback, ours: FtoptCallback | None = None, **settings: Any) -> Trainer:
    """On the CPU, and quiet."""
    settings = {"max_steps": 10, "max_epochs": -1, "num_sanity_val_steps": 0, "enable_checkpointing": False, **settings}
    return Trainer(
        accelerator="cpu", default_root_dir=folder, **{"logger": False} | settings, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ours or FtoptCallback(), *callbacks],
    )  # fmt: skip


def loader_of(module: Module, **settings: Any) -> ftopt.DataLoader:
    return ftopt.DataLoader(**{"dataset": Data(), "batch_size": 4, "epochs": None, **settings}, group=module.group)


def saved(path: Path) -> Tensor:
    found = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([value.float().reshape(-1) for value in found.values()])


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_it_validates_and_saves_the_outer_parameters_and_ends_at_the_planned_step(tmp_path: Path, manual: bool) -> None:
    module, outers = Module(manual=manual), dict[int, Tensor]()
    module.act = lambda: outers.setdefault(module.trainer.global_step, module.outer())
    keeps = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(tmp_path, keeps, val_check_interval=5, enable_checkpointing=True, num_sanity_val_steps=1)
    run.fit(module, loader_of(module), DataLoader(Data(8), batch_size=8))
    assert run.global_step == module.optimizer.inner_step == module.batches == 10
    assert module.optimizer.pending_steps == 0 and module.optimizer._core.closed
    sanity, *validated = module.validated
    assert torch.equal(sanity, flat(Module())), "before joining"
    assert torch.equal(validated[0], outers[5]) and torch.equal(validated[1], flat(module))
    for step in (6, 9):
        assert torch.equal(saved(tmp_path / f"step={step}.ckpt"), outers[step])
    assert torch.equal(flat(module), module.outer())


def test_validating_changes_nothing(tmp_path: Path) -> None:
    def digest(**settings: Any) -> str:
        module = Module()
        trainer(tmp_path, **settings).fit(module, loader_of(module), DataLoader(Data(8), batch_size=8))
        return module.optimizer.digest()

    assert digest(val_check_interval=3) == digest(limit_val_batches=0)


def test_accumulation_with_an_odd_rest_uses_each_micro_batch_in_one_step(tmp_path: Path) -> None:
    module, drawn = Module(), list[int]()
    loader = loader_of(module, dataset=Data(44), epochs=1, accumulate=3)
    units = module.group.units
    assert units is not None
    draw = units.draw
    units.draw = lambda unit: (drawn.append(unit), draw(unit))[1]  # type: ignore[method-assign]
    run = trainer(tmp_path, accumulate_grad_batches=3, max_steps=50, gradient_clip_val=1.0)
    run.fit(module, loader)
    assert drawn == list(range(11)) and module.batches == 11
    assert run.global_step == module.optimizer.inner_step == 4
    assert units.ended and module.optimizer.pending_steps == 0


def test_epochs_that_end_early_lose_and_repeat_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, seen = Module(), list[int]()
    loader = loader_of(module, dataset=Data(44), epochs=1)
    units = module.group.units
    assert units is not None
    draw = units.draw
    units.draw = lambda unit: (seen.append(unit), draw(unit))[1]  # type: ignore[method-assign]
    run = trainer(tmp_path, limit_train_batches=3, max_steps=50)
    run.fit(module, loader)
    assert seen == list(range(11)) and module.batches == 11
    assert run.global_step == module.optimizer.inner_step == 11 and run.current_epoch >= 4
    assert "the data have ended after 1 epoch, at inner step 11" in caplog.text
    assert "gets no batch" not in caplog.text, "the trainer begins no epoch of its own behind the end"


def test_micro_batches_that_a_manual_loop_leaves_without_a_step_end_the_run(tmp_path: Path) -> None:
    class Rest(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    module = Rest(manual=True)
    run = trainer(tmp_path, max_steps=50)
    run.fit(module, loader_of(module, dataset=Data(44), epochs=1))
    assert run.global_step == module.optimizer.inner_step == 3
    units = module.group.units
    assert units is not None and not units.ended, "the last two are not done"


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_job_goes_on_from_its_checkpoints_and_its_schedule_too(tmp_path: Path, manual: bool) -> None:
    def module_of(stop: int | None = None) -> Module:
        module = Module(schedules=True, manual=manual)

        def act() -> None:
            if module.optimizer.inner_step == stop:
                until(lambda: bool(whole(tmp_path / "job")))  # it is written beside the training
                raise RuntimeError("killed")

        module.act = act
        return module

    plain = module_of()
    trainer(tmp_path, max_steps=16).fit(plain, loader_of(plain))
    first = module_of(stop=9)
    with pytest.raises(RuntimeError, match="killed"):
        trainer(tmp_path, ours=FtoptCallback(checkpoints=str(tmp_path / "job"), every=1), max_steps=16).fit(
            first, loader_of(first)
        )
    assert first.optimizer._core.closed, "after an exception it has left at once"
    again = module_of()
    run = trainer(tmp_path, ours=FtoptCallback(checkpoints=str(tmp_path / "job"), every=1), max_steps=16)
    run.fit(again, loader_of(again))
    assert again.optimizer.start_step in (4, 8) and run.global_step == 16
    assert again.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"] == 0.0
    assert again.optimizer.digest() == plain.optimizer.digest()


def test_fit_twice_is_two_memberships(tmp_path: Path) -> None:
    module = Module()
    run = trainer(tmp_path, max_steps=6)
    run.fit(module, loader_of(module))
    with pytest.raises(UserError, match="in use by another optimizer, or was closed"):
        trainer(tmp_path, max_steps=12).fit(module, DataLoader(Data(), batch_size=4))
    module.group = ftopt.solo()
    run = trainer(tmp_path, max_steps=4)
    run.fit(module, loader_of(module))
    assert run.global_step == module.optimizer.inner_step == 4


def test_a_schedule_free_optimizer_trains_inside(tmp_path: Path) -> None:
    needs("schedulefree")
    from schedulefree import AdamWScheduleFree

    module = Module(inner=AdamWScheduleFree)
    run = trainer(tmp_path, val_check_interval=3, num_sanity_val_steps=1)
    run.fit(module, loader_of(module), DataLoader(Data(8), batch_size=8))
    assert module.optimizer.inner_step == 10 and torch.equal(flat(module), module.outer())


def test_a_new_job_from_a_trainers_checkpoint_is_refused(tmp_path: Path) -> None:
    first = Module()
    keeps = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer(tmp_path, keeps, enable_checkpointing=True).fit(first, DataLoader(Data(), batch_size=4))
    again = Module()
    with pytest.raises(UserError, match=r"resumes at step 5, and the job begins at step 0.*without ckpt_path"):
        trainer(tmp_path, max_steps=8).fit(
            again, DataLoader(Data(), batch_size=4), ckpt_path=str(tmp_path / "step=5.ckpt")
        )
    assert again.optimizer.local_steps == 0 and again.optimizer._core.closed


def test_bf16_and_clipping_work(tmp_path: Path) -> None:
    module = Module()
    run = trainer(tmp_path, precision="bf16-mixed", gradient_clip_val=0.5)
    run.fit(module, loader_of(module))
    assert run.global_step == module.optimizer.inner_step == 10


class Steps(DummyLogger):
    """The steps that loggers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        self.told.append(step)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_hands_in_the_pending_steps_and_saves_the_version_that_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals, manual: bool
) -> None:
    module = Module(manual=manual, listens=True)
    module.act = lambda: os.kill(os.getpid(), number) if module.batches == 6 else None
    ours = FtoptCallback(checkpoints=str(tmp_path / "job"), every=100)
    with pytest.raises(SystemExit) as ended:
        trainer(tmp_path, ours=ours).fit(module, loader_of(module))
    assert ended.value.code == 0
    assert module.optimizer.local_steps == module.optimizer.status.committed_step == 7, "it ends at a step's end"
    assert torch.equal(flat(module), module.outer())
    assert len(whole(tmp_path / "job")) == 1
    last = caplog.messages[-1]
    assert "has left at version 2, inner step 7: none of its 7 inner steps is pending; to go on: " in last
    assert "left at once" not in caplog.text


def test_sigterm_hands_in_the_pending_steps_also_where_the_trainer_alone_listens(tmp_path: Path) -> None:
    module = Module()
    module.act = lambda: os.kill(os.getpid(), signal.SIGTERM) if module.batches == 6 else None
    with pytest.raises(SystemExit):
        trainer(tmp_path).fit(module, loader_of(module))
    assert module.optimizer.local_steps == module.optimizer.status.committed_step == 6


def test_a_signal_ends_a_validation_too(tmp_path: Path) -> None:
    class Long(Module):
        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            super().validation_step(batch, index)
            os.kill(os.getpid(), signal.SIGTERM)

    module = Long(listens=True)
    with pytest.raises(SystemExit):
        trainer(tmp_path, val_check_interval=6).fit(module, loader_of(module), DataLoader(Data(8), batch_size=1))
    assert len(module.validated) == 1 and module.optimizer.local_steps == module.optimizer.status.committed_step == 6


def test_ctrl_c_without_leave_on_signals_leaves_at_once_and_says_how_to_keep_the_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Module()

    def interrupt() -> None:
        if module.batches == 6:
            raise KeyboardInterrupt

    module.act, before = interrupt, signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer(tmp_path).fit(module, loader_of(module))
    finally:
        signal.signal(signal.SIGINT, before)  # the trainer leaves it ignored
    assert "has left with 2 inner steps that no committed state contains: Ctrl-C ended its loop" in caplog.text
    assert "of its 6 inner steps 2 are in no version; ftopt has saved nothing: " in caplog.messages[-1]


def test_saves_and_logs_of_steps_that_the_job_leaps_over_are_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Membership.step.fget
    assert step is not None
    monkeypatch.setattr(Membership, "step", property(lambda self: (x := step(self)) + 15 * (x > 5)))  # 5, then 21
    module, told = Module(), Steps()
    keeps = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    run = trainer(tmp_path, keeps, max_steps=33, enable_checkpointing=True, logger=told, log_every_n_steps=10)
    module.act = lambda: module.log("loss", 0.0)
    run.fit(module, loader_of(module))
    assert sorted(int(path.stem.removeprefix("step=")) for path in tmp_path.glob("*.ckpt")) == [20, 30]
    assert told.told == [19, 29], "from 0, as without ftopt"


def test_loggers_are_given_the_jobs_step_after_a_comeback(tmp_path: Path) -> None:
    def told(max_steps: int) -> list[int]:
        module, steps = Module(), Steps()
        module.act = lambda: module.log("loss", 0.0)
        ours = FtoptCallback(checkpoints=str(tmp_path / "job"), every=1)
        run = trainer(tmp_path, ours=ours, max_steps=max_steps, logger=steps, log_every_n_steps=2, val_check_interval=2)
        run.fit(module, loader_of(module), DataLoader(Data(8), batch_size=8))
        return sorted(set(steps.told))

    assert told(8) == [1, 3, 5, 7]
    assert told(12) == [9, 11]


def test_several_optimizers_are_refused() -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), super().configure_optimizers()]

    with pytest.raises(UserError, match=r"gives SGD, ReplicaOptimizer; must give one optimizer"):
        trainer(Path()).fit(Two(manual=True), DataLoader(Data(), batch_size=4))


def test_fabric_refuses_to_set_up_the_jobs_loader_or_leaves_it_alone() -> None:
    fabric, loader = Fabric(accelerator="cpu"), ftopt.DataLoader(Data(), 4)
    model = nn.Linear(4, 1)
    outer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=4), group=ftopt.solo()
    )
    fabric.setup(model, outer)
    with pytest.raises((TypeError, AttributeError)) as refused:
        fabric.setup_dataloaders(loader)  # type: ignore[arg-type]
    assert "DataLoader" in str(refused.value)


def test_a_fabric_state_dict_comes_back(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    bare = nn.Linear(4, 1)
    outer = ftopt.wrap(torch.optim.AdamW(bare.parameters()), bare, ftopt.DiLoCo(sync_every=4), group=ftopt.solo())
    model, optimizer = fabric.setup(bare, outer)
    with outer:
        for _ in range(5):
            fabric.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        outer.eval()
        fabric.save(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer})
        with outer.global_parameters():
            kept = flat(bare)
        optimizer.train()
        fabric.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
    found = fabric.load(tmp_path / "saved.ckpt")
    assert torch.equal(torch.cat([v.float().reshape(-1) for v in found["model"].values()]), kept)
