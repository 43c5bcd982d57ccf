"""The recipe: every section a frozen dataclass, the same words as in YAML.

A section that has a ``name`` is a choice: the name picks the dataclass whose fields are its settings (`CHOICES`), so a
setting that the choice does not have is refused as an unknown key and is never ignored. Each dataclass checks its own
values; `Recipe` checks what concerns several sections. Torch is not needed here, the methods are looked up in
`ftopt.config.choices`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ftopt.config.checks import above_zero, at_least
from ftopt.config.data import Data, Digits, StdlibBytes, Text
from ftopt.errors import UserError
from ftopt.faults.spec import Fault
from ftopt.sync.protocol.settings import Sync


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """The GPT of `ftopt.job.model` (``model.name: gpt``).

    Args:
        layers, heads, width, dropout: as usual.
        context: tokens a window.
        vocab: tokens that there are; 256 for bytes.
    """

    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    dropout: float = 0.0
    vocab: int = 256

    def __post_init__(self) -> None:
        at_least("model", 1, layers=self.layers, heads=self.heads, width=self.width, context=self.context)
        at_least("model", 2, vocab=self.vocab)
        if self.width % (2 * self.heads):
            raise UserError(
                f"model.width={self.width} with heads={self.heads}; the width must be a multiple of 2 * heads; "
                f"use width={max(1, round(self.width / (2 * self.heads))) * 2 * self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout:g}; must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class ConvnetConfig:
    """The convolutional net of `ftopt.job.convnet` (``model.name: convnet``), for images.

    Args:
        channels: of the first convolution; the second one has twice as many.
        batch_norm: BatchNorm behind each convolution.
    """

    channels: int = 16
    batch_norm: bool = False

    def __post_init__(self) -> None:
        at_least("model", 1, channels=self.channels)


@dataclass(frozen=True, kw_only=True)
class FactoryConfig:
    """A model of the user's own (``model.name: factory``).

    Args:
        factory: ``package.module:function``, called with ``args``; returns a module that maps bytes or tokens (batch,
            time), int64, to logits (batch, time, vocabulary), or images (batch, 1, 8, 8), fp32, to logits (batch, 10).
        args: its keyword arguments.
        context: bytes or tokens a window; without effect on images.
    """

    factory: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    context: int = 64

    def __post_init__(self) -> None:
        module, _, function = self.factory.partition(":")
        if not (module and function):
            raise UserError(
                f"model.factory={self.factory!r}; must be package.module:function, a function that returns the model"
            )
        at_least("model", 1, context=self.context)


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Linear warm-up over ``warmup`` inner steps, then a cosine down to ``floor`` times the rate."""

    warmup: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        at_least("inner.schedule", 0, warmup=self.warmup, floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """Linear warm-up over ``warmup`` inner steps, then the rate itself."""

    warmup: int = 0

    def __post_init__(self) -> None:
        at_least("inner.schedule", 0, warmup=self.warmup)


ScheduleConfig = CosineConfig | ConstantConfig


@dataclass(frozen=True, kw_only=True)
class InnerOptimizerConfig:
    """What every inner optimizer has.

    Args:
        lr: its rate, > 0.
        params: which parameters, of those that the sections before have left: ``rest`` (default, all of them),
            ``matrices`` (of two dimensions, and no embedding), or a module's name or a shell pattern of parameters'
            names, e.g. ``head`` or ``blocks.*.weight``.
        decay: what the weight decay applies to: ``all`` (default), or ``weights``, which leaves out norms and biases
            (parameters of one dimension).
        schedule: of the rate.
    """

    lr: float = 1e-3
    params: str = "rest"
    decay: str = "all"
    schedule: ScheduleConfig = field(default_factory=ConstantConfig)

    def __post_init__(self) -> None:
        above_zero("inner", lr=self.lr)
        if not self.params:
            raise UserError("inner.params is empty; use rest, matrices, or a name pattern such as blocks.*.weight")
        if self.decay not in ("all", "weights"):
            raise UserError(f"inner.decay={self.decay!r}; allowed: all, weights (not norms and biases)")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(InnerOptimizerConfig):
    """``torch.optim.AdamW`` (``inner.name: adamw``)."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("inner", 0, eps=self.eps, weight_decay=self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"inner.betas={list(self.betas)}; must be two numbers, each at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class AdamConfig(AdamWConfig):
    """``torch.optim.Adam`` (``inner.name: adam``): as AdamW, with the weight decay in the gradient."""


@dataclass(frozen=True, kw_only=True)
class SgdConfig(InnerOptimizerConfig):
    """``torch.optim.SGD`` (``inner.name: sgd``)."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("inner", 0, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and not self.momentum:
            raise UserError("inner.nesterov=true with momentum=0; Nesterov needs a momentum; set inner.momentum=0.9")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(InnerOptimizerConfig):
    """``torch.optim.Muon`` (``inner.name: muon``, torch 2.9 or newer), for matrices only; another section for the rest.

    Args:
        momentum, nesterov, ns_steps: torch's, with torch's defaults.
        adjust_lr: how the rate goes with a matrix' shape: ``original`` (default) or ``match_rms_adamw``, which makes
            updates as large as AdamW's, so that its rates can be used.
        others: see `InnerOptimizerConfig`; ``params`` is ``matrices`` here. Embeddings and the head are usually
        AdamW's: give
            a section ``params: head`` before this one.
    """

    params: str = "matrices"
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr: str = "original"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("inner", 0, momentum=self.momentum, weight_decay=self.weight_decay)
        at_least("inner", 1, ns_steps=self.ns_steps)
        if self.adjust_lr not in ("original", "match_rms_adamw"):
            raise UserError(f"inner.adjust_lr={self.adjust_lr!r}; allowed: original, match_rms_adamw")


@dataclass(frozen=True, kw_only=True)
class TorchConfig(InnerOptimizerConfig):
    """Any other optimizer (``inner.name: torch``), e.g. ``torchao.optim.AdamW8bit``.

    Args:
        cls: where the class is, ``package.module.Class``.
        args: its keyword arguments besides ``lr``.
        others: see `InnerOptimizerConfig`.
    """

    cls: str = "torch.optim.RMSprop"
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.cls.rpartition(".")):
            raise UserError(f"inner.cls={self.cls!r}; must be package.module.Class, e.g. torch.optim.RMSprop")
        if "lr" in self.args:
            raise UserError(f"inner.args has lr={self.args['lr']!r}; give it as inner.lr, which the schedule moves")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how each replica trains.

    Args:
        inner_steps: the job ends when the committed inner step reaches this.
        seed: of the model (alike in all replicas), of data and dropout (with replica and incarnation).
        eval_every: committed inner steps between two evaluations by the first replica; 0 for the first and last only.
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
        dir: their folder, which all replicas see. Default null: ``checkpoint`` in the run's folder with ``ftopt run``,
            and no checkpoints with ``ftopt replica``.
        every: outer steps (of fragment 0) from one to the next; 0 for none.
        keep: so many are kept.
        resume: a checkpoint to go on from, or a folder of several: its newest whole one.
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
    """Where the runs go, and whether wandb follows: ``auto`` is online with a key, else offline."""

    dir: str = "runs"
    wandb: str = "auto"

    def __post_init__(self) -> None:
        if self.wandb not in ("auto", "off", "online", "offline"):
            raise UserError(f"log.wandb={self.wandb!r}; allowed: auto, off, online, offline")


ModelConfig = GptConfig | ConvnetConfig | FactoryConfig
InnerConfig = AdamWConfig | SgdConfig | MuonConfig | TorchConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole job. ``method`` is one of the methods' own dataclasses (`ftopt.DiLoCo`, `ftopt.LocalSGD`).

    ``inner`` is an optimizer, or a list of optimizers that share out the parameters.
    """

    name: str
    method: Any
    replicas: int = 1
    model: ModelConfig = field(default_factory=GptConfig)
    data: Data = field(default_factory=StdlibBytes)
    inner: InnerConfig | list[InnerConfig] = field(default_factory=AdamWConfig)
    sync: Sync = field(default_factory=Sync)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    faults: list[Fault] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What is wrong between sections; every message at once."""
        found = []
        if not self.name or not all(part.isalnum() for part in self.name.replace("-", "_").split("_") if part):
            found.append(f"name={self.name!r}; letters, digits, - and _ only, it names a folder")
        if self.replicas < 1:
            found.append(f"replicas={self.replicas}; must be at least 1")
        images = isinstance(self.data, Digits)
        if isinstance(self.model, GptConfig) and images:
            found.append("model.name=gpt with data.name=digits; gpt reads bytes; use model.name=convnet, or a factory")
        if isinstance(self.model, GptConfig) and isinstance(self.data, StdlibBytes | Text) and self.model.vocab < 256:
            found.append(f"model.vocab={self.model.vocab} with text, whose tokens are bytes; use model.vocab=256")
        if isinstance(self.model, ConvnetConfig) and not images:
            found.append("model.name=convnet reads images; use data.name=digits, or model.name=gpt for bytes")
        from ftopt.codecs import (  # here: it brings torch, which `ftopt ls` does without
            check_moments_exact,
            codec_named,
        )

        try:
            codec = codec_named(self.sync.codec_name)
            if self.method.inner_state == "average":
                check_moments_exact(codec)
        except UserError as error:
            found.append(str(error))
        if self.sync.recover == "replay":
            if self.data.sampling != "once":
                found.append(
                    f"sync.recover=replay with data.sampling={self.data.sampling}; steps can be done again where the "
                    "job hands out the samples: use data.sampling=once"
                )
            if self.method.gradients is not None:
                found.append(
                    f"sync.recover=replay with method.name={self.method.name}, whose replicas exchange gradients in "
                    "each step; use sync.recover=drop"
                )
        for key in ("min_replicas", "start_replicas"):
            value = getattr(self.sync, key)
            if value is not None and value > self.replicas >= 1:
                found.append(
                    f"sync.{key}={value} with replicas={self.replicas}; the job would wait for ever; "
                    f"use at most {self.replicas}, or more replicas"
                )
        if not self.inner_sections():
            found.append("inner=[]; must have at least one optimizer, e.g. {name: adamw, lr: 1.0e-3}")
        for index, section in enumerate(self.inner_sections()):
            warmup = section.schedule.warmup
            if warmup > self.train.inner_steps:
                place = f"inner[{index}]" if isinstance(self.inner, list) else "inner"
                found.append(
                    f"{place}.schedule.warmup={warmup} with train.inner_steps={self.train.inner_steps}; "
                    f"the warm-up must end within the run; use at most {self.train.inner_steps}"
                )
        ids = self.replica_ids()
        for index, fault in enumerate(self.faults):
            if fault.target(ids) is None:
                found.append(
                    f"faults[{index}].replica={fault.replica!r}; allowed: 0 to {self.replicas - 1}, "
                    f"{ids[0]} to {ids[-1]}, or coordinator"
                    if ids
                    else f"faults[{index}].replica={fault.replica!r}; there are no replicas"
                )
            if fault.aim == "outer" and not self._has_outer_state():
                found.append(
                    f"faults[{index}].what=outer with method.name={self.method.name}, which keeps no outer state; "
                    "use what=anchor"
                )
        return found

    def _has_outer_state(self) -> bool:
        import torch  # here: `ftopt ls` does without

        return self.method.gradients is not None or bool(self.method.init(torch.zeros(1)))

    def inner_sections(self) -> list[InnerConfig]:
        """The inner optimizers, also when it is a single one."""
        return self.inner if isinstance(self.inner, list) else [self.inner]

    def replica_ids(self) -> list[str]:
        """The ids that ``ftopt run`` gives its replicas; their order as strings is their order as numbers."""
        digits = len(str(max(self.replicas - 1, 0)))
        return [f"r{index:0{digits}d}" for index in range(self.replicas)]
