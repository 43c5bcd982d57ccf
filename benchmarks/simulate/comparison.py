"""Policies side by side on one trace: ftopt's, run by the production protocol, and models of other systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.policies import others
from benchmarks.simulate.tally import Outcome
from benchmarks.simulate.traces import Trace
from benchmarks.simulate.world import World
from ftopt.common.plural import count
from ftopt.errors import UserError

MOST = 5e9
"""Maximum of simulated heartbeats (hours on one core) and contributions (days) of one policy."""

Progress = Callable[[str, float], object]
"""Called with a policy's name, and the share of the trace that is done."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One way to use ftopt.

    Args:
        name, assumes: its name, and its assumptions.
        model: of compute, network and recovery.
        settings: the settings, ``key=value``, of a recipe that runs this way; others have their defaults. Default:
            none.
        on_notice: whether it acts on the notice of a removal (default: no), for which a recipe has no setting.
    """

    name: str
    assumes: str
    model: Model
    settings: tuple[str, ...] = ()
    on_notice: bool = False

    def run(self, trace: Trace, seed: int, progress: Progress) -> Outcome:
        """Drives the production protocol through the trace.

        Raises:
            UserError: it would take too long, see `check_size`.
        """
        check_size(trace, self.model)
        world = World(trace, self.model, seed=seed)
        for share in world.run():
            progress(self.name, share)
        return world.tally.result(end_s=trace.end_s, batch=self.model.batch)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy's result. ``simulated``: by the production protocol; else by a model. Other fields: see `Ours`."""

    policy: str
    assumes: str
    simulated: bool
    outcome: Outcome
    settings: tuple[str, ...] = ()
    on_notice: bool = False

    def as_json(self) -> dict[str, Any]:
        """Everything except the line of the picture."""
        outcome = asdict(self.outcome)
        del outcome["line"]
        told = {"policy": self.policy, "simulated": self.simulated, "assumes": self.assumes}
        return {**told, "settings": list(self.settings), "on_notice": self.on_notice, **outcome}


def ours(model: Model, *, delay: int, quorum: int, fragments: int, codec: str = "fp32") -> list[Ours]:
    """ftopt's policies.

    Args:
        model: of compute, network and recovery; its ``notice_s`` adds two policies that use a notice.
        delay: inner steps, for all policies but the blocking one.
        quorum, fragments: for the decoupled one.
        codec: the codec of the model's payloads, for the settings. Default ``fp32``.
    """
    told, notice_s = replace(model, notice_s=0.0, delay=0), model.notice_s
    late = replace(told, delay=delay)
    grace_s = max(model.grace_s, delay * model.step_s)
    decoupled = replace(late, fragments=fragments, min_replicas=quorum, adaptive_grace=1.0, grace_s=grace_s)
    blocking = f"DiLoCo, H={model.sync_every}, no notice: a removed machine's steps since its last round are lost"
    delayed = f"{blocking}; training goes on for {count(delay, 'step')} beside each round"
    streaming = _settings("streaming_diloco", late, codec)
    found = [
        Ours("ftopt, blocking", blocking, told, _settings("diloco", told, codec)),
        Ours(f"ftopt, delay {delay}", delayed, late, streaming),
        Ours(
            "ftopt, decoupled",
            f"{delayed}; {count(fragments, 'fragment')} in turn, quorum {quorum}, adaptive grace, {grace_s:g} s "
            "at most",
            decoupled,
            _settings("decoupled_diloco", decoupled, codec),
        ),
    ]
    if notice_s:
        when_s = min(notice_s, model.hand_in_s)
        found += [
            Ours(
                f"ftopt, delay {delay}, close() on notice",
                f"{when_s:g} s before its removal a replica calls close(), which opens no round of its own",
                replace(late, notice_s=notice_s, hand_in="leave"),
                streaming,
                on_notice=True,
            ),
            Ours(
                f"ftopt, delay {delay}, SIGTERM on notice",
                f"{when_s:g} s before its removal a replica gets SIGTERM: it opens a round, and leaves",
                replace(late, notice_s=notice_s, hand_in="sync"),
                streaming,
                on_notice=True,
            ),
        ]
    return found


def check_size(trace: Trace, model: Model) -> None:
    """UserError if more than `MOST` contributions, heartbeats and slowdowns would have to be simulated. Heartbeats go
    on until all replicas have handed in their last steps."""
    machine_s = trace.machine_seconds()
    last_s = 2 * (model.grace_s + model.dead_after_s) * max(size for _, size in trace.sizes())
    slow = machine_s / (model.slow_every_s + model.slow_for_s)
    parts = [
        (model.fragments * machine_s / (model.step_s * model.sync_every), "contributions", "--step-s or --sync-every"),
        (machine_s / model.heartbeat_s, "heartbeats", "--dead-after"),
        (last_s / model.heartbeat_s, "heartbeats after the end", "--dead-after, a smaller --grace, --step-s, --delay"),
        (slow, "slowdowns of machines", "--slow-every or --slow-for"),
    ]
    number, what, option = max(parts)
    if number > MOST:
        raise UserError(
            f"{number:.1g} {what} would have to be simulated; at most {MOST:.0e} are allowed: give a larger {option}, "
            "fewer machines, or fewer --hours"
        )


def _settings(method: str, model: Model, codec: str) -> tuple[str, ...]:
    """The settings of a recipe for a job as the model describes it, without those that have their defaults."""
    given: dict[str, float | int | str | None] = {"method.name": method, "method.sync_every": model.sync_every}
    if method != "diloco":
        given |= {"method.delay": model.delay, "method.fragments.n": model.fragments}
    usual = Model().settings(1)
    given |= {f"policy.{key}": value for key, value in model.settings(1).items() if value != usual[key]}
    if codec != "fp32":
        given["method.codec"] = codec
    return tuple(f"{key}={value:.9g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items())


def compare(
    trace: Trace,
    model: Model,
    policies: Sequence[Ours],
    *,
    seed: int = 0,
    progress: Progress = lambda name, share: None,
) -> Iterator[Row]:
    """Runs ``policies``, and then the models of other systems. Raises UserError first, as `Ours.run` does."""
    for policy in policies:
        check_size(trace, policy.model)
    for policy in policies:
        outcome = policy.run(trace, seed, progress)
        yield Row(policy.name, policy.assumes, True, outcome, policy.settings, policy.on_notice)
    for other in others(model):
        yield Row(other.name, other.assumes, False, other.run(trace, model))


def by_rate(
    model: Model,
    make: Callable[[float], Trace],
    policies: Sequence[Ours],
    *,
    mtbfs_s: Sequence[float],
    seed: int = 0,
    progress: Progress = lambda name, share: None,
) -> Iterator[tuple[float, Row]]:
    """The rows for each mean time between failures; ``make`` makes a trace with such a mean time."""
    for mtbf_s in mtbfs_s:
        for row in compare(make(mtbf_s), model, policies, seed=seed, progress=progress):
            yield mtbf_s, row


@dataclass(frozen=True, slots=True)
class Cell:
    """Goodput of a period and a failure rate: with survivors' work kept, and with it discarded. The latter is relative
    to goodput without failures, since how long the network takes is another matter."""

    sync_every: int
    mtbf_s: float
    kept: float
    discarded: float

    @property
    def pays(self) -> bool:
        """Whether keeping survivors' work saves at least a percent of the machines' work."""
        return self.kept - self.discarded >= 0.01


def sweep(
    model: Model,
    make: Callable[[float], Trace],
    *,
    periods: Sequence[int],
    mtbfs_s: Sequence[float],
    seed: int = 0,
    progress: Progress = lambda name, share: None,
) -> Iterator[Cell]:
    """The cell of each period and failure rate, without notices; ``make`` makes a trace of a mean time between
    failures."""
    for mtbf_s in mtbfs_s:
        trace = make(mtbf_s)
        for period in periods:
            at = replace(model, sync_every=period, delay=min(model.delay, period - 1), notice_s=0.0)
            found = Ours(f"H={period}, a failure in {mtbf_s:g} s", "", at).run(trace, seed, progress)
            torchft = next(x for x in others(at) if x.name == "discard, torchft's DiLoCo").run(trace, at)
            yield Cell(period, mtbf_s, found.goodput, torchft.goodput / (torchft.fault_free or 1.0))
