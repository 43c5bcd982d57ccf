"""Goodput on traces of failures, in virtual time: ``python -m benchmarks simulate [options]``.

It runs the production protocol in virtual time, compared with models of other systems:

- `comparison`: policies side by side; start here.
- `traces`: which machines are there when; `assumptions`: how fast they compute and exchange.
- `world`, `modelled_replica`, `modelled_reduction`, `fleet`, `many_machines`: drive the protocol's state machines.
- `policies`: the other systems; `published`: published throughput; `tally`, `picture`: the results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.simulate import traces
from benchmarks.simulate.assumptions import OPTIONS, Model
from benchmarks.simulate.comparison import Ours, Row, by_rate, compare, ours, sweep
from benchmarks.simulate.output import HEAD, WIDTHS, Progress, aligned, cells_of, conclusion, no_removal, table
from benchmarks.simulate.picture import draw
from benchmarks.simulate.policies import others
from benchmarks.simulate.published import FAILURES, MODELS, ratios
from ftopt.cli.shared.output import say
from ftopt.cli.shared.times import seconds
from ftopt.common.paths import user_path
from ftopt.common.plural import count
from ftopt.errors import UserError, check_choice, check_number, check_whole

_MOST_HOURS = 100_000
_MTBFS_S = (6 * 3600.0, 2 * 3600.0, 3600.0, 1800.0, 600.0)
_PERIODS = (30, 120, 360, 1200)


def _expanded(text: str) -> str:
    """``text`` with a leading ``~`` replaced; without one as written, for messages that quote it."""
    return str(user_path(text)) if text.startswith("~") else text


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of what is drawn (default: %(default)s)")
    trace = parser.add_argument_group("which machines are there")
    text = "a trace: lines `ms,add|remove,node` (Bamboo, Oobleck) or `date, time, machines`"
    trace.add_argument("--trace", metavar="FILE", type=_expanded, help=text)
    trace.add_argument("--machines", metavar="N", type=int, default=32, help="without a trace (default: %(default)s)")
    text = "mean time between two failures of one machine, as for `ftopt plan`, e.g. 20h; without it there are none"
    trace.add_argument("--mtbf", metavar="TIME", type=seconds, default=math.inf, help=text)
    text = "each machine fails as often as in a published run: " + ", ".join(FAILURES)
    trace.add_argument("--failures", metavar="NAME", help=text)
    text = "machines that go at one moment (default: %(default)s)"
    trace.add_argument("--together", metavar="N", type=int, default=1, help=text)
    text = "time until a machine is replaced, in seconds or with a unit, like all times here (default: %(default)s)"
    trace.add_argument("--back", metavar="TIME", type=seconds, default=120.0, help=text)
    text = "how many hours; cuts a trace (default: the whole trace, or 24)"
    trace.add_argument("--hours", metavar="H", type=float, help=text)
    usual = Model()
    model = parser.add_argument_group("what is assumed")
    for name, option in OPTIONS.items():
        value = getattr(usual, name)
        kind = seconds if name.endswith("_s") and option.name != "gbit-s" else type(value)
        _add(model, option.name, kind, option.default or type(value)(value / option.unit), option.text)
    _add(model, "quorum", int, 8, "policy.min_replicas of the decoupled policy")
    _add(model, "fragments", int, 4, "of the decoupled policy")
    model.add_argument("--codec", metavar="NAME", default="fp32", help="of the payloads (default: %(default)s)")
    what = parser.add_argument_group("what is shown")
    text = "only the policies of ftopt with these words in their names (`--only delay`), and no models of other systems"
    what.add_argument("--only", metavar="TEXT", help=text)
    text = "only the models of other systems, which take seconds for days of thousands of machines"
    what.add_argument("--models", action="store_true", help=text)
    what.add_argument("--sweep", action="store_true", help="period by failure rate: where keeping steps does not pay")
    what.add_argument("--rates", action="store_true", help="each policy with a failure every 6 h, 2 h, ... 10 min")
    what.add_argument("--published", action="store_true", help="models of other systems beside their published figures")
    what.add_argument("--json", metavar="FILE", type=_expanded, help="also writes the results there")
    what.add_argument("--picture", metavar="FILE", type=_expanded, help="also draws them there, as SVG")


def _add(group: argparse._ArgumentGroup, name: str, kind: Callable[[str], float], default: float, text: str) -> None:
    shown = f"{text} (default: {default:g})"
    metavar = "TIME" if kind is seconds else "N" if kind is int else "X"
    group.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=shown)


def run(arguments: argparse.Namespace) -> int:
    """Runs the requested simulations, and prints the results."""
    model = _model(arguments)
    check_whole("--machines", arguments.machines, 1)
    check_whole("--seed", arguments.seed, 0)
    check_whole("--together", arguments.together, 1)
    check_whole("--quorum", arguments.quorum, 1)
    check_whole("--fragments", arguments.fragments, 1)
    check_number("--mtbf", min(arguments.mtbf, 1e18), "(0, inf)", of="seconds")
    if arguments.failures is not None:
        check_choice("--failures", arguments.failures, tuple(FAILURES))
        if arguments.mtbf < math.inf or arguments.trace:
            other = "--trace" if arguments.trace else "--mtbf"
            raise UserError(f"--failures={arguments.failures} with {other}: both say when machines fail; give one")
        arguments.mtbf = FAILURES[arguments.failures].mtbf_s(1)
    check_number("--back", arguments.back, "[0, inf)", of="seconds")
    if arguments.hours is not None:
        check_number("--hours", arguments.hours, f"(0, {_MOST_HOURS}]")
    for option in ("trace", "json", "picture"):
        if getattr(arguments, option) == "":
            raise UserError(f"--{option} is empty; name a file, or leave the option out")
    for option in ("json", "picture"):
        if (path := getattr(arguments, option)) and not Path(path).parent.is_dir():
            raise UserError(f"--{option}={path}: {Path(path).parent} is no folder; create it, or name another file")
        if path and Path(path).is_dir():
            raise UserError(f"--{option}={path} is a folder; name a file in it")
        if (
            path and Path(path).resolve().is_fifo()
        ):  # a process' own pipe, such as /dev/stdout may be, resolves to no file
            raise UserError(f"--{option}={path} is a named pipe, which waits for a reader; name a regular file")
    if arguments.json and arguments.picture:
        both = Path(arguments.json).resolve()
        if both == Path(arguments.picture).resolve() and (both.is_file() or not both.exists()):
            raise UserError(
                f"--json={arguments.json} with --picture={arguments.picture}: both name the same file; name two"
            )
    _check_shown(arguments)
    if arguments.published:
        return _published(arguments, model)
    if arguments.rates:
        return _rates(arguments, model)
    return _sweep(arguments, model) if arguments.sweep else _compare(arguments, model)


_WITHOUT_EFFECT = {
    "published": ("trace", "failures", "mtbf", "only", "models", "json", "picture"),
    "rates": ("trace", "failures", "mtbf", "picture"),
    "sweep": ("trace", "failures", "mtbf", "only", "models", "picture"),
}
"""Requested table -> options without effect on it."""


def _check_shown(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other, or that would have no effect."""
    shown = [name for name in _WITHOUT_EFFECT if getattr(arguments, name)]
    if len(shown) > 1:
        raise UserError(f"--{shown[0]} with --{shown[1]}: each shows a table of its own; give one")
    for option in _WITHOUT_EFFECT[shown[0]] if shown else ():
        given = getattr(arguments, option)
        if given and (option != "mtbf" or given < math.inf):
            raise UserError(f"--{option} has no effect with --{shown[0]}; leave it out")


def _write(option: str, path: str, text: str) -> None:
    """Writes a file of results, which are printed already, so that a failure loses nothing. An old file stays whole
    until the new one is complete."""
    target = Path(path)
    # Devices and links, such as /dev/stdout, are written directly.
    plain = not target.is_symlink() and (target.is_file() or not target.exists())
    beside = target.with_name(f".{target.name}.{os.getpid()}") if plain else target
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            if plain:
                beside.replace(target)
        except BaseException:
            if plain:
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"--{option}={path} cannot be written: {error.strerror}; name another file") from None


def _model(arguments: argparse.Namespace) -> Model:
    payload_bytes = None
    check_number("--parameters", arguments.parameters, "(0, inf)")
    if arguments.codec != "fp32":
        from ftopt.codecs.named import codec_named

        payload_bytes = float(codec_named(arguments.codec).encoded_bytes(int(arguments.parameters)))
    given = {name: getattr(arguments, option.name.replace("-", "_")) for name, option in OPTIONS.items()}
    given |= {name: given[name] * option.unit for name, option in OPTIONS.items() if option.unit != 1}
    return Model(**given, payload_bytes=payload_bytes, evict_after_s=max(600.0, arguments.dead_after))


def _fleet(arguments: argparse.Namespace, mtbf_s: float) -> traces.Trace:
    """A fleet of constant size. ``mtbf_s``: time between two failures of machines of the fleet."""
    return traces.poisson(
        arguments.machines,
        mtbf_s=mtbf_s,
        hours=arguments.hours or 24.0,
        back_s=arguments.back,
        together=arguments.together,
        seed=arguments.seed,
    )


def _compare(arguments: argparse.Namespace, model: Model) -> int:
    if arguments.trace:
        trace = traces.read(arguments.trace, seed=arguments.seed)
    else:
        trace = _fleet(arguments, arguments.mtbf * arguments.together / arguments.machines)
    if arguments.trace and arguments.hours:
        trace = trace.cut(min(trace.end_s, 3600 * arguments.hours))
    if not trace.machine_seconds():
        raise UserError(
            f"--trace={arguments.trace}: no machine is ever there{' in these hours' if arguments.hours else ''}; "
            f"give another trace{', or more --hours' if arguments.hours else ''}"
        )
    if trace.end_s > 3600 * _MOST_HOURS:
        raise UserError(
            f"--trace={arguments.trace} lasts {trace.end_s / 3600:.3g} h; at most {_MOST_HOURS:,} h are allowed: cut "
            "it with --hours"
        )
    policies = _policies(arguments, model)
    stays = trace.stays()
    say(
        f"{trace.name}: {trace.end_s / 3600:.1f} h, "
        f"{count(max(size for _, size in trace.sizes()), 'machine')} at most, "
        f"{trace.machine_seconds() / trace.end_s:.1f} on average, {count(sum(x.removed for x in stays), 'removal')} at "
        f"{count(len(trace.removals()), 'moment')}"
    )
    say(
        f"a step {model.step_s:g} s, a round {count(model.sync_every, 'step')}, {model.parameters:.3g} parameters, "
        f"{model.link_bytes_s * 8e-9:.3g} Gbit/s, a process starts in {model.start_s:g} s"
    )
    progress, began_s = Progress("policy", len(policies)), time.monotonic()
    rows: list[Row] = []
    names = [x.name for x in (*policies, *([] if arguments.only else others(model)))]
    widths = [max(map(len, names))]
    widths += [max(len(name), width) for name, width in zip(HEAD[1:], WIDTHS, strict=True)]
    for row in compare(trace, model, policies, seed=arguments.seed, progress=progress):
        if row.simulated or not arguments.only:
            progress.clear()
            say("\n".join(aligned([*([] if rows else [HEAD]), cells_of(row)], widths)))  # each when it is done
            rows.append(row)
    say(f"S: the production protocol, simulated; M: a model. {time.monotonic() - began_s:.0f} s. What is assumed:")
    for row in rows:
        say(f"  {row.policy}: {row.assumes}")
    say("\n".join(conclusion(rows, notice_s=model.notice_s)))
    if not trace.removals():
        say(no_removal(arguments))
    if arguments.json:
        told = {"trace": trace.name, "hours": trace.end_s / 3600, "policies": [row.as_json() for row in rows]}
        _write("json", arguments.json, json.dumps(told, indent=1) + "\n")
    if arguments.picture:
        picture = draw(trace, rows, step_s=model.step_s, batch=model.batch)
        _write("picture", arguments.picture, picture)
    return 0


def _policies(arguments: argparse.Namespace, model: Model) -> list[Ours]:
    """The requested policies of ftopt."""
    if arguments.models and arguments.only:
        raise UserError(f"--models with --only={arguments.only}, which leaves the models out; give one of them")
    if arguments.models:
        return []
    found = ours(
        model, delay=model.delay, quorum=arguments.quorum, fragments=arguments.fragments, codec=arguments.codec
    )
    chosen = [x for x in found if not arguments.only or arguments.only in x.name]
    if not chosen:
        names = ", ".join(x.name for x in found)
        raise UserError(f"--only={arguments.only}: no policy has that in its name; they are {names}")
    return chosen


def _rates(arguments: argparse.Namespace, model: Model) -> int:
    """Policies by failure rates, on fleets of constant size."""
    policies, mtbfs_s = _policies(arguments, model), (math.inf, *_MTBFS_S)
    progress = Progress("case", len(policies) * len(mtbfs_s))
    make: Callable[[float], traces.Trace] = lambda mtbf_s: _fleet(arguments, mtbf_s)  # noqa: E731
    told = by_rate(model, make, policies, mtbfs_s=mtbfs_s, seed=arguments.seed, progress=progress)
    found = {(row.policy, mtbf_s): row for mtbf_s, row in told if row.simulated or not arguments.only}
    progress.clear()
    say(
        f"{count(arguments.machines, 'machine')}, H={model.sync_every}, failures in the whole fleet. Goodput, "
        "of what each reaches without failures:"
    )
    names = list(dict.fromkeys(name for name, _ in found))
    head = ["policy", "", *(f"a failure in {traces.span(mtbf_s)}" for mtbf_s in _MTBFS_S)]
    lines = []
    for name in names:
        rows = [found[name, mtbf_s] for mtbf_s in _MTBFS_S]
        free = found[name, math.inf].outcome.goodput
        shares = [f"{row.outcome.goodput / free:.1%}" if free else "no round" for row in rows]
        lines.append([name, "S" if rows[0].simulated else "M", *shares])
    say("\n".join(table(head, lines)))
    say("S: the production protocol, simulated; M: a model")
    if arguments.json:
        rows_told = [
            {"mtbf_s": mtbf_s if mtbf_s < math.inf else None, **row.as_json()} for (_, mtbf_s), row in found.items()
        ]
        _write("json", arguments.json, json.dumps(rows_told, indent=1) + "\n")
    return 0


def _sweep(arguments: argparse.Namespace, model: Model) -> int:
    """Periods by failure rates, on fleets of constant size."""
    progress = Progress("case", len(_PERIODS) * len(_MTBFS_S))
    make: Callable[[float], traces.Trace] = lambda mtbf_s: _fleet(arguments, mtbf_s)  # noqa: E731
    told = sweep(model, make, periods=_PERIODS, mtbfs_s=_MTBFS_S, seed=arguments.seed, progress=progress)
    cells = list(told)
    progress.clear()
    say(
        f"{count(arguments.machines, 'machine')}, no notice, delay {model.delay}, failures in the whole fleet. "
        "Of what each reaches without failures:"
    )
    say("goodput of ftopt / of torchft's DiLoCo")
    head = ["a failure in", *(f"H={period}" for period in _PERIODS)]
    both = {(x.mtbf_s, x.sync_every): f"{x.kept:.1%} / {x.discarded:.1%}" for x in cells}
    say("\n".join(table(head, [[traces.span(x), *(both[x, y] for y in _PERIODS)] for x in _MTBFS_S])))
    rest = "; ".join(f"H={x.sync_every}, {traces.span(x.mtbf_s)}" for x in cells if not x.pays)
    say(f"keeping survivors' work is worth less than 1 % of the machines' work at: {rest or 'none of these'}")
    if arguments.json:
        rows = [
            {"sync_every": x.sync_every, "mtbf_s": x.mtbf_s, "kept": x.kept, "discarded": x.discarded} for x in cells
        ]
        _write("json", arguments.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _published(arguments: argparse.Namespace, model: Model) -> int:
    """The models of other systems, on fleets with the failure rates of published tables."""
    found: dict[tuple[float, str], float] = {}
    rows = []
    for system, trained, every_s, ratio in ratios():
        for gap_s in (every_s, math.inf, 6 * 3600.0):
            if (gap_s, system) not in found:
                trace = _fleet(arguments, gap_s)
                found |= {(gap_s, name): _goodput(trace, model, MODELS[name]) for name in MODELS}
        against = math.inf if trained == "GPT-3 6.7B" else 6 * 3600.0
        modelled = found[every_s, system] / found[against, system]
        to = "no failure" if against == math.inf else "one in 6 h"
        rows.append([system, trained, traces.span(every_s), to, f"{ratio:.3f}", f"{modelled:.3f}"])
    say("\n".join(table(["system", "model", "a failure in", "ratio to", "published", "modelled here"], rows)))
    return 0


def _goodput(trace: traces.Trace, model: Model, name: str) -> float:
    return next(x for x in others(model) if x.name == name).run(trace, model).goodput
