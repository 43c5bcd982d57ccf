"""One replica's training loop.

The model seed and the order of the samples are the same in all replicas; the seeds of dropout (and of the data with
``data.sampling: random``) come from the recipe's seed, the replica and its incarnation. The learning rate follows the
job's inner step. The first replica by id evaluates now and then: at the start the first of the recipe's, later the
first of those that took part in the newest version, so that another one takes over when it is gone. At the end each one
evaluates, so that the final loss does not depend on one replica's life.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ftopt
from ftopt.config.optimizers import inner_optimizers
from ftopt.config.parts import make_loader, make_scheduler
from ftopt.config.schema import Recipe
from ftopt.config.tasks import task_of
from ftopt.data.draws import Draws
from ftopt.data.seeds import seed_of
from ftopt.errors import FtoptError, JobFailed
from ftopt.methods.short_runs import outer_figures
from ftopt.run.devices import compile_model, device_of
from ftopt.run.ranks import ALONE, Ranks, spread
from ftopt.run.subscribers import CurrentStep, DroppedRounds
from ftopt.run.supervised import Ended, on_signals
from ftopt.sync.group import ReplicaGroup
from ftopt.watch.jsonl import significant

_log = logging.getLogger(__name__)

_LEAVE_S = 30.0
_ONLY_AT_THE_END = 1 << 62  # outer steps between two checkpoints


class Trainer:
    """A replica from the creation of its model to its end.

    Args:
        recipe: what to train, and how.
        group: the replica's group.
        record: kept up to date for subscribers of ``stepped``.
        dropped: subscribes to the group's events; None on ranks other than 0, which get rank 0's answer.
        evaluates: whether this replica evaluates at the start, and in between as long as it has made no version.
        wait_for_others: called when the job has ended, before leaving: until it returns this replica serves its state
            to latecomers.
        ranks: this process' place among the ranks of its replica. All make the same calls; rank 0 emits the events.
        own_checkpoints: the folder for this replica's own checkpoints, if the recipe names none that all replicas
            share; called before it joins, and again afterwards.

    Attributes:
        at_end: whether the job is done; after that it only evaluates, saves and leaves.
        over: whether it has left the job.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: ReplicaGroup,
        *,
        record: CurrentStep,
        dropped: DroppedRounds | None = None,
        evaluates: bool,
        wait_for_others: Callable[[], object] = lambda: None,
        ranks: Ranks = ALONE,
        own_checkpoints: Callable[[], Path] | None = None,
    ) -> None:
        self._recipe = recipe
        self._group = group
        self._record = record
        self._dropped = dropped or DroppedRounds()
        self._evaluates = evaluates
        self._wait_for_others = wait_for_others
        self.ranks = ranks
        self._own_checkpoints = own_checkpoints
        self._stop = self._exhausted = self._hopeless = self.started = self.at_end = self.over = False
        self.saved = True
        torch.manual_seed(recipe.train.seed)
        self._say("replica %s builds the model and opens the data, then joins the job")
        self._task = task_of(recipe)
        device = device_of(recipe.train.device, group.replica) if ranks.size == 1 else torch.device("cpu")
        self._loader = self._sampler(pin_memory=device.type == "cuda")
        self._prepare(device)
        model = self._task.model
        self._task.called = spread(model, recipe.parallel, ranks)
        self._inner = inner_optimizers(recipe.inner_sections(), model)
        self.optimizer = ftopt.wrap(
            self._inner,
            model,
            recipe.method,
            group=group,
            state_dir=recipe.train.state_dir,
            leave_on_signals=ranks.size > 1,  # a signal reaches each rank in a different step, and they must agree
        )
        self.optimizer._core.joining.planned = recipe.train.inner_steps
        self._checkpoints = self._prepare_checkpoints()

    @property
    def replica(self) -> str:
        """The replica's id."""
        return self._group.replica

    def stop(self) -> None:
        """Leaves in good order at the next step boundary; for a replica of one process. Any thread, also signal
        handlers."""
        self._stop = True
        for source in (self._group.units, self._group.global_batch):
            if source is not None:
                source.close()  # the loop may wait for more data

    def run(self) -> bool:
        """Trains until the job's end, `stop`, or a signal to ranks; returns True at the job's end.

        Raises:
            FtoptError: it has left, since no replica computes finite steps any more.
            JobFailed: another replica was lost, and ``policy.on_loss`` is ``fail``.
        """
        try:
            done = self._train()
        except SystemExit:  # the ranks have agreed to leave, and have handed in pending steps
            if not self.started:
                raise
            done = False
            self._tell_end("left")
        except JobFailed:
            if self.started:
                self._tell_end("failed")
            raise
        self.over = True
        if self._hopeless:
            raise FtoptError(
                f"{self.replica}: the steps of {self._recipe.train.give_up_after} rounds in a row "
                "(train.give_up_after) were dropped, since parameters or gradients were NaN or Inf, and no replica had "
                f"any that count; the job stays at inner step {self.optimizer.status.committed_step}; look at the "
                "rate, the loss and the data"
            )
        return done

    def _train(self) -> bool:
        train, optimizer = self._recipe.train, self.optimizer
        self._say("replica %s joins the job")
        with optimizer, self._saving_when_the_job_fails():
            self.started = True
            figures = {f"outer_{name}": value for name, value in outer_figures(self._recipe.method).items()}
            self._tell("started", {"start_step": optimizer.start_step, **figures})
            if self._saves_alone and self._own_checkpoints is not None and self._checkpoints is not None:
                self._checkpoints.move_to(self._own_checkpoints())
            seed = seed_of(train.seed, self._group.replica, self.ranks.agree(self._group.incarnation))
            if not optimizer.status.replaying:
                torch.manual_seed(seed if self.ranks.leads else seed_of(seed, self.ranks.rank))
            batches = self._loader or self._task.batches(seed, (self.ranks.rank, self.ranks.size))
            steps = self._micro_batches(batches)
            scheduler = make_scheduler(self._recipe, optimizer, self._inner)
            if self._checkpoints is not None:
                self._checkpoints.include(batches=batches, scheduler=scheduler)
            evaluated_at = optimizer.status.committed_step
            if self._evaluates and evaluated_at == 0:
                self._evaluate(thorough=True)
            while not self._stop and not self._is_done():
                with self._task.own_code("loading a batch"):
                    micro_batches = next(steps, None)
                self._exhausted = micro_batches is None and not self._stop
                if micro_batches is None or not self._step(micro_batches):
                    break
                scheduler.step()
                if self._is_hopeless():
                    self._hopeless = True
                    self.stop()
                now = optimizer.status.committed_step
                if train.eval_every and now // train.eval_every > evaluated_at // train.eval_every:
                    evaluated_at = now
                    if now < train.inner_steps and self._is_first():
                        self._evaluate()
                if self._checkpoints is not None:
                    self._checkpoints.step()
            self.at_end = done = self._is_done()
            if done:
                self._log_end_of_data()
                optimizer.sync(propose=False)
                with optimizer.busy("done"):
                    self._evaluate(thorough=True, final=True)
                    self._tell_end("done")
                    if self.ranks.leads:
                        self._group.finish()
                    self._wait_for_others()
                    optimizer.sync(propose=False)
                    if self._checkpoints is not None:
                        self._checkpoints.last()
                        self.saved = self._checkpoints.close()
                    self._tell_end("done")  # again: others may have made newer versions
            optimizer.close(flush=not done, timeout_s=_LEAVE_S, early=self._stop)
            if self._checkpoints is not None:
                self.saved = self._checkpoints.close()
            if not done:
                self._tell_end("left")
        return done

    @contextmanager
    def _saving_when_the_job_fails(self) -> Iterator[None]:
        """Saves the version at which a failed job stays, as far as this replica can: if each replica saves only its
        own, it would have nothing else."""
        try:
            yield
        except JobFailed:
            if self._checkpoints is not None and self.started:
                with suppress(FtoptError):  # the user hears of the job's failure instead
                    self._checkpoints.last()
                    self._checkpoints.close()
            raise

    def _say(self, text: str) -> None:
        """Logs what takes long, for a replica that is started by hand."""
        if self.ranks.leads:
            _log.info(text, self._group.replica)

    def _is_done(self) -> bool:
        """Whether the committed inner step has reached the end, or every sample of all epochs is in a commit, for which
        the loop waits at the end of the data. All ranks get both answers in the same step."""
        return self._exhausted or self.optimizer.status.committed_step >= self._recipe.train.inner_steps

    def _log_end_of_data(self) -> None:
        epochs, at, end = self._recipe.data.epochs, self.optimizer.status.committed_step, self._recipe.train.inner_steps
        if self._exhausted and at < end and epochs and self.ranks.leads:
            text = "training ends at inner step %d of %d, since the data have ended; data.epochs=%d gives no more"
            _log.warning(text, at, end, epochs)

    def _is_hopeless(self) -> bool:
        """Whether it gives up, since too many consecutive rounds were not finite; all ranks get the answer in the same
        step."""
        limit = self._recipe.train.give_up_after
        if limit is None or (self.ranks.size > 1 and math.isfinite(self._record.loss)):  # the loss is the mean of all
            return False
        return self.ranks.agree(self._dropped.in_a_row >= limit)

    def _prepare(self, device: torch.device) -> None:
        """Moves the model to its device; after the loader exists, whose worker processes must not inherit a GPU."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._task.to(device)
        if self._recipe.train.compile:
            compile_model(self._task)

    def _sampler(self, *, pin_memory: bool) -> ftopt.DataLoader | None:
        """Draws each sample once. Made before the replica joins: its workers must not inherit its sockets."""
        if self._recipe.data.sampling != "once":
            return None
        several = self.ranks.size > 1
        return make_loader(self._recipe, self._task, self._group, drop_last=several, pin_memory=pin_memory)

    def _micro_batches(self, batches: ftopt.DataLoader | Draws) -> Iterator[Iterable[Any]]:
        """The batches of each inner step in turn; of a global batch, as long as any are left for this replica."""
        if isinstance(batches, ftopt.DataLoader):
            yield from batches.steps() if self._recipe.data.global_batch is None else batches.global_batches()
            return
        while True:
            yield [batches.batch() for _ in range(self._recipe.train.accumulate)]

    def _prepare_checkpoints(self) -> ftopt.Checkpoints | None:
        """Returns the recipe's checkpoints, if any, and loads the one to resume from."""
        settings = self._recipe.checkpoint
        self._saves_alone = settings.dir is None and self._own_checkpoints is not None and settings.every > 0
        if self._saves_alone and self._own_checkpoints is not None:
            folder: str | Path | None = self._own_checkpoints()
            every: int | None = _ONLY_AT_THE_END
        else:
            folder = settings.dir or settings.resume
            every = settings.every if settings.dir is not None and settings.every > 0 else None
        if folder is None or (every is None and settings.resume is None):
            return None
        checkpoints = ftopt.Checkpoints(
            folder, self.optimizer, every=every, keep=settings.keep, shared=not self._saves_alone
        )
        if settings.resume is not None:
            ids = self._recipe.replica_ids()  # `ftopt replica` may give this and other replicas another id
            checkpoints.resume(settings.resume, replicas=ids if self._group.replica in ids else None)
        return checkpoints

    def _step(self, micro_batches: Iterable[Any]) -> bool:
        """Takes an inner step; returns False on `stop`, which leaves the rest of a global batch to the others."""
        record = self._record
        record.lr, record.local_step = self.optimizer.param_groups[0]["lr"], self.optimizer.local_steps + 1
        if not isinstance(micro_batches, Sequence):
            return self._step_together(micro_batches)
        self._step_alone(micro_batches)
        return True

    def _step_together(self, micro_batches: Iterable[Any]) -> bool:
        task, optimizer, record = self._task, self.optimizer, self._record
        total, samples = 0.0, 0
        with task.own_code(f"inner step {record.local_step}"):
            for batch in micro_batches:
                loss, count = task.loss(batch), task.samples(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                total, samples = total + float(loss.detach()) * count, samples + count
                record.loss = total / samples
                optimizer.log(tokens=task.tokens(batch), samples=count, loss=record.loss)
        if self._stop:
            return False
        optimizer.step()
        return True

    def _step_alone(self, micro_batches: Sequence[Any]) -> None:
        train, task, optimizer, record = self._recipe.train, self._task, self.optimizer, self._record
        with task.own_code(f"inner step {record.local_step}"):
            counts = [task.samples(batch) for batch in micro_batches]
            total, samples, tokens = 0.0, sum(counts), 0
            for batch, count in zip(micro_batches, counts, strict=True):
                loss = task.loss(batch) * (count / samples)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                tokens += task.tokens(batch)
        if train.clip_norm is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), train.clip_norm)
        losses, all_tokens = self.ranks.sum(total, tokens)
        record.loss = losses / self.ranks.size
        tokens = int(all_tokens) if self.ranks.leads else 0  # rank 0's events show the sum over all ranks
        optimizer.log(tokens=tokens, samples=samples * self.ranks.size, loss=record.loss)
        optimizer.step()
        optimizer.zero_grad()

    def _is_first(self) -> bool:
        """Whether this replica is the first one, by id, among those that took part in its newest version."""
        members = self.ranks.agree(self._group.members(0) if self.ranks.leads else frozenset())
        return min(members) == self.replica if members else self._evaluates

    def _evaluate(self, *, thorough: bool = False, final: bool = False) -> None:
        """Scores the committed parameters on fixed held-out data, the same in every replica."""
        optimizer = self.optimizer
        with optimizer.busy("evaluating"), optimizer.global_parameters():
            score = self._task.score(thorough=thorough)
        metrics = {name: significant(value) for name, value in score.metrics.items()}
        data = {"loss": significant(score.loss), "accuracy": metrics.pop("accuracy", None), "metrics": metrics}
        self._tell("evaluate", {**data, "final": final, "samples": score.samples})

    def _tell_end(self, reason: str) -> None:
        if not self.ranks.leads:
            return
        optimizer = self.optimizer
        data = {
            "reason": reason,
            "local_steps": optimizer.local_steps,
            "pending_steps": optimizer.pending_steps,
            "pending_by_fragment": optimizer.status.pending_steps,
            "counted_step": optimizer.status.counted_step,
            "anchor_digest": optimizer.digest(),
        }
        self._tell("end", data)

    def _tell(self, name: str, data: Mapping[str, object]) -> None:
        if not self.ranks.leads:
            return
        now = self.optimizer.status
        self._group.emit(name, fragment=0, version=now.versions[0], inner_step=now.committed_step, data=data)


def leaving_on_signals(trainer: Trainer, *, supervised: bool = False) -> AbstractContextManager[None]:
    """SIGTERM and Ctrl-C make the trainer leave in good order; a second signal ends it at once.

    A trainer that has not started because other replicas are missing has nothing to hand in: the first signal ends it
    at once. A trainer at the job's end leaves anyway, and `ftopt.run.runner` always sends it SIGTERM. While one of
    several ranks trains, its optimizer handles signals, and calls this handler to end at once.

    After the block a ``supervised`` trainer, which `ftopt.run.runner` has started, ignores both: it has left, and
    closes its files. The runner announces the end of the run by SIGTERM (`ftopt.run.supervised.terminate_self`), which
    would end it.
    """
    asked = False

    def handle(number: int) -> None:
        nonlocal asked
        if trainer.over:
            return
        if asked or not trainer.started or trainer.ranks.size > 1:
            raise Ended(number)
        asked = True
        if trainer.at_end:
            text = "the job is done: replica %s saves what is left to save, and leaves; a second signal ends it"
            _log.info(text, trainer.replica)
            return
        _log.warning(
            "replica %s leaves (%s); it hands in its pending steps, if any, for %g s at most; a second signal ends it",
            trainer.replica,
            signal.Signals(number).name,
            _LEAVE_S,
        )
        trainer.stop()

    return on_signals(handle, behind=signal.SIG_IGN if supervised else None)
