"""``ftopt plan RECIPE [key=value ...]``: what a job will reach, and the settings with which it reaches more."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ftopt.cli.shared.output import explain, loading, say, working
from ftopt.cli.shared.times import seconds_above_0, shown
from ftopt.cli.validate import add as add_recipe
from ftopt.cli.validate import checked
from ftopt.common.plural import count
from ftopt.config.shipped import check_words
from ftopt.errors import UserError
from ftopt.watch.report.text import size

if TYPE_CHECKING:
    from ftopt.config.schema import Recipe
    from ftopt.forecast.calibrate import Measured
    from ftopt.forecast.plan import Machines
    from ftopt.forecast.recommend import Choice

_GBIT_S, _LATENCY_S, _TARGET = 1.0, 0.001, 0.9
_LEAST_GBIT_S, _MOST_GBIT_S, _MOST_LATENCY_S = 1e-5, 100_000.0, 600.0
_MOST_STEP_S = 1e6
_ELSEWHERE = ("data", "task", "train.device", "train.compile", "train.state_dir", "log", "checkpoint")
"""Sections and settings that only the machines of the job need."""
_SEVERAL = (
    "on several machines: `ftopt coordinator --new --bind 0.0.0.0:29410` on one, and on each this command with "
    "`ftopt replica` in place of `ftopt run` and with `--coordinator http://HOST:29410 --id NAME`; a token: "
    "docs/security.md"
)


def add(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--step-s",
        metavar="TIME",
        type=_up_to(_MOST_STEP_S),
        help="an inner step's computation, e.g. 0.3 or 300ms (this or --calibrate)",
    )
    parser.add_argument("--gbit-s", metavar="RATE", type=_link, help=f"link of a replica (default: {_GBIT_S:g})")
    text = f"a round trip between replicas (default: {_LATENCY_S:g} s)"
    parser.add_argument("--latency-s", metavar="TIME", type=_up_to(_MOST_LATENCY_S), help=text)
    text = (
        "mean time between two failures of one replica, e.g. 6h (default: no failures). Of N replicas, the job "
        "loses one N times as often"
    )
    parser.add_argument("--mtbf", metavar="TIME", type=seconds_above_0, help=text)
    text = "memory of a replica's GPU (or machine), e.g. 80GB: says whether the job fits (default: not checked)"
    parser.add_argument("--memory", metavar="SIZE", type=_size, help=text)
    text = f"goodput to reach with the least loss, 0 to 1 (default: {_TARGET:g})"
    parser.add_argument("--target", metavar="SHARE", type=_positive, default=_TARGET, help=text)
    text = (
        "measure step, outer step and loopback link on this machine first; an option that is given counts all the same"
    )
    parser.add_argument("--calibrate", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the forecast for the recipe as it is, and for the recommendation; raises `UserError`."""
    check_words(arguments.recipe, arguments.overrides)
    if arguments.step_s is None and not arguments.calibrate:
        raise UserError(
            "--step-s is missing; give the seconds of one inner step (1 divided by the steps/s of `ftopt status`), or "
            "--calibrate, which measures them on this machine"
        )
    if arguments.target > 1:
        raise UserError(f"--target={arguments.target:g}; must be above 0 and at most 1")
    source = arguments.recipe
    given = arguments.overrides
    with loading():
        from ftopt.config.loader import load
        from ftopt.forecast.recommend import Planner

        recipe, found = checked(source, given, () if arguments.calibrate else _ELSEWHERE)
    assert found.model is not None and found.inner is not None
    measured, machines = _machines(arguments, recipe)
    planner = Planner(lambda more: load(source, [*given, *more]), found.model, found.inner, machines)
    with working("trying settings ..."):
        now, best = planner.as_it_is(), planner.recommended(arguments.target)
    if arguments.json:
        report = {"as_it_is": _plain(now), "recommended": _plain(best) if best else None, "refused": planner.refused}
        told = {"recipe": source, "machines": vars(machines), "measured": vars(measured) if measured else None}
        say(json.dumps({**told, **report, "command": _command(source, given, best) if best else None}, indent=1))
        return 0
    for line in [*_assumed(arguments, now, machines, measured), ""]:
        explain(line)
    for line in [*_table(now, best), ""]:
        say(line)
    for line in _room(now, best, arguments.memory):
        explain(line)
    for line in _advice(source, given, now, best, planner.refused, arguments.target):
        (say if line.startswith("ftopt run ") else explain)(line)  # a command stays whole, to be pasted
    several = (arguments.gbit_s, arguments.latency_s, arguments.mtbf) != (None, None, None)
    if best is not None and recipe.replicas > 1 and several:
        explain(_SEVERAL)
    return 0


def _machines(arguments: argparse.Namespace, recipe: Recipe) -> tuple[Measured | None, Machines]:
    """The given values, else the measured ones, else the defaults."""
    from ftopt.forecast.plan import Machines

    measured = None
    known: dict[str, Any] = {"step_s": arguments.step_s, "gbit_s": _GBIT_S, "latency_s": _LATENCY_S}
    if arguments.calibrate:
        from ftopt.forecast.calibrate import calibrate

        measured = calibrate(recipe)
        known = {
            "step_s": measured.step_s,
            "round_s": measured.round_s,
            "element_s": measured.element_s,
            "codec_s": measured.codec_s,
            "gbit_s": measured.loopback_gbit_s,
            "latency_s": measured.loopback_latency_s,
        }
    asked = {"step_s": arguments.step_s, "gbit_s": arguments.gbit_s, "latency_s": arguments.latency_s}
    known |= {key: value for key, value in asked.items() if value is not None}
    return measured, Machines(**known, mtbf_s=arguments.mtbf, memory_bytes=arguments.memory)


def _assumed(arguments: argparse.Namespace, now: Choice, machines: Machines, measured: Measured | None) -> list[str]:
    recipe, plan = now.recipe, now.plan
    failures = "none" if machines.mtbf_s is None else f"each replica fails every {shown(machines.mtbf_s)}"
    if machines.mtbf_s is not None and recipe.replicas > 1:
        failures += f": the job loses one of {recipe.replicas} every {shown(machines.mtbf_s / recipe.replicas)}"
    link = f"{machines.gbit_s:.3g} Gbit/s, {shown(machines.latency_s)} a round trip"
    if measured is not None and arguments.gbit_s is None:
        link += " (loopback: give --gbit-s and --latency-s of your network)"
    own = f"{shown(machines.round_s)} and {1e9 * machines.element_s:.3g} ns a parameter"
    own += " (measured)" if measured else " (two CPU cores, docs/performance.md; --calibrate measures yours)"
    lines = [
        f"{arguments.recipe}: {plan.parameters:,} parameters, {count(recipe.replicas, 'replica')}, "
        f"{count(plan.inner_steps, 'step')}",
        f"computation of a step: {shown(machines.step_s)} ({'given' if arguments.step_s else 'measured'})",
        f"link: {link}",
        f"outer step without the network: {own}",
        f"failures: {failures}",
    ]
    if measured is not None:
        lines.append(f"memory: {measured.memory_gb_s:.3g} GB/s (a copy)")
    return lines


def _table(now: Choice, best: Choice | None) -> list[str]:
    rows = [("", "as it is", "recommended")]
    columns = [_column(now), _column(best) if best else {}]
    rows += [(what, text, columns[1].get(what, "")) for what, text in columns[0].items()]
    widths = [max(len(row[place]) for row in rows) for place in range(2)]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]


def _column(choice: Choice) -> dict[str, str]:
    recipe, reached, parts = choice.recipe, choice.reached, choice.plan.fragments
    return {
        "method": recipe.method.name,
        "H, inner steps between outer steps": str(parts[-1].every),
        "fragments": str(sum(part.what == "parameters" for part in parts) or "none"),
        "delay, inner steps": str(recipe.method.overlap.delay),
        "results come later than that by": f"{reached.late_steps} steps",
        "codec": recipe.method.codec,
        "dead_after_s, grace_s": f"{recipe.policy.dead_after_s:g}, {recipe.policy.grace_s:g}",
        "compute utilization": f"{reached.utilization:.1%}",
        "goodput": f"{reached.goodput:.1%}",
        "sent in an outer step, at most": size(reached.sync_bytes),
        "sent on average": f"{8e-6 * reached.bytes_s:.3g} Mbit/s",
        "memory per replica": size(reached.memory_bytes),
        "a failure takes with it": f"{shown(reached.pending_s)} of work",
        "the others wait, per failure": shown(reached.stall_s),
        "a joiner fetches": f"{size(reached.state_bytes)} in {shown(reached.state_s)}",
        "overwritten by design": f"{reached.discarded:.1%} of the steps",
        "loss, compared with synchronous": _loss(choice),
    }


def _room(now: Choice, best: Choice | None, memory: int | None) -> list[str]:
    """Says whether the recipe and the recommendation fit into ``--memory``; empty without it."""
    lines = []
    for what, choice in (("as it is", now), ("as recommended", best)):
        if memory is not None and choice is not None:
            needed = choice.reached.memory_bytes
            fits = f"fits: {size(memory - needed)} of {size(memory)} are left for" if needed <= memory else ""
            lacks = f"does not fit into {size(memory)}: {size(needed)}, without"
            lines.append(f"memory {what}: {fits or lacks} activations and torch itself")
    return lines


def _advice(
    source: str, given: Sequence[str], now: Choice, best: Choice | None, refused: dict[str, str], target: float
) -> list[str]:
    lines = [f"loss as it is: {now.loss.source}"]
    if best is None:
        return [*lines, "no recommendation: the recipe can have none of the methods that are tried", *_why(refused)]
    lines.append(f"loss as recommended: {best.loss.source}")
    if best.reached.goodput < target:
        lines.append(f"nothing that was tried reaches a goodput of {target:.0%}")
    if not best.overrides:
        lines.append("the recipe needs no change")
    lines += _why_every_step(best, target)
    lines += _why_lower(now, best, target)
    return [*lines, *_why(refused), "", _command(source, given, best)]


def _why_every_step(best: Choice, target: float) -> list[str]:
    """Explains a recommendation to exchange gradients at every step; empty for other recommendations."""
    if best.recipe.method.name != "sync_sgd" or best.plan.fragments[-1].every != 1:
        return []
    cost = f"{1 - best.reached.utilization:.1%} of the time at this link"
    enough = "goodput reaches --target" if best.reached.goodput >= target else "no setting has 0.01 more goodput"
    return [f"why sync_sgd: exchanging gradients at every step costs {cost}, {enough}, and no method has less loss"]


def _why_lower(now: Choice, best: Choice, target: float) -> list[str]:
    """Explains why the recommendation has a lower goodput than the recipe; empty if it has not."""
    was, reached = f"{now.reached.goodput:.1%}", f"{best.reached.goodput:.1%}"
    if best.reached.goodput >= now.reached.goodput or was == reached:
        return []
    if why := now.cannot_win:
        return [f"recommended is less goodput, {reached} instead of {was}; the recipe as it is cannot win: {why}"]
    few = best.reached.goodput < target
    among = "come within 0.01 of the best goodput" if few else f"reach --target, {target:.0%}"
    told = (
        f"recommended is less goodput, {reached} instead of {was}, for less loss, {_loss(best)} instead of "
        f"{_loss(now)}: the least of all settings that {among}"
    )
    if runs := now.loss.smaller or best.loss.smaller:
        told += f"; these losses are extrapolated from far smaller runs ({runs}), and probably less in this job"
    return [told, *([] if few else [f"if goodput is worth more to you than that: a --target above {reached}"])]


def _loss(choice: Choice) -> str:
    return "no figure" if choice.loss.percent is None else f"{choice.loss.percent:+.2g} %"


def _why(refused: dict[str, str]) -> list[str]:
    return [f"not tried: {method}: {reason}" for method, reason in refused.items()]


def _command(source: str, given: Sequence[str], best: Choice) -> str:
    """The given command with the recommended overrides, which replace given ones with the same keys."""
    new = {override.partition("=")[0] for override in best.overrides}
    kept = [override for override in given if override.partition("=")[0] not in new]
    return shlex.join(["ftopt", "run", source, *kept, *best.overrides])


def _plain(choice: Choice) -> dict[str, Any]:
    return {
        "overrides": list(choice.overrides),
        "method": choice.recipe.method.name,
        "sync_every": choice.plan.fragments[-1].every,
        "fragments": sum(part.what == "parameters" for part in choice.plan.fragments),
        "delay": choice.recipe.method.overlap.delay,
        "codec": choice.recipe.method.codec,
        "dead_after_s": choice.recipe.policy.dead_after_s,
        "grace_s": choice.recipe.policy.grace_s,
        **vars(choice.reached),
        "loss_percent": choice.loss.percent,
        "loss_source": choice.loss.source,
    }


def _link(text: str) -> float:
    value = _positive(text)
    if not _LEAST_GBIT_S <= value <= _MOST_GBIT_S:
        raise argparse.ArgumentTypeError(
            f"{text!r}; must be from {_LEAST_GBIT_S:g} (10 kbit/s) to {_MOST_GBIT_S:,.0f} Gbit/s"
        )
    return value


def _up_to(most_s: float) -> Callable[[str], float]:
    """The type of an option that is a time of at most ``most_s``."""

    def read(text: str) -> float:
        value = seconds_above_0(text)
        if value > most_s:
            raise argparse.ArgumentTypeError(f"{text!r}; must be at most {most_s:,.0f} s")
        return value

    return read


def _size(text: str) -> int:
    found = re.fullmatch(r"([\d.]{1,9}) ?([MGT])(i?)B", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}; must be a size with a unit, as in 80GB, 24GiB, 500MB")
    return int(_positive(found[1]) * (1024 if found[3] else 1000) ** (" MGT".index(found[2]) + 1))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; must be a number above 0")
    return value
