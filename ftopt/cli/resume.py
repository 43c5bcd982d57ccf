"""``ftopt resume RUN [key=value ...]``: goes on with a run, from its newest checkpoint, by its own recipe."""

from __future__ import annotations

import argparse
import fcntl
import json
from pathlib import Path

from ftopt.cli.run import add_dry_run, add_quiet, data_ended
from ftopt.cli.run import run as run_recipe
from ftopt.cli.shared.keep import add_keep
from ftopt.common.paths import user_path
from ftopt.config.shipped import check_overrides
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=user_path, help="a run's folder, e.g. runs/diloco_bytes-20260102-030405"
    )
    text = "settings to override, e.g. train.inner_steps=1200, replicas=2"
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=text)
    add_quiet(parser)
    add_keep(parser)
    add_dry_run(parser)


def run(arguments: argparse.Namespace) -> int:
    """Starts a new run of the recipe in the folder, with a folder of its own; the old one stays as it is."""
    folder = arguments.run.resolve()
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        if why := of_a_script(folder):
            raise UserError(f"{arguments.run} {why}; to resume it, launch the script again")
        why = "it has no recipe.yaml" if folder.is_dir() else "there is no such folder"
        raise UserError(
            f"{arguments.run} is not a run's folder: {why}; give one such as runs/NAME-DATE-TIME, or "
            "use `ftopt run RECIPE checkpoint.resume=FOLDER`"
        )
    if _goes_on(folder):
        raise UserError(
            f"{arguments.run} still goes on, and its checkpoints come and go; end it first (Ctrl-C, which saves "
            "the last version), or wait for its end"
        )
    check_overrides(arguments.overrides)
    from ftopt.checkpoint.reader import find

    kept = checkpoints_of(folder)
    newest = find(kept)
    if ended := data_ended(newest):
        raise UserError(f"{arguments.run}: {ended}")
    arguments.recipe = str(recipe)
    resume = f"checkpoint.resume={json.dumps(str(newest.path), ensure_ascii=False)}"
    arguments.overrides = [resume, *(["checkpoint.dir=null"] if kept == folder else []), *arguments.overrides]
    return run_recipe(arguments)


def of_a_script(folder: Path) -> str:
    """Why a folder has no checkpoints: it is that of a script's job. "": it is not."""
    if (folder / "recipe.yaml").is_file() or not (folder / "events.jsonl").is_file():
        return ""
    return "is the folder of a script's job, whose checkpoints are where the script writes them (ftopt.Checkpoints)"


def checkpoints_of(folder: Path) -> Path:
    """The folder with a run's checkpoints: ``folder``, or the one elsewhere that its recipe names. If a folder was
    moved or copied, its checkpoints are in it, although its recipe names the old place. The folder of `ftopt replica`
    may have a checkpoint that is older than those in the folder that all replicas share."""
    from ftopt.checkpoint.reader import newest_in
    from ftopt.config.loader import load
    from ftopt.watch.folder import RunFolder

    written, own = load(str(folder / "recipe.yaml")).checkpoint.dir, RunFolder(folder).checkpoints
    if written is None or Path(written).is_relative_to(folder):
        return folder
    shared = Path(written)
    if own.is_dir() and _of_a_replica(folder):
        newest = newest_in([shared, own])
        return folder if newest is not None and newest.parent == own else shared
    return folder if own.is_dir() else shared


def _of_a_replica(folder: Path) -> bool:
    """Whether `ftopt replica` has written the folder."""
    from ftopt.watch.folder import RunFolder
    from ftopt.watch.jsonl import Tail

    lines = Tail(RunFolder(folder).events).each()
    spawned = (line.get("data") for line in lines if line.get("event") == "spawn")
    return any(isinstance(data, dict) and "job" in data for data in spawned)


def _goes_on(folder: Path) -> bool:
    """Whether the run's coordinator is alive; if so, it holds the lock of its journal."""
    from ftopt.watch.folder import RunFolder

    try:
        with RunFolder(folder).journal.open("rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no journal: the run never began
        return False
    return False
