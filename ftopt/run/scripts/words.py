"""What a launch says at its beginning, when a signal comes, and at its end."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from ftopt.common.paths import near
from ftopt.common.plural import count
from ftopt.run.interruption import Interrupts
from ftopt.run.scripts.others import Others
from ftopt.run.scripts.plan import Plan
from ftopt.run.scripts.saved import Saved, keeps
from ftopt.watch.sentences import Note, names
from ftopt.watch.status import Job
from ftopt.watch.story import Story


def way_in(plan: Plan, at: SplitResult, page: str, token: Path) -> list[str]:
    """Where the job is shown, and how replicas of other machines join it. ``at``: its coordinator."""
    if plan.join or plan.is_private:
        return [] if plan.join else [f"live page: {page}"]
    joins = plan.to_join(f"{at.scheme}://THIS-HOST:{at.port}")
    return [
        f"live page: {page} (its token is in {token})",
        f"to join from another machine, copy {token} there, and name this host: {joins}",
    ]


def leaving(plan: Plan, number: int, told: Iterable[Mapping[str, Any]]) -> Note:
    """The signal ``number`` ends the launch. ``told``: by each replica (`ftopt.common.launched`)."""
    by_key = number == signal.SIGINT
    first, again = ("interrupted", "Ctrl-C") if by_key else ("asked to end by SIGTERM", "SIGTERM (`ftopt stop --now`)")
    saves = keeps(told) and not plan.join
    stays = ", and the model stays in what the script saves (ftopt.Checkpoints)" if saves else ""
    text = f"{first}: the replicas contribute their steps and leave{stays}; another {again} ends them at once"
    return Note(text, "warn")


def others_there(others: Others, again: str = "") -> Note:
    """Replicas of other launches are still there. ``again``: starts the coordinator, which ends now; "": the launch
    waits for them."""
    trained = [x for x in others.here if x not in others.untrained]
    still, have = "train" if len(trained) > 1 else "trains", "have" if len(others.untrained) > 1 else "has"
    told = [f"{names(trained)} of other machines still {still}"] if trained else []
    if others.untrained:
        told.append(f"{names(others.untrained)} {'' if told else 'of other machines '}{have} not begun to train")
    ends = f", and {'they ' if len(told) > 1 else ''}will find no coordinator; to start it: {again}"
    waits = "; this launch waits for the job's end (Ctrl-C ends it)"
    return Note(f"{', '.join(told)}{ends if again else waits}", "warn")


def interrupted(
    plan: Plan, interrupts: Interrupts, story: Story, others: Sequence[str] = (), saved: Saved | None = None
) -> str:
    """Signals have ended the launch. ``others``: replicas of other launches that hold the model; ``saved``: the newest
    checkpoint."""
    what = "interrupted" if interrupts[0] == signal.SIGINT else "ended by SIGTERM"
    if plan.join:
        return what
    of = f" of {story.inner_steps}" if story.inner_steps else ""
    at = f"{what} at inner step {interrupts.at}{of}" if story.members else f"{what} before an outer step"
    if others:
        has, comes = ("has", "comes") if len(others) == 1 else ("have", "come")
        return (
            f"{at}. The model is not lost: {names(others)} {has} it. Start the coordinator again by the command above, "
            f"and the job goes on with what {comes} back to it"
        )
    if saved is not None:
        newest = saved.inner_step == story.inner_step
        found, path = "The model is in" if newest else "The newest checkpoint is", str(near(saved.path))
        if not newest or saved.inner_step != interrupts.at:
            path += f", of inner step {saved.inner_step}"
        resumes = "" if saved.resumes else f" if {plan.script} calls resume() before its loop"
        return f"{at}. {found} {path}; the same command goes on from it{resumes}"
    if not story.members:
        return at
    return (
        f"{at}. The model is lost unless {plan.script} has saved it: if it keeps checkpoints and calls resume() "
        "(ftopt.Checkpoints), the same command goes on from them"
    )


def sharing(plan: Plan, devices: Sequence[str]) -> Note | None:
    """Processes share GPUs; None: they do not."""
    wanted, different = plan.n * plan.ranks, sorted(set(devices))
    if not 0 < len(different) < wanted:
        return None
    return Note(f"{wanted} processes share {count(len(different), 'GPU')}: {names(different)}", "warn")


def to_restart(bind: str, journal: Path, token: Path) -> str:
    """The command line of a job's coordinator."""
    return shlex.join(["ftopt", "coordinator", "--bind", bind, "--journal", str(journal), "--token-file", str(token)])


def no_outer_step(plan: Plan, joined: Collection[str], story: Story) -> Note:
    """Replicas have come to the end of the script without an outer step. ``joined``: those that have joined the job."""
    if not joined:
        return Note(f"no replica has joined the job{plan.hint()}", "warn")
    at = f"the job is at version {story.version}, inner step {story.inner_step}"
    if not story.version:
        return Note(f"{plan.script} ended without an outer step: {at}", "warn")
    return Note(f"nothing was left to do: {at}, and {plan.script} takes no more steps")


def job_now(name: str, found: Sequence[Job] | None) -> list[str]:
    """Where the job that a launch had joined is now. ``found``: as its coordinator describes it; None: it does not."""
    job = f"The job {name!r}"
    if found is None:
        return [f"{job}: its coordinator has ended or cannot be reached; its first launch says how the job ended."]
    told = []
    for each in found:
        here = sum(x["state"] != "away" for x in each["replicas"])
        goes_on = f"goes on with {count(here, 'replica')}: " if here else "is without replicas: "
        told.append(f"{job} {'has ' if each['phase'].startswith('ended') else goes_on}{_at(each)}.")
    return told


def _at(job: Job) -> str:
    for at in job["fragments"][:1]:
        return f"version {at['version']}, inner step {at['inner_step']}"
    return str(job["phase"]).partition(":")[0]
