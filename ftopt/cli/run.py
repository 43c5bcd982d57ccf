"""``ftopt run RECIPE [key=value ...]``: runs a whole job on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ftopt.cli.output import say
from ftopt.cli.validate import add as add_recipe
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_dry_run(parser)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Adds --dry-run."""
    text = "print the resolved recipe, sizes, bytes, memory and the schedule; start and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the job, then prints the result and the folder that holds it."""
    if arguments.dry_run:
        from ftopt.cli.dry_run import show

        return show(arguments.recipe, arguments.overrides)
    from ftopt.config.loader import load
    from ftopt.job.runner import Runner, resolved, resumable
    from ftopt.telemetry.folder import RunFolder
    from ftopt.telemetry.progress import LiveTable, PlainLines
    from ftopt.telemetry.wandb import resolve

    recipe = resumable(load(arguments.recipe, arguments.overrides))
    if (path := recipe.checkpoint.resume) is not None:
        say(resuming(Path(path), recipe.train.inner_steps))
    mode = resolve(recipe.log.wandb)
    folder = new_folder(Path(recipe.log.dir), recipe.name)
    if mode == "offline":
        say(f"wandb is offline: no key found; to upload the runs later: wandb sync {folder}/wandb/offline-run-*")
    files = RunFolder(folder)
    runner = Runner(resolved(recipe, mode, files), files, LiveTable() if sys.stdout.isatty() else PlainLines(say))
    try:
        summary = runner.run()
    finally:
        say(f"folder: {folder}")
    for line in digest_lines(summary):
        say(line)
    return 0


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


def digest_lines(summary: dict[str, Any]) -> list[str]:
    """Returns the summary as a few lines of text."""
    digests = summary["anchor_digests"]
    alike = "identical" if len(set(digests.values())) <= 1 else "NOT IDENTICAL"
    inherited = f" + inherited {steps}" if (steps := summary["inner_steps_inherited"]) else ""
    lines = [
        f"outer steps {summary['outer_steps']}, attempts {summary['attempts']}, aborted {summary['attempts_aborted']}",
        f"inner steps executed {summary['inner_steps_executed']}{inherited}"
        f" = committed {summary['inner_steps_committed']}"
        f" + pending {summary['inner_steps_pending']} + lost with dead replicas {summary['dead_inner_steps_lost']}"
        f" + discarded {sum(summary['inner_steps_discarded'].values())}"
        f" + lost by survivors {summary['survivor_inner_steps_lost']}",
        f"anchor digests of {len(digests)} replicas: {alike}",
        f"joins {len(summary['joins'])}, deaths {len(summary['deaths'])}, {summary['wall_s']:.1f} s",
    ]
    if (stall := summary["stall_s"]) is not None:
        lines.append(
            f"time that an outer step kept a replica waiting: median {stall['median']:.3f} s, max {stall['max']:.3f} s"
        )
    if (replay := summary["replay"]) is not None:
        lines.append(
            f"replay: {replay['steps']} inner steps of {replay['replicas']} dead replicas redone in "
            f"{replay['seconds']:.1f} s, copies fetched in {replay['fetch_s']:.2f} s; {replay['copies']} copies of "
            f"{replay['copy_bytes'] / replay['copies'] / 1e6:.1f} MB took {replay['copy_s']:.2f} s of training time"
        )
    if summary["val_loss_final"] is not None:
        lines.append(f"held-out loss {summary['val_loss_initial']:.4f} -> {summary['val_loss_final']:.4f}")
    if summary["val_accuracy_final"] is not None:
        lines.append(f"held-out accuracy {summary['val_accuracy_initial']:.3f} -> {summary['val_accuracy_final']:.3f}")
    before = summary["val_metrics_initial"] or {}
    for name, value in (summary["val_metrics_final"] or {}).items():
        lines.append(f"held-out {name} {before.get(name)} -> {value}")
    return lines
