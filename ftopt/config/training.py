"""The sections ``train``, ``checkpoint`` and ``log`` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.config.checks import above_zero, at_least
from ftopt.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How each replica trains, and for how long.

    Args:
        inner_steps: the job ends when the committed inner step reaches this.
        seed: of the model (the same in all replicas), and of data and dropout (with replica and incarnation).
        eval_every: committed inner steps between two evaluations by the first replica; 0: at the start and the end
            only.
        clip_norm: L2 norm that the gradients are clipped to; null for none.
        autocast: ``bf16`` or null.
        accumulate: micro-batches an inner step.
        threads: torch threads a replica.
        state_dir: folder on each replica's local disk for its committed state, memory-mapped; null (default): in RAM.
    """

    inner_steps: int = 600
    seed: int = 0
    eval_every: int = 100
    clip_norm: float | None = 1.0
    autocast: str | None = None
    accumulate: int = 1
    threads: int = 1
    state_dir: str | None = None

    def __post_init__(self) -> None:
        at_least("train", 1, inner_steps=self.inner_steps, accumulate=self.accumulate, threads=self.threads)
        at_least("train", 0, eval_every=self.eval_every, seed=self.seed)
        if self.clip_norm is not None:
            above_zero("train", clip_norm=self.clip_norm)
        if self.autocast not in (None, "bf16"):
            raise UserError(f"train.autocast={self.autocast!r}; allowed: null, bf16")
        if self.state_dir == "":
            raise UserError("train.state_dir is empty; give a folder, or null")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole job; see ``docs/checkpoints.md``.

    Args:
        dir: their folder, shared by all replicas. Default null: ``checkpoint`` in the run's folder with ``ftopt run``,
            and no checkpoints with ``ftopt replica``.
        every: outer steps (of fragment 0) between two checkpoints; 0 for none.
        keep: how many are kept.
        resume: a checkpoint to resume from, or a folder of several: its newest complete one.
    """

    dir: str | None = None
    every: int = 5
    keep: int = 2
    resume: str | None = None

    def __post_init__(self) -> None:
        for name in ("dir", "resume"):
            if getattr(self, name) == "":
                raise UserError(f"checkpoint.{name} is empty; give a folder, or null")
        at_least("checkpoint", 0, every=self.every)
        at_least("checkpoint", 1, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where runs are stored, and whether they go to wandb: ``auto`` is online with a key, else offline."""

    dir: str = "runs"
    wandb: str = "auto"

    def __post_init__(self) -> None:
        if self.wandb not in ("auto", "off", "online", "offline"):
            raise UserError(f"log.wandb={self.wandb!r}; allowed: auto, off, online, offline")
