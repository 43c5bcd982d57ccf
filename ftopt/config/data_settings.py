"""The section ``data`` of a recipe: a dataclass per kind of data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ftopt.config.checks import at_least
from ftopt.config.own_code import check_form
from ftopt.errors import UserError, check_choice


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The settings of every kind of data: how samples (windows, images) are drawn.

    Args:
        batch_size: samples per micro-batch.
        sampling: ``once`` (default): the job hands out each sample once per epoch, however replicas join and leave
            (with several fragments this holds for the first one; see ``docs/data.md``). ``random``: each replica draws
            its own windows anywhere, with replacement.
        epochs: the job ends after this many epochs, or at ``train.inner_steps`` if that comes first. Default null:
            no end.
        drop_last: whether to leave out the samples of an epoch that do not fill a batch. Default null: yes with several
            ranks, which must have equal shares of each batch; else no.
        global_batch: samples of one step of all replicas together; if a replica dies, the others compute the rest of
            its share. Default null: each replica takes ``train.accumulate`` batches of its own per step.
        split: samples of a global batch that stay together when it is shared out. Default null: ``batch_size``.
        workers: processes per replica that load ahead; 0: batches are loaded between two steps.
    """

    batch_size: int = 16
    sampling: str = "once"
    epochs: int | None = None
    drop_last: bool | None = None
    workers: int = 0
    global_batch: int | None = None
    split: int | None = None

    def __post_init__(self) -> None:
        at_least("data", 1, batch_size=self.batch_size)
        at_least("data", 0, workers=self.workers)
        if self.epochs is not None:
            at_least("data", 1, epochs=self.epochs)
        check_choice("data.sampling", self.sampling, ("once", "random"))
        self._check_global_batch()
        drawn_once = ("epochs", "drop_last", "workers", "global_batch")
        for name, value in ((name, getattr(self, name)) for name in drawn_once):
            if self.sampling == "random" and value:
                raise UserError(f"data.{name}={value} has no effect with data.sampling=random; use sampling=once")

    def _check_global_batch(self) -> None:
        whole, split = self.global_batch, self.split
        if split is not None and (whole is None or split < 1 or self.batch_size % split):
            raise UserError(
                f"data.split={split} with data.batch_size={self.batch_size}, data.global_batch={whole}; it divides the "
                "micro-batches of a global batch: use one, and a split that divides batch_size, or null"
            )
        unit = split or self.batch_size
        if whole is not None and (whole < 1 or whole % unit):
            raise UserError(
                f"data.global_batch={whole}; must be a multiple of {unit}, which is data."
                f"{'batch_size' if split is None else 'split'}, such as {max(1, round(whole / unit)) * unit}"
            )


@dataclass(frozen=True, kw_only=True)
class StdlibBytes(Drawn):
    """The source of Python's own library (``data.name: stdlib_bytes``)."""


@dataclass(frozen=True, kw_only=True)
class Text(Drawn):
    """The user's own text files (``data.name: text``); ``path`` is a file, a folder, or a glob pattern."""

    path: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("data.path is empty; data.name=text needs it: a text file, a folder, or a glob pattern")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TokensConfig(Drawn):
    """Files of tokens as tokenizers write them (``data.name: tokens``), memory-mapped.

    Args:
        path: training data: a file, a folder, or a glob pattern.
        held_out: evaluation data. Default null: the last 5 % of the windows.
        dtype: ``uint16`` or ``uint32`` (``uint8``: bytes).
        skip_bytes: size of each file's header.
    """

    path: str = ""
    held_out: str | None = None
    dtype: str = "uint16"
    skip_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("data.path is empty; data.name=tokens needs it: a file of tokens, a folder, or a pattern")
        check_choice("data.dtype", self.dtype, ("uint8", "uint16", "uint32"))
        at_least("data", 0, skip_bytes=self.skip_bytes)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Digits(Drawn):
    """Images of handwritten digits (``data.name: digits``), from scikit-learn."""

    batch_size: int = 32


@dataclass(frozen=True, kw_only=True)
class OwnData(Drawn):
    """Data of the user's own (``data.name: factory``).

    Args:
        factory: ``package.module:function`` or ``FILE.py:function``, called with ``args``; returns two map-style data
            sets (``len(dataset)``, ``dataset[index]``): one to train on, one to evaluate on. A sample is any nested
            structure of tensors, numbers and strings; without a ``task.factory``, a pair of inputs and targets.
            A data set with a method ``collate_fn(samples)`` makes its batches itself.
        args: its keyword arguments.
    """

    factory: str = ""
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_form("data.factory", self.factory)
        super().__post_init__()


Data = StdlibBytes | Text | TokensConfig | Digits | OwnData
