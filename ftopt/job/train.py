"""One replica's training loop.

The model seed and the order of the samples are the same in all replicas; the seeds of dropout (and of the data with
``data.sampling: random``) come from the recipe's seed, the replica and its incarnation. The learning rate follows the
job's inner step. The first replica in the order of ids evaluates now and then; at the end each one does, so that the
final loss does not hang on one replica's life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import ftopt
from ftopt.config.schema import Recipe
from ftopt.data.draws import Draws
from ftopt.data.seeds import seed_of
from ftopt.events import Event, OnEvent
from ftopt.job.inner import inner_optimizers
from ftopt.job.ranks import ALONE, Ranks, spread
from ftopt.job.schedule import factor
from ftopt.job.subscribers import CurrentStep
from ftopt.job.supervised import on_signals
from ftopt.job.task import task_of
from ftopt.sync.group import ReplicaGroup

_LEAVE_S = 30.0


class Trainer:
    """A replica from its model to its end.

    Args:
        recipe: what to train, and how.
        group: who takes part.
        on_event: called with ``evaluate`` and ``end``.
        record: kept up to date for subscribers of ``stepped``.
        evaluates: whether this replica evaluates at the start and in between.
        wait_for_others: called when the job has ended, before leaving: until then this replica serves its state to
            latecomers.
        ranks: this process' place among the ranks of its replica. All make the same calls; rank 0 tells what happens.

    Attributes:
        over: whether it has left the job.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: ReplicaGroup,
        on_event: OnEvent,
        *,
        record: CurrentStep,
        evaluates: bool,
        wait_for_others: Callable[[], object] = lambda: None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._recipe = recipe
        self._group = group
        self._on_event = on_event
        self._record = record
        self._evaluates = evaluates
        self._wait_for_others = wait_for_others
        self.ranks = ranks
        self._stop = self._exhausted = self.started = self.over = False
        torch.manual_seed(recipe.train.seed)
        self._task = task_of(recipe)
        self._loader = self._sampler()
        model = self._task.model
        self._task.called = spread(model, recipe.parallel, ranks)
        self._inner = inner_optimizers(recipe.inner_sections(), model)
        self.optimizer = ftopt.wrap(
            self._inner,
            model,
            recipe.method,
            group=group,
            state_dir=recipe.train.state_dir,
            island=recipe.island,
            leave_on_signals=ranks.size > 1,  # a signal reaches each rank in a step of its own, and they must agree
        )
        self._checkpoints = self._prepare_checkpoints()

    def stop(self) -> None:
        """Leaves in good order at the next step boundary; for a replica of one process. Any thread, signal handlers
        too."""
        self._stop = True
        for source in (self._group.units, self._group.global_batch):
            if source is not None:
                source.close()  # it may wait for more

    def run(self) -> bool:
        """Trains until the job's end, `stop`, or a signal to ranks; True at the job's end."""
        try:
            done = self._train()
        except SystemExit:  # the ranks have agreed to leave, and handed in what was pending
            if not self.started:
                raise
            done = False
            self._tell_end("left")
        self.over = True
        return done

    def _train(self) -> bool:
        train, optimizer = self._recipe.train, self.optimizer
        with optimizer:
            self.started = True
            seed = seed_of(train.seed, self._group.replica, self.ranks.agree(self._group.incarnation))
            if not optimizer.replaying:
                torch.manual_seed(seed if self.ranks.leads else seed_of(seed, self.ranks.rank))
            batches = self._loader or self._task.batches(seed, (self.ranks.rank, self.ranks.size))
            steps = self._micro_batches(batches)
            scheduler = LambdaLR(optimizer, self._rates())
            if self._checkpoints is not None:
                self._checkpoints.include(batches=batches, scheduler=scheduler)
            evaluated_at = optimizer.committed.inner_step
            if self._evaluates and evaluated_at == 0:
                self._evaluate(thorough=True)
            while not self._stop and not self._is_done():
                micro_batches = next(steps, None)
                self._exhausted = micro_batches is None and not self._stop
                if micro_batches is None or not self._step(micro_batches):
                    break
                scheduler.step()
                now = optimizer.committed.inner_step
                if self._evaluates and train.eval_every and now // train.eval_every > evaluated_at // train.eval_every:
                    evaluated_at = now
                    if now < train.inner_steps:
                        self._evaluate()
                if self._checkpoints is not None:
                    self._checkpoints.step()
            done = self._is_done()
            if done:
                optimizer.settle()
                with optimizer.busy("done"):
                    self._evaluate(thorough=True, final=True)
                    self._tell_end("done")
                    self._wait_for_others()
                    optimizer.settle()
                    if self._checkpoints is not None:
                        self._checkpoints.last()
                        self._checkpoints.close()
                    self._tell_end("done")  # again: others may have made newer versions meanwhile
            optimizer.close(flush=not done, timeout_s=_LEAVE_S)
            if self._checkpoints is not None:
                self._checkpoints.close()
            if not done:
                self._tell_end("left")
        return done

    def _is_done(self) -> bool:
        """Whether the committed inner step is there, or every sample of all epochs is in a commit, for which the loop
        waits at the end of the data. All ranks know both in the same step."""
        return self._exhausted or self.optimizer.committed.inner_step >= self._recipe.train.inner_steps

    def _sampler(self) -> ftopt.DataLoader | None:
        """Draws each sample once. Made before the replica joins: its worker processes must not inherit its sockets."""
        data, train = self._recipe.data, self._recipe.train
        if data.sampling != "once":
            return None
        return ftopt.DataLoader(
            self._task.dataset(),
            data.batch_size,
            group=self._group,
            seed=train.seed,
            epochs=data.epochs,
            drop_last=self.ranks.size > 1 if data.drop_last is None else data.drop_last,
            accumulate=train.accumulate,
            num_workers=data.workers,
            global_batch=data.global_batch,
            split=data.split,
        )

    def _micro_batches(self, batches: ftopt.DataLoader | Draws) -> Iterator[Iterable[tuple[Tensor, Tensor]]]:
        """The batches of each inner step in turn; of a global batch, as long as there are any left for this replica."""
        if isinstance(batches, ftopt.DataLoader):
            yield from batches.steps() if self._recipe.data.global_batch is None else batches.global_batches()
            return
        while True:
            yield [batches.batch() for _ in range(self._recipe.train.accumulate)]

    def _prepare_checkpoints(self) -> ftopt.Checkpoints | None:
        """Returns the recipe's checkpoints, if any, and reads what to resume from."""
        settings = self._recipe.checkpoint
        every = settings.every if settings.dir is not None and settings.every > 0 else None
        folder = settings.dir or settings.resume
        if folder is None or (every is None and settings.resume is None):
            return None
        checkpoints = ftopt.Checkpoints(folder, self.optimizer, every=every, keep=settings.keep)
        if settings.resume is not None:
            checkpoints.resume(settings.resume, replicas=self._recipe.replica_ids())
        return checkpoints

    def _rates(self) -> list[Callable[[int], float]]:
        """For each parameter group, what its rate is multiplied with now."""
        optimizer, inner_steps = self.optimizer, self._recipe.train.inner_steps
        return [
            lambda _, schedule=section.schedule: factor(schedule, optimizer.inner_step, inner_steps)  # type: ignore[misc]
            for section, inner in zip(self._recipe.inner_sections(), self._inner, strict=True)
            for _ in inner.param_groups
        ]

    def _step(self, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Takes an inner step; False: it is to `stop`, and the rest of a global batch is left to the others."""
        record = self._record
        record.lr, record.local_step = self.optimizer.param_groups[0]["lr"], self.optimizer.local_steps + 1
        if not isinstance(micro_batches, Sequence):
            return self._step_together(micro_batches)
        self._step_alone(micro_batches)
        return True

    def _step_together(self, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> bool:
        task, optimizer, record = self._task, self.optimizer, self._record
        total, samples = 0.0, 0
        for inputs, targets in micro_batches:
            loss = task.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total, samples = total + float(loss.detach()) * len(inputs), samples + len(inputs)
            record.loss = total / samples
            optimizer.count(tokens=task.tokens(inputs), samples=len(inputs), loss=record.loss)
        if self._stop:
            return False
        optimizer.step()
        return True

    def _step_alone(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        train, task, optimizer, record = self._recipe.train, self._task, self.optimizer, self._record
        total, samples, tokens = 0.0, sum(len(inputs) for inputs, _ in micro_batches), 0
        for inputs, targets in micro_batches:
            loss = task.loss(inputs, targets) * (len(inputs) / samples)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            tokens += task.tokens(inputs)
        if train.clip_norm is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), train.clip_norm)
        record.loss = self.ranks.mean(total)
        optimizer.count(tokens=tokens, samples=samples * self.ranks.size, loss=record.loss)
        optimizer.step()
        optimizer.zero_grad()

    def _evaluate(self, *, thorough: bool = False, final: bool = False) -> None:
        """Scores the committed parameters on fixed held-out data, alike in every replica."""
        optimizer = self.optimizer
        with optimizer.busy("evaluating"), optimizer.outer_parameters():
            score = self._task.score(thorough=thorough)
        accuracy = None if score.accuracy is None else round(score.accuracy, 5)
        data = {"loss": round(score.loss, 5), "accuracy": accuracy, "final": final, "samples": score.samples}
        self._tell("evaluate", data)

    def _tell_end(self, reason: str) -> None:
        if not self.ranks.leads:
            return
        optimizer = self.optimizer
        data = {
            "reason": reason,
            "local_steps": optimizer.local_steps,
            "pending_steps": optimizer.pending_steps,
            "pending_by_fragment": optimizer.pending_by_fragment,
            "counted_step": optimizer.committed.counted_step,
            "anchor_digest": optimizer.anchor_digest(),
        }
        self._tell("end", data)

    def _tell(self, name: str, data: Mapping[str, object]) -> None:
        if not self.ranks.leads:
            return
        replica, life, now = self._group.replica, self._group.incarnation, self.optimizer.committed
        event = Event(name, replica, life, fragment=0, version=now.version, inner_step=now.inner_step, data=data)
        self._on_event(event)


def leaving_on_signals(trainer: Trainer) -> AbstractContextManager[None]:
    """SIGTERM and Ctrl-C make the trainer leave in good order; the second one ends it at once.

    One that has not started yet, because others are missing, has nothing to leave: it ends at once as well. While a
    rank of several trains, its optimizer handles signals, and comes here to end at once.
    """
    asked = False

    def handle() -> None:
        nonlocal asked
        if trainer.over:
            return
        if asked or not trainer.started or trainer.ranks.size > 1:
            raise KeyboardInterrupt
        asked = True
        trainer.stop()

    return on_signals(handle)
