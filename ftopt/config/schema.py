"""The recipe: every section is a frozen dataclass whose fields are the keys in YAML.

A section with a ``name`` is a choice: the name picks the dataclass whose fields are the section's settings (`CHOICES`),
so a setting that the choice does not have is refused as an unknown key and never ignored. Each dataclass checks its own
values; `Recipe` checks the relations between sections. This module does not need torch; `ftopt.config.choices` looks
the methods up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ftopt.config.checks import above_zero, at_home, at_least
from ftopt.config.data_settings import Data, Digits, OwnData, StdlibBytes, Text
from ftopt.config.inner_settings import AdamWConfig, InnerConfig
from ftopt.config.model_settings import ConvnetConfig, GptConfig, ModelConfig
from ftopt.config.task_settings import CrossEntropyConfig, TaskConfig
from ftopt.errors import UserError, check_choice
from ftopt.run.fault_spec import FLIPPED, OF_EACH_RANK, Fault
from ftopt.sync.protocol.limits import MAX_INT, MAX_NAME, MAX_REPLICAS
from ftopt.sync.protocol.policy import FaultPolicy

PARALLEL = ("fsdp", "ddp")
MAX_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How each replica trains, and for how long.

    Args:
        inner_steps: the job ends when the committed inner step reaches this.
        seed: of the model (the same in all replicas), and of data and dropout (with replica and incarnation).
        eval_every: committed inner steps between two evaluations, which the first replica present makes; 0: only at the
            start and the end.
        clip_norm: L2 norm that the gradients are clipped to; null for none.
        autocast: ``bf16`` or null.
        device: ``auto`` (default): CUDA if there is a GPU, else the CPU; ``cpu``; ``cuda``: if there are several GPUs,
            replica i takes number i modulo their number, as with ``auto``; ``cuda:N``: this one.
        compile: whether the model is compiled with ``torch.compile``. Default false.
        accumulate: micro-batches per inner step.
        threads: torch threads per replica.
        give_up_after: consecutive rounds whose steps are not finite (NaN, Inf) in any replica, after which a replica
            gives up, and the run fails; null: never.
        state_dir: folder on each replica's local disk for its committed state, memory-mapped; null (default): in RAM.
    """

    inner_steps: int = 600
    seed: int = 0
    eval_every: int = 100
    clip_norm: float | None = 1.0
    autocast: str | None = None
    device: str = "auto"
    compile: bool = False
    accumulate: int = 1
    threads: int = 1
    give_up_after: int | None = 20
    state_dir: str | None = None

    def __post_init__(self) -> None:
        at_least("train", 1, inner_steps=self.inner_steps, accumulate=self.accumulate, threads=self.threads)
        at_least("train", 0, eval_every=self.eval_every, seed=self.seed)
        if self.give_up_after is not None:
            at_least("train", 1, give_up_after=self.give_up_after)
        if self.seed > MAX_INT:
            raise UserError(f"train.seed={self.seed}; must be at most {MAX_INT}")
        if self.clip_norm is not None:
            above_zero("train", clip_norm=self.clip_norm)
        check_choice("train.autocast", self.autocast, (None, "bf16"))
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", self.device):
            raise UserError(f"train.device={self.device!r}; allowed: auto, cpu, cuda, and cuda:0, cuda:1, ...")
        if self.state_dir == "":
            raise UserError("train.state_dir is empty; give a folder, or null")
        at_home(self, "state_dir")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole job; see ``docs/checkpoints.md``.

    Args:
        dir: their folder, shared by all replicas. Default null: ``checkpoint`` in the run's folder with ``ftopt run``;
            with ``ftopt replica``, only the last version, in the replica's folder.
        every: outer steps (of fragment 0) between two checkpoints; 0 for none.
        keep: number to keep.
        resume: a checkpoint to resume from, a folder of several (its newest complete one), or a run's folder.
    """

    dir: str | None = None
    every: int = 5
    keep: int = 2
    resume: str | None = None

    def __post_init__(self) -> None:
        for name in ("dir", "resume"):
            if getattr(self, name) == "":
                raise UserError(f"checkpoint.{name} is empty; give a folder, or null")
        at_home(self, "dir", "resume")
        at_least("checkpoint", 0, every=self.every)
        at_least("checkpoint", 1, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The folder of runs, and whether they go to wandb: ``auto`` is online with a key, else off."""

    dir: str = "runs"
    wandb: str = "auto"

    def __post_init__(self) -> None:
        at_home(self, "dir")
        check_choice("log.wandb", self.wandb, ("auto", "off", "online", "offline"))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a whole job.

    Args:
        name: letters, digits, - and _; used for the folder of a run.
        method: one of the methods' own dataclasses, or one of the user's.
        replicas: how many ``ftopt run`` starts, and with how many a job starts (`job_policy`).
        ranks: processes of each replica, with one model between them (an island); 1 (default): one process.
        parallel: how an island's ranks share the model: ``fsdp`` (FSDP2, default) or ``ddp``; no effect on one rank.
        restarts: how often ``ftopt run`` restarts each replica that dies after it has joined; not for deaths by
            ``faults``, which have their own setting for it. Default 0.
        inner: an optimizer, or a list of optimizers that share out the parameters.
        model, data, task, policy, train, checkpoint, log: a section of its own; see its dataclass.
        faults: injected faults and their times; see ``docs/recipes.md``.
    """

    name: str
    method: Any
    replicas: int = 1
    ranks: int = 1
    parallel: str = "fsdp"
    restarts: int = 0
    model: ModelConfig = field(default_factory=GptConfig)
    data: Data = field(default_factory=StdlibBytes)
    task: TaskConfig = field(default_factory=CrossEntropyConfig)
    inner: InnerConfig | list[InnerConfig] = field(default_factory=AdamWConfig)
    policy: FaultPolicy = field(default_factory=FaultPolicy)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    faults: list[Fault] = field(default_factory=list)

    @property
    def job_policy(self) -> FaultPolicy:
        """``policy`` as the replicas of a job use it: the job starts with all ``replicas`` unless ``start_replicas``
        says otherwise."""
        return replace(self.policy, start_replicas=self.policy.start_replicas or self.replicas)

    def problems(self) -> list[str]:
        """The errors between sections, all at once."""
        return [
            *self._of_job(),
            *self._of_ranks(),
            *self._of_model(),
            *self._of_policy(),
            *self._of_global_batch(),
            *self._of_inner(),
            *self._of_faults(),
        ]

    def _of_job(self) -> Iterator[str]:
        if not self.name or not all(part.isalnum() for part in self.name.replace("-", "_").split("_") if part):
            yield f"name={self.name!r}; must be letters, digits, - and _, since it names a folder"
        if len(self.name) > MAX_NAME:
            yield f"name has {len(self.name)} characters; at most {MAX_NAME} are allowed, since it names a folder"
        if not 1 <= self.replicas <= MAX_REPLICAS:
            yield f"replicas={self.replicas}; must be from 1 to {MAX_REPLICAS}"

    def _of_ranks(self) -> Iterator[str]:
        ranks = self.ranks
        if not 1 <= ranks <= MAX_RANKS:
            yield f"ranks={ranks}; must be from 1 to {MAX_RANKS}, the processes of each replica"
        if self.parallel not in PARALLEL:
            yield f"parallel={self.parallel!r}; allowed: {', '.join(PARALLEL)}"
        if self.restarts < 0:
            yield f"restarts={self.restarts}; must be at least 0"
        if not 1 < ranks <= MAX_RANKS:
            return
        if self.train.device.startswith("cuda") or self.train.compile:
            what = "train.compile=true" if self.train.compile else f"train.device={self.train.device}"
            yield (
                f"{what} with ranks={ranks}; recipes train islands on the CPU, uncompiled: use a script "
                "(docs/islands.md), or ranks=1"
            )
        if self.data.batch_size % ranks:
            yield (
                f"data.batch_size={self.data.batch_size} with ranks={ranks}; it is the whole replica's, and its ranks "
                f"take equal shares: use a multiple of {ranks}, such as {max(1, self.data.batch_size // ranks) * ranks}"
            )
        if self.data.global_batch is not None:
            yield (
                f"data.global_batch={self.data.global_batch} with ranks={ranks}; a global batch is for replicas of one "
                "process: use data.global_batch=null, or ranks=1"
            )
        if self.policy.recover == "replay":
            yield (
                f"policy.recover=replay with ranks={ranks}; replay is for replicas of one process: use "
                "policy.recover=drop, or ranks=1"
            )
        for index, fault in enumerate(self.faults):
            if fault.aim in OF_EACH_RANK:
                yield (
                    f"faults[{index}].what={fault.aim} with ranks={ranks}; each rank has a part of it: use ranks=1, or "
                    f"one of {', '.join(kind for kind in FLIPPED if kind not in OF_EACH_RANK)}"
                )

    def _of_model(self) -> Iterator[str]:
        if isinstance(self.data, OwnData):
            return  # `ftopt validate` tries whether they suit each other
        images = isinstance(self.data, Digits)
        if isinstance(self.model, GptConfig) and images:
            yield "model.name=gpt with data.name=digits; gpt reads bytes; use model.name=convnet, or a factory"
        if isinstance(self.model, GptConfig) and isinstance(self.data, StdlibBytes | Text) and self.model.vocab < 256:
            yield f"model.vocab={self.model.vocab} with text, whose tokens are bytes; use model.vocab=256"
        if isinstance(self.model, ConvnetConfig) and not images:
            yield "model.name=convnet reads images; use data.name=digits, or model.name=gpt for bytes"

    def _of_policy(self) -> Iterator[str]:
        if self.policy.recover == "replay" and self.data.sampling != "once":
            yield (
                f"policy.recover=replay with data.sampling={self.data.sampling}; steps can be repeated only if the job "
                "hands out the samples: use data.sampling=once"
            )
        if self.policy.recover == "replay" and self.method.gradients is not None:
            yield (
                f"policy.recover=replay with method.name={self.method.name}, whose replicas exchange gradients in each "
                "step; use policy.recover=drop"
            )
        for key in ("min_replicas", "start_replicas"):
            value = getattr(self.policy, key)
            if value is not None and value > self.replicas >= 1:
                yield (
                    f"policy.{key}={value} with replicas={self.replicas}; the job would wait forever; "
                    f"use at most {self.replicas}, or more replicas"
                )

    def _of_global_batch(self) -> Iterator[str]:
        if (whole := self.data.global_batch) is None:
            return
        gradients = self.method.gradients
        if gradients is None or gradients.sync_every != 1:
            yield (
                f"data.global_batch={whole} with method.name={self.method.name}, sync_every={self.method.sync_every}; "
                "it is for methods that average gradients before each step: use method.name=sync_sgd with "
                "sync_every=1, or paft"
            )
        if self.train.accumulate != 1:
            yield (
                f"train.accumulate={self.train.accumulate} with data.global_batch={whole}, which says how many samples "
                "a step has; use train.accumulate=1"
            )
        if self.train.clip_norm is not None:
            yield (
                f"train.clip_norm={self.train.clip_norm:g} with data.global_batch={whole}, whose gradient is "
                "complete only when all replicas have contributed; use method.clip_norm, and train.clip_norm=null"
            )

    def _of_inner(self) -> Iterator[str]:
        if not self.inner_sections():
            yield "inner=[]; must have at least one optimizer, e.g. {name: adamw, lr: 1.0e-3}"

    def _of_faults(self) -> Iterator[str]:
        ids = self.replica_ids()
        allowed = f"allowed: 0 to {self.replicas - 1}, {ids[0]} to {ids[-1]}, or coordinator" if ids else "no replicas"
        for index, fault in enumerate(self.faults):
            if fault.target(ids) is None:
                yield f"faults[{index}].replica={fault.replica!r}; {allowed}"
            if fault.aim == "outer" and not self._has_outer_state():
                yield (
                    f"faults[{index}].what=outer with method.name={self.method.name}, which keeps no outer state; "
                    "use what=anchor"
                )

    def _has_outer_state(self) -> bool:
        import torch  # here: `ftopt ls` must not import it

        return self.method.gradients is not None or bool(self.method.init(torch.zeros(1)))

    def with_shorter_warmup(self) -> tuple[Recipe, list[str]]:
        """The recipe with warm-ups of the inner learning rate that end within the run, and what was changed."""
        given = self.inner if isinstance(self.inner, list) else [self.inner]
        steps, sections, told = self.train.inner_steps, list(given), []
        for index, section in enumerate(sections):
            if (warmup := section.schedule.warmup) > steps:
                sections[index] = replace(section, schedule=replace(section.schedule, warmup=steps))
                place = f"inner[{index}]" if isinstance(self.inner, list) else "inner"
                told.append(f"{place}.schedule.warmup={warmup} is shortened to the run's train.inner_steps={steps}")
        return (replace(self, inner=sections if isinstance(self.inner, list) else sections[0]) if told else self), told

    def inner_sections(self) -> list[InnerConfig]:
        """One section for each inner optimizer."""
        given = self.inner if isinstance(self.inner, list) else [self.inner]
        return [part for section in given for part in section.parts()]

    def replica_ids(self) -> list[str]:
        """The ids that ``ftopt run`` gives its replicas: r0, r1 and so on."""
        return [f"r{index}" for index in range(min(self.replicas, MAX_REPLICAS))]
