"""Errors of a recipe beyond its values that can be found without torch; for a plain recipe, all of them.

A recipe is plain if its model, data, task and inner optimizers are built in, and it asks for neither a GPU nor the
compiler. Others are checked by `ftopt.run.check`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ftopt.checkpoint.reader import Checkpoint, find
from ftopt.config.data_settings import Digits, StdlibBytes, Text, TokensConfig
from ftopt.config.inner_settings import AdamWConfig, MuonConfig, SgdConfig
from ftopt.config.model_settings import GptConfig
from ftopt.config.opened import open_corpus, open_tokens
from ftopt.config.optimizers import check_muon, shared_out
from ftopt.config.schema import Recipe
from ftopt.config.task_settings import CrossEntropyConfig
from ftopt.data import digits
from ftopt.data.windows import Windows
from ftopt.errors import UserError, lacking
from ftopt.methods.fragments import Parameter
from ftopt.sync.protocol.samples import Samples

T = TypeVar("T")
OPENED = ("data.path", "data.held_out", "data.dtype", "data.skip_bytes", "model.context", "model.vocab")
"""The settings that decide whether built-in data can be opened."""
SAMPLED = ("data", "train.seed", "train.accumulate")
"""The settings that decide whether batches can be made from these data."""
_TOKENS_READ = 2_000_000
"""Tokens that are compared with the vocabulary, in windows at equal distances."""


class Attempts:
    """Tries one check after another, and keeps the messages. ``wrong``: paths of settings or sections that are not the
    user's: checks that need one are not tried. ``warnings``: about what is allowed, but perhaps not meant."""

    def __init__(self, wrong: Collection[str]) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self._wrong = wrong

    def __call__(self, make: Callable[[], T], *needs: str) -> T | None:
        """The result of ``make``; None: it was not tried, or has found an error."""
        if any(_within(path, need) or _within(need, path) for path in self._wrong for need in needs):
            return None
        try:
            return make()
        except UserError as error:
            self.errors.append(str(error))
            return None


def _within(path: str, section: str) -> bool:
    return path == section or path.startswith((f"{section}.", f"{section}["))


def is_plain(recipe: Recipe) -> bool:
    """Whether `check_plain` finds all errors of the recipe."""
    sections = recipe.inner_sections()
    muon = all(section.params == "matrices" for section in sections if isinstance(section, MuonConfig))
    inner = muon and all(isinstance(section, AdamWConfig | SgdConfig | MuonConfig) for section in sections)
    return (
        inner  # these refuse no values or parameters that their sections accept
        and isinstance(recipe.model, GptConfig)
        and isinstance(recipe.data, StdlibBytes | Text | TokensConfig)
        and isinstance(recipe.task, CrossEntropyConfig)
        and not recipe.train.compile
        and not recipe.train.device.startswith("cuda")
    )


def check_plain(recipe: Recipe, attempt: Attempts) -> None:
    """Checks a plain recipe on this machine."""
    model = recipe.model
    assert isinstance(model, GptConfig)
    check_installed(recipe, attempt)
    check_places(recipe, attempt)
    parameters = gpt_parameters(model)
    if not any(problem.startswith("model.") for problem in recipe.problems()):
        windows = attempt(lambda: _open(recipe, model), *OPENED)
        if windows is not None:
            attempt(lambda: _check_samples(recipe, windows, attempt), *SAMPLED)
    attempt(lambda: shared_out(recipe.inner_sections(), parameters), "inner", "model")
    attempt(lambda: recipe.method.partition(parameters), "method", "model")


def gpt_parameters(settings: GptConfig) -> list[Parameter]:
    """The parameters of `ftopt.config.models.Transformer`, in its order."""
    width = settings.width
    embedding = Parameter("embed.weight", (settings.vocab, width), True)
    block = {
        "norm_attention": (width,),
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "norm_mlp": (width,),
        "mlp.0": (4 * width, width),
        "mlp.2": (width, 4 * width),
    }
    blocks = [
        Parameter(f"blocks.{index}.{name}.weight", shape, False)
        for index in range(settings.layers)
        for name, shape in block.items()
    ]
    head = [] if settings.tied else [Parameter("head.weight", (settings.vocab, width), False)]
    return [embedding, *blocks, Parameter("norm.weight", (width,), False), *head]


def _open(recipe: Recipe, model: GptConfig) -> tuple[Windows, int]:
    """The windows, and the number of those to train on."""
    if isinstance(recipe.data, TokensConfig):
        everything, _, train = open_tokens(recipe.data, model.context, vocab=model.vocab, make=Windows)
        return everything, train
    assert isinstance(recipe.data, StdlibBytes | Text)
    windows = Windows(open_corpus(recipe.data, model.context).train, model.context)
    return windows, len(windows)


def _check_samples(recipe: Recipe, opened: tuple[Windows, int], attempt: Attempts) -> None:
    """Checks the samples as `ftopt.DataLoader` does."""
    data, (windows, count) = recipe.data, opened
    attempt.warnings += too_few(recipe, count)
    if isinstance(data, TokensConfig):
        read_some(count, windows.length, lambda index: windows.rows([index]))


def too_few(recipe: Recipe, count: int) -> list[str]:
    """A warning if ``count`` samples end before ``train.inner_steps``. UserError: no batches can be made from them."""
    data, steps = recipe.data, recipe.train.inner_steps
    if data.sampling != "once":
        return []
    samples = Samples(
        samples=count,
        batch_size=data.split or data.batch_size,
        seed=recipe.train.seed,
        epochs=data.epochs,
        drop_last=recipe.ranks > 1 if data.drop_last is None else data.drop_last,
        global_batch=data.global_batch,
    )
    per_step = recipe.train.accumulate * recipe.replicas  # units
    if data.global_batch is not None:
        per_step = data.global_batch // samples.batch_size
    if samples.units is None or (enough := math.ceil(samples.units / per_step)) >= steps:
        return []
    needed = math.ceil(steps * per_step / samples.units_per_epoch)
    return [
        f"warning: data.epochs={data.epochs} of {count:,} samples are enough for about {enough:,} of "
        f"train.inner_steps={steps:,} with replicas={recipe.replicas}, and the job ends there; use "
        f"data.epochs={needed} or null, or train.inner_steps={enough} (schedules of the learning rate go by it); the "
        "epochs of a job that has begun cannot be changed"
    ]


def uses_all_data(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint's model contains the units of all epochs."""
    plain, samples = next(iter(checkpoint.notes.values()))["membership"].get("samples"), None
    with suppress(TypeError, ValueError):  # replicas report a damaged one
        samples = Samples(**plain) if plain is not None else None
    done = checkpoint.record.get("done")  # ranges of units: a single one when all are done
    return samples is not None and samples.units is not None and done == [[0, samples.units]]


def read_some(windows: int, length: int, read: Callable[[int], object]) -> None:
    """Reads windows of ``length`` tokens at equal distances: UserError if a token is not in the vocabulary."""
    count = min(windows, max(1, _TOKENS_READ // length))
    for number in range(count):
        read(number * windows // count)


def check_installed(recipe: Recipe, attempt: Attempts) -> None:
    """Checks that the source of the built-in data is installed, and Muon and wandb if the recipe asks for them."""
    if any(isinstance(section, MuonConfig) for section in recipe.inner_sections()):
        attempt(lambda: check_muon("inner"), "inner")
    if isinstance(recipe.data, Digits):
        attempt(digits.check_installed, "data.name")
    attempt(lambda: _check_wandb(recipe.log.wandb), "log.wandb")


def _check_wandb(mode: str) -> None:
    if mode in ("online", "offline") and find_spec("wandb") is None:
        raise UserError(lacking("wandb", f"log.wandb={mode}", "wandb"))


def check_places(recipe: Recipe, attempt: Attempts) -> None:
    """Checks that folders can be written to, and that the checkpoint to resume from exists."""
    checkpoint = recipe.checkpoint
    attempt(lambda: _check_writable("log.dir", recipe.log.dir), "log.dir")
    attempt(lambda: _check_writable("checkpoint.dir", checkpoint.dir), "checkpoint.dir")
    attempt(lambda: _check_state_dir(recipe.train.state_dir), "train.state_dir")
    if (resume := checkpoint.resume) is not None:
        attempt(lambda: find(Path(resume).resolve()), "checkpoint.resume")


def _check_state_dir(folder: str | None) -> None:
    """The folder must exist, as for `ftopt.wrap`: if a disk is not mounted, creating it would write to the wrong
    disk."""
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"train.state_dir={folder!r} is no folder; create it, or name one on a local disk")
    _check_writable("train.state_dir", folder)


def _check_writable(key: str, folder: str | None) -> None:
    if folder is None:
        return
    path = Path(folder).absolute()
    there = next(each for each in [path, *path.parents] if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is not writable" if there.is_dir() else "is a file"
        raise UserError(f"{key}={folder!r}: {there} {what}; give a folder that can be made and written to")
