"""``ftopt run RECIPE [key=value ...]``: runs a whole job on this machine."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftopt.cli import report
from ftopt.cli.output import complain, loading, say
from ftopt.cli.validate import add as add_recipe
from ftopt.cli.validate import loaded
from ftopt.config.words import check_words
from ftopt.errors import UserError
from ftopt.plural import count
from ftopt.telemetry.sentences import figure


def add(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_quiet(parser)
    add_dry_run(parser)
    parser.epilog, parser.formatter_class = _EXIT, argparse.RawDescriptionHelpFormatter


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet."""
    parser.add_argument("--quiet", "-q", action="store_true", help="show errors and the result, but no progress")


_EXIT = """\
Ctrl-C or SIGTERM: the replicas hand in their steps, the last version is saved,
and the command that resumes the job is printed. A second one ends everything at
once.

state "no step for 15 s": it should train, and has taken no step for so long.

exit status: 0 the job is done; 1 it failed; 2 the input was wrong;
             130 ended by Ctrl-C; 143 ended by SIGTERM
"""


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Adds --dry-run."""
    text = "print the resolved recipe, sizes, bytes, memory and the schedule; start and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the job, then prints the result and the folder that holds it."""
    check_words(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        from ftopt.cli.dry_run import show

        return show(arguments.recipe, arguments.overrides)
    with loading("reading the recipe ..."):
        from ftopt.job.runner import Interrupted, RunFailed, Runner, resolved, resumable
        from ftopt.telemetry.folder import RunFolder
        from ftopt.telemetry.progress import display_for
        from ftopt.telemetry.wandb import resolve

        recipe = resumable(loaded(arguments.recipe, arguments.overrides))
    if (path := recipe.checkpoint.resume) is not None:
        say(resuming(Path(path), recipe.train.inner_steps))
    mode = resolve(recipe.log.wandb)
    folder = new_folder(Path(recipe.log.dir), recipe.name)
    files = RunFolder(folder)
    runner = Runner(resolved(recipe, mode, files), files, display_for(say, quiet=arguments.quiet))
    try:
        summary = runner.run()
    except RunFailed as failed:
        if failed.summary is not None:
            _tell(failed.summary, folder, digest_lines(failed.summary))
        _tell_way_on(arguments, folder, runner.newest_checkpoint())
        complain(str(failed))
        return 128 + failed.number if isinstance(failed, Interrupted) else 1
    except UserError:
        say(f"folder: {folder}")
        raise
    _tell(summary, folder, digest_lines(summary))
    if mode == "offline":
        runs = f"{shlex.quote(str(folder))}/wandb/offline-run-*"
        say(f"wandb was offline (log.wandb=off: none at all); to upload: wandb sync {runs}")
    if (checkpoint := runner.newest_checkpoint()) is not None:
        say(f"checkpoint: {checkpoint}  (the model: {export_command(checkpoint)})")
        if (saved := _inner_step(checkpoint)) != summary["inner_step"]:
            end = summary["inner_step"]
            complain(
                f"that checkpoint is of inner step {saved}, and the end of the run, inner step {end}, is in none: a "
                "member of the last outer step has not saved its part, or there was no room; logs/ says why"
            )
    return 0


def _inner_step(checkpoint: Path) -> int:
    from ftopt.checkpoint.reader import Checkpoint

    return Checkpoint(checkpoint).manifest.inner_step


def _tell(summary: dict[str, Any], folder: Path, lines: list[str]) -> None:
    for line in [f"folder: {folder}", *lines]:
        say(line)
    report.after(folder)


def _tell_way_on(arguments: argparse.Namespace, folder: Path, checkpoint: Path | None) -> None:
    """How to go on from the newest checkpoint of the run in ``folder``."""
    if checkpoint is None:
        say("there is no complete checkpoint to resume from")
        return
    say(f"checkpoint: {checkpoint}")
    command = shlex.join(["ftopt", "resume", str(folder)])
    if not checkpoint.is_relative_to(folder):
        command = resume_command(["ftopt", "run", arguments.recipe], arguments.overrides, checkpoint)
    say(f"to resume: {command}")


def export_command(checkpoint: Path) -> str:
    """The command line that writes a checkpoint's model, to be pasted into a shell."""
    return shlex.join(["ftopt", "export", str(checkpoint), "model.safetensors"])


def resume_command(words: Sequence[str], overrides: Sequence[str], checkpoint: Path) -> str:
    """The command line that goes on from a checkpoint, to be pasted into a shell."""
    kept = [override for override in overrides if not override.startswith("checkpoint.resume=")]
    return shlex.join([*words, *kept, f"checkpoint.resume={checkpoint}"])


def resuming(path: Path, inner_steps: int) -> str:
    """Returns where the job of the checkpoint at ``path`` is, and whether it is at its end."""
    from ftopt.checkpoint.reader import Checkpoint

    at = Checkpoint(path).manifest
    done = f"; train.inner_steps={inner_steps} is reached, and nothing is trained: give more to go on"
    reached = done if at.inner_step >= inner_steps else ""
    return f"resuming from {path}: version {at.version}, inner step {at.inner_step}{reached}"


def new_folder(parent: Path, name: str) -> Path:
    """Creates a new folder for this run, ``<parent>/<name>-<time>``."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"log.dir={str(parent)!r}: {error.strerror}; give a writable folder") from error
        return folder.resolve()
    raise UserError(f"log.dir={str(parent)!r} already has a thousand runs of this second; give another folder")


def _came(summary: dict[str, Any]) -> str:
    joins = len(summary["joins"])
    resumed = f"resumed by {count(number, 'replica')}" if (number := summary["resumed"]) else ""
    return ", ".join(filter(None, [resumed, f"joins {joins}" if joins or not resumed else ""]))


def digest_lines(summary: dict[str, Any]) -> list[str]:
    """Returns the summary as a few lines of text; of one replica's folder, what that replica knows."""
    inherited = f" + inherited {steps}" if (steps := summary["inner_steps_inherited"]) else ""
    alone = summary["survivor_inner_steps_lost"] is None
    tried = "" if alone else f", attempts {summary['attempts']}, failed {summary['attempts_aborted']}"
    checked = "" if alone else f" + lost by survivors {summary['survivor_inner_steps_lost']}"
    deaths = summary["dead_inner_steps_lost"]
    lines = [
        f"outer steps {summary['outer_steps']}{tried}; inner step {summary['inner_step']}",
        f"inner steps executed {summary['inner_steps_executed']}{inherited}"
        f" = committed {summary['inner_steps_committed']}"
        f" + pending {summary['inner_steps_pending']} + lost with dead replicas {deaths}"
        f" + discarded {sum(summary['inner_steps_discarded'].values())}{checked}",
    ]
    if len(digests := summary["anchor_digests"]) > 1:
        same = len(set(digests.values())) == 1
        lines.append(f"final weights of {len(digests)} replicas: {'identical' if same else 'NOT IDENTICAL'}")
    lines.append(
        f"{summary['wall_s']:.1f} s" if alone
        else f"{_came(summary)}, deaths {len(summary['deaths'])}, {summary['wall_s']:.1f} s"
    )  # fmt: skip
    if (stall := summary["stall_s"]) is not None:
        lines.append(f"sync wait per outer step: median {stall['median']:.3f} s, max {stall['max']:.3f} s")
    if (replay := summary["replay"]) is not None:
        lines.append(
            f"replay: {count(replay['steps'], 'inner step')} of {count(replay['replicas'], 'dead replica')} redone in "
            f"{replay['seconds']:.1f} s, copies fetched in {replay['fetch_s']:.2f} s; "
            f"{count(replay['copies'], 'copy', 'copies')} of "
            f"{replay['copy_bytes'] / replay['copies'] / 1e6:.1f} MB took {replay['copy_s']:.2f} s of training time"
        )
    if summary["val_loss_final"] is not None:
        lines.append(
            f"held-out loss {figure(summary['val_loss_initial'], 5)} -> {figure(summary['val_loss_final'], 5)}"
        )
    if summary["val_accuracy_final"] is not None:
        lines.append(f"held-out accuracy {summary['val_accuracy_initial']:.3f} -> {summary['val_accuracy_final']:.3f}")
    before = summary["val_metrics_initial"] or {}
    for name, value in (summary["val_metrics_final"] or {}).items():
        lines.append(f"held-out {name} {before.get(name)} -> {value}")
    return lines
