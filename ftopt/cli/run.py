"""``ftopt run RECIPE [key=value ...]``: runs a whole job on this machine."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftopt.cli import report
from ftopt.cli.shared.keep import add_keep, keep
from ftopt.cli.shared.output import complain, explain, loading, say, show_command
from ftopt.cli.validate import add as add_recipe
from ftopt.cli.validate import checked, loaded
from ftopt.common.paths import near
from ftopt.config.shipped import check_words
from ftopt.errors import UserError
from ftopt.watch.account import closing_lines

if TYPE_CHECKING:
    from torch import nn

    from ftopt.checkpoint.reader import Checkpoint
    from ftopt.config.schema import Recipe
    from ftopt.run.runner import Runner
    from ftopt.watch.folder import RunFolder


def add(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_quiet(parser)
    add_keep(parser)
    add_dry_run(parser)
    parser.epilog, parser.formatter_class = _EXIT, argparse.RawDescriptionHelpFormatter


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", "-q", action="store_true", help="show errors and the result, but no progress")


_EXIT = """\
Ctrl-C or SIGTERM: the replicas contribute their steps, the last version is
saved, and the command that resumes the job is printed. A second one ends
everything at once.

A replica shown as "no step for 15 s" should train, and has taken no step for
that long.

exit status: 0 the job is done; 1 it failed, or its end is in no checkpoint;
             2 an option, the recipe or a file is wrong; nothing was started
             130 ended by Ctrl-C; 143 ended by SIGTERM
"""


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    text = "print the resolved recipe, sizes, bytes, memory and the schedule; start and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the job, then prints the result and the folder that holds it."""
    check_words(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        from ftopt.cli.dry_run import show

        return show(arguments.recipe, arguments.overrides)
    with nullcontext() if arguments.quiet else loading("reading the recipe ..."):
        from ftopt.run.runner import Runner
        from ftopt.run.supervised import ended_by, on_signals
        from ftopt.watch.folder import RunFolder
        from ftopt.watch.terminal import display_for
        from ftopt.watch.trackers.wandb import of_recipe

        recipe = resumable(loaded(arguments.recipe, arguments.overrides))
        path, end = recipe.checkpoint.resume, recipe.train.inner_steps
        if path is not None and is_trained(Path(path), end):  # no replica starts that would find another model
            _check_model(Path(path), checked(arguments.recipe, arguments.overrides)[1].model)
    if path is not None:
        explain(resuming(Path(path), end))
        if is_trained(Path(path), end):
            show_command("to get the model from it:", export_command(Path(path)))
            return 0
    mode, off = of_recipe(recipe.log.wandb)
    folder = new_folder(Path(recipe.log.dir), recipe.name)
    files = RunFolder(folder)
    recipe = _resolved(recipe, mode, files)
    runner = Runner(recipe, files, display_for(explain, quiet=arguments.quiet))
    got: list[int] = []
    with on_signals(lambda number: ended_by(number) if got else got.append(number)):  # the first one cuts no output
        status = _run(arguments, runner, folder, recipe)
    if off and not status and not arguments.quiet:
        explain(off)
    if arguments.keep and status < 128:
        keep(runner.url, folder / "report.html")
    return status


def resumable(recipe: Recipe) -> Recipe:
    """The recipe with the one checkpoint from which all replicas resume, every file of it verified. UserError: it
    cannot be used; a new job would write to a folder with another job's checkpoints."""
    from ftopt.checkpoint.reader import verified, whole

    settings = recipe.checkpoint
    if settings.resume is not None:
        found = verified(Path(settings.resume).resolve())
        return replace(recipe, checkpoint=replace(settings, resume=str(found.path)))
    if settings.every and settings.dir is not None and (there := whole(Path(settings.dir).resolve())):
        raise UserError(
            f"checkpoint.dir={settings.dir} holds checkpoints of another job, the newest {there[-1]}; to go on from "
            f"it, give checkpoint.resume={settings.dir}; for a new job, give another folder"
        )
    return recipe


def _resolved(recipe: Recipe, wandb: str, folder: RunFolder) -> Recipe:
    """The recipe as the run's processes read it, with wandb's mode and the folder for checkpoints resolved."""
    checkpoint = recipe.checkpoint
    if checkpoint.every:
        where = Path(checkpoint.dir) if checkpoint.dir is not None else folder.checkpoints
        checkpoint = replace(checkpoint, dir=str(where.resolve()))
    return replace(recipe, log=replace(recipe.log, wandb=wandb), checkpoint=checkpoint)


def _check_model(path: Path, model: nn.Module | None) -> None:
    """Refuses a checkpoint of another model: compares names and shapes of trainable parameters. UserError: names the
    first parameter that differs."""
    from ftopt.checkpoint.manifest import BadCheckpoint
    from ftopt.checkpoint.reader import Checkpoint
    from ftopt.config.optimizers import parameters_of

    assert model is not None
    try:
        places = next(iter(Checkpoint(path).notes.values()))["model"]["tensors"]
        there = {name: tuple(place["shape"]) for name, place in places.items() if "shape" in place}
    except (AttributeError, KeyError, TypeError) as error:
        raise BadCheckpoint(path, f"does not describe a model ({type(error).__name__}: {error})") from None
    for here in parameters_of(model):
        name = here.name.replace("_orig_mod.", "")  # the name before `torch.compile`
        if there.get(name) != here.shape:
            raise UserError(
                f"{path}: it is of another model: {name} is {there.get(name, 'missing')} there, {here.shape} here; "
                "give a checkpoint of a run of this recipe's model"
            )


def _run(arguments: argparse.Namespace, runner: Runner, folder: Path, recipe: Recipe) -> int:
    from ftopt.run.processes import Interrupted, RunFailed

    try:
        summary = runner.run()
    except RunFailed as failed:
        if failed.summary is not None:
            _tell(folder, closing_lines(failed.summary))
        _tell_way_on(arguments, folder, runner.newest_checkpoint())
        complain(str(failed))
        return 128 + failed.number if isinstance(failed, Interrupted) else 1
    except UserError:
        explain(f"folder: {near(folder)}")
        raise
    _tell(folder, closing_lines(summary, asked=recipe.train.inner_steps), "the job is done; ")
    if (checkpoint := runner.newest_checkpoint()) is not None:
        explain(f"checkpoint: {near(checkpoint)}")
        inside = checkpoint.is_relative_to(folder)  # then the folder means the same, and is shorter
        show_command("to get the model from it:", export_command(folder if inside else checkpoint))
    if not recipe.checkpoint.every:
        return 0
    resumed = recipe.checkpoint.resume  # if so, its data had ended already: nothing was trained or saved
    newest = Path(resumed) if checkpoint is None and resumed is not None else checkpoint
    return 0 if end_is_saved(newest, summary["inner_step"]) else 1


def end_is_saved(checkpoint: Path | None, inner_step: int) -> bool:
    """Whether a run's newest checkpoint exists and is of its end; if not, prints what is known."""
    from ftopt.checkpoint.reader import Checkpoint

    saved = None if checkpoint is None else Checkpoint(checkpoint).manifest.inner_step
    if saved == inner_step:
        return True
    newest = "there is no complete checkpoint"
    if checkpoint is not None:
        newest = f"{near(checkpoint)} is of inner step {saved}"
    complain(
        f"{newest}, and the end of the run, inner step {inner_step}, is in none: a member of the last outer step has "
        "not saved its part, or there was no room; logs/ says why"
    )
    return False


def tell_offline_wandb(folder: Path) -> None:
    """Says how to upload wandb's offline logs in the folder of a run, if there are any."""
    if any(folder.glob("wandb/offline-run-*")):
        runs = f"{shlex.quote(str(near(folder)))}/wandb/offline-run-*"
        show_command("wandb logged offline; to upload:", f"wandb sync {runs}")


def _tell(folder: Path, lines: list[str], state: str = "") -> None:
    for line in [f"folder: {near(folder)}", *lines]:
        explain(line)
    report.after(folder, state)
    tell_offline_wandb(folder)


def _tell_way_on(arguments: argparse.Namespace, folder: Path, checkpoint: Path | None) -> None:
    """Prints how to go on from the newest checkpoint of the run in ``folder``."""
    if checkpoint is None:
        say("there is no complete checkpoint to resume from")
        return
    explain(f"checkpoint: {near(checkpoint)}")
    command = shlex.join(["ftopt", "resume", str(near(folder))])
    if not checkpoint.is_relative_to(folder):
        command = resume_command(["ftopt", "run", arguments.recipe], arguments.overrides, checkpoint)
    show_command("to resume:", command)


def export_command(checkpoint: Path) -> str:
    """The command line that writes the model of a checkpoint, or of a run's newest, to paste into a shell."""
    return shlex.join(["ftopt", "export", str(near(checkpoint)), "model.safetensors"])


def resume_command(words: Sequence[str], overrides: Sequence[str], checkpoint: Path) -> str:
    """The command line that resumes from a checkpoint, to paste into a shell."""
    kept = [override for override in overrides if not override.startswith("checkpoint.resume=")]
    return shlex.join([*words, *kept, f"checkpoint.resume={near(checkpoint)}"])


def resuming(path: Path, inner_steps: int) -> str:
    """Returns the inner step of the checkpoint at ``path``, and whether its job is at its end, in words."""
    from ftopt.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint(path)
    at = checkpoint.manifest
    done = f"; train.inner_steps={inner_steps} is reached, and nothing is trained: give more to go on"
    ended = data_ended(checkpoint)
    reached = done if is_trained(path, inner_steps) else f"; {ended}" if ended else ""
    return f"resuming from {near(path)}: version {at.version}, inner step {at.inner_step}{reached}"


def is_trained(path: Path, inner_steps: int) -> bool:
    """Whether the checkpoint at ``path`` is at or beyond the job's end."""
    from ftopt.checkpoint.reader import Checkpoint

    return Checkpoint(path).manifest.inner_step >= inner_steps


def data_ended(checkpoint: Checkpoint) -> str:
    """A message that the job of this checkpoint has used all its data, and what to do; "" if some are left."""
    from ftopt.config.plain import uses_all_data

    if not uses_all_data(checkpoint):
        return ""
    return (
        f"no data are left: all epochs (data.epochs) are in the model, at inner step {checkpoint.manifest.inner_step}, "
        "and the epochs of a job that has begun cannot be changed; to train on, begin a new job with more epochs, or "
        f"data.epochs=null, from this model: {export_command(checkpoint.path)} writes it, for a model.factory that "
        "loads it"
    )


def new_folder(parent: Path, name: str, *, setting: str = "log.dir") -> Path:
    """Creates a new folder for this run, ``<parent>/<name>-<time>``. ``setting``: what chooses the parent."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{setting}={str(parent)!r}: {error.strerror}; give a writable folder") from error
        return folder.resolve()
    raise UserError(f"{setting}={str(parent)!r} already has a thousand runs of this second; give another folder")
