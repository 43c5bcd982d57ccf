"""The last lines of ``ftopt run`` and ``ftopt replica``: what happened, and where every inner step went."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ftopt.common.plural import count
from ftopt.watch.report.words import REASONS
from ftopt.watch.sentences import figure


def closing_lines(summary: dict[str, Any], *, asked: int | None = None) -> list[str]:
    """Returns a summary as a few lines of text; of one replica's folder, what that replica knows.

    Args:
        summary: the content of ``summary.json``.
        asked: ``train.inner_steps`` of a run that came to its end: what the model has beyond it is explained.
    """
    digests = summary["anchor_digests"]
    same = "identical" if len(set(digests.values())) == 1 else "NOT IDENTICAL"
    return [
        _outer_steps(summary, asked),
        _inner_steps(summary),
        *([f"final weights of {len(digests)} replicas: {same}"] if len(digests) > 1 else []),
        _lives(summary),
        *_waits(summary),
        *_scores(summary),
    ]


def offline_wandb(folder: Path) -> list[str]:
    """How to upload what wandb has kept in the folder of a run; no line if there is nothing."""
    if not any(folder.glob("wandb/offline-run-*")):
        return []
    runs = f"{shlex.quote(str(folder))}/wandb/offline-run-*"
    return [f"wandb logged offline; to upload: wandb sync {runs}; log.wandb=off turns it off"]


def _outer_steps(summary: dict[str, Any], asked: int | None) -> str:
    failed, made = summary["attempts_aborted"], count(summary["outer_steps"], "outer step")
    tried = f", with {count(failed, 'failed attempt')}" if failed else ""
    made = f"took part in {made}" if summary["survivor_inner_steps_lost"] is None else made  # of one replica
    beyond = asked is not None and summary["inner_step"] > asked
    why = f" (train.inner_steps={asked}: the last outer step has all that its replicas had taken)" if beyond else ""
    return f"{made}{tried}; the model is at inner step {summary['inner_step']}{why}"


def _inner_steps(summary: dict[str, Any]) -> str:
    """Where all of them are. What is zero is left out, but for what survivors lost where a step is not in the model."""
    inherited, survivors = summary["inner_steps_inherited"], summary["survivor_inner_steps_lost"]
    if not summary["inner_steps_executed"] and not inherited:
        return "no inner step was taken"
    taken = count(summary["inner_steps_executed"], "inner step")
    taken += " of this replica" if survivors is None else ""
    taken += f" and {inherited:,} that came from a checkpoint or a copy" if inherited else ""
    parts = []
    if late := summary["inner_steps_too_late"]:
        parts.append(f"{late:,} came too late for the last outer step")
    if left := summary["inner_steps_pending"] - late:
        parts.append(f"{left:,} were in no outer step")
    if died := summary["dead_inner_steps_lost"]:
        parts.append(f"{died:,} were lost {'when its process' if survivors is None else 'with replicas that'} died")
    parts += [
        f"{n:,} were dropped ({REASONS.get(why, why)})" for why, n in summary["inner_steps_discarded"].items() if n
    ]
    if survivors:
        parts.append(f"{survivors:,} of survivors CANNOT BE FOUND, which must not happen: please report it")
    if not parts:
        return f"all {taken} are in the model"
    kept = f"of {taken}, {summary['inner_steps_committed']:,} are in the model, {', '.join(parts)}"
    return f"{kept}; survivors lost none" if survivors == 0 else kept


def _lives(summary: dict[str, Any]) -> str:
    took = f"{summary['wall_s']:.1f} s"
    if summary["survivor_inner_steps_lost"] is None:
        if not (died := len(summary["deaths"])):
            return f"{took} from the replica's first start to its end"
        return f"{took} passed since the replica's first start, with {count(died, 'death')} and the time away"
    joins, resumed = len(summary["joins"]), summary["resumed"]
    parts = [f"{count(resumed, 'replica')} resumed"] if resumed else []
    parts += [count(joins, "join")] if joins or not resumed else []
    if early := summary["ended_before_joining"]:
        parts.insert(0, f"{count(early, 'replica')} ended before joining")
    return f"{', '.join(parts)}, {count(len(summary['deaths']), 'death')}; the run took {took}"


def _waits(summary: dict[str, Any]) -> list[str]:
    lines = []
    if (stall := summary["stall_s"]) is not None:
        lines.append(f"sync wait per outer step: median {stall['median']:.3f} s, max {stall['max']:.3f} s")
    if (replay := summary["replay"]) is not None:
        lines.append(
            f"replay: {count(replay['steps'], 'inner step')} of {count(replay['replicas'], 'dead replica')} redone in "
            f"{replay['seconds']:.1f} s, copies fetched in {replay['fetch_s']:.2f} s; "
            f"{count(replay['copies'], 'copy', 'copies')} of "
            f"{replay['copy_bytes'] / replay['copies'] / 1e6:.1f} MB took {replay['copy_s']:.2f} s of training time"
        )
    return lines


def _scores(summary: dict[str, Any]) -> list[str]:
    """The first evaluation, if it is another one, and the final one; with their inner steps where the first was not at
    the job's start."""
    first, last = summary["val_step_initial"], summary["val_step_final"]
    at, then = (f" (step {first})", f" (step {last})") if first else ("", "")

    def line(name: str, before: str, after: str) -> str:
        return f"held-out {name} {after}{then}" if first == last else f"held-out {name} {before}{at} -> {after}{then}"

    lines = []
    if summary["val_loss_final"] is not None:
        lines.append(line("loss", figure(summary["val_loss_initial"], 5), figure(summary["val_loss_final"], 5)))
    if summary["val_accuracy_final"] is not None:
        before, after = (f"{summary[f'val_accuracy_{when}']:.3f}" for when in ("initial", "final"))
        lines.append(line("accuracy", before, after))
    metrics = summary["val_metrics_initial"] or {}
    for name, value in (summary["val_metrics_final"] or {}).items():
        lines.append(line(name, str(metrics.get(name)), str(value)))
    return lines
