"""The settings of the outer-sync layer: one frozen dataclass, the same fields in Python and in a recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from ftopt.errors import Settings, UserError, check_choice, check_number, check_whole

_DERIVED = ("heartbeat_s", "recovery_s")


@dataclass(frozen=True, slots=True)
class Derived:
    """The times of `FaultPolicy` that derive from others unless they are set."""

    heartbeat_s: float
    recovery_s: float


@dataclass(frozen=True, kw_only=True)
class FaultPolicy(Settings):
    """The settings of a job's outer sync. The first replica of a job defines them; one with others is refused.

    Args:
        min_replicas: members that a quorum must have when it forms. Default 1: a lone survivor goes on.
        start_replicas: replicas that must be connected before a cold start. None: the number that the coordinator was
            given (``--start-replicas``; ``ftopt launch -n``), else ``min_replicas``: the job starts at once, and others
            join while it runs. (``ftopt run`` sets it to the recipe's ``replicas``.)
        grace_s: seconds from the first proposal after which the replicas still at work are called in. Default 2.
        dead_after_s: seconds of silence after which a replica counts as cut off, and seconds without a reduced piece
            after which an attempt fails. Default 3.
        evict_after_s: seconds after which a replica that is away is removed; at the end of the data also one that
            holds samples and does nothing with them while another one has none left. Default 600.
        on_loss: what the loss of a replica means for the others. ``go_on`` (default): they train on. ``fail``: the job
            ends for all with `ftopt.errors.JobFailed`, at the last version, for experiments that want a fixed set of
            replicas. A replica is lost if it dies, is away for ``dead_after_s``, or leaves before its end; see
            ``docs/operations.md``. Not with ``recover: replay``.
        recover: what happens to the inner steps that a dead replica had not contributed. ``drop`` (default): its
            samples go to other replicas. ``replay``: a neighbour keeps a copy of the replica as it was at the start of
            its round, and the process that replaces it repeats its steps; see ``docs/checkpoints.md``.

    Advanced:
        start_s: seconds after which a cold start happens with the replicas that are connected. Default 60.
        heartbeat_s: seconds between two heartbeats of a replica; at most a third of ``dead_after_s``. Default
            None: a sixth of ``dead_after_s``, at most 0.5.
        recovery_s: seconds that a coordinator without its journal waits for the replicas that the others name. Default
            None: ``10 * dead_after_s``.
        outlier_ratio: a contribution whose norm, or largest element, exceeds this multiple of the usual in the job and
            of its peers' weighs nothing, and its steps stay pending; for gradients the limit is the square of this.
            Without peers it is compared with what its own steps can make. After the second time in a row the steps are
            dropped, and the inner state is reset; see ``docs/operations.md``. Default 100: a corrupted replica, not a
            noisy one. At least 10: while losses rise, sound contributions reach 5 times the usual. None: off.
        copy_every: with ``recover: replay``: inner steps after which a neighbour gets another copy, besides the one at
            the start of each round, so that at most this many steps of a dead replica are done again. Default None: one
            copy per round.
        stragglers: what rounds do about a replica whose steps take much longer than the others'. ``call_in``
            (default): they call it in early, with the steps that it has, or do without it. ``wait``: they treat it as
            any other. See ``docs/operations.md``.
        frozen: whether a replica's frozen weights, those that do not train, must be the job's, and not another base
            model's. ``compare`` (default): a replica with others is refused. ``ignore``: each replica has its own.
        inner: whether a replica's inner optimizer must be of the job's class. ``compare`` (default): a replica with
            another is refused, and different rates, settings or versions of torch are logged once, in its log and the
            coordinator's. ``ignore``: each replica has its own, and nothing is logged. (`SyncSGD` and `PAFT` compare it
            in any case.)

    Raises:
        UserError: a value is out of range.
    """

    min_replicas: int = 1
    start_replicas: int | None = None
    grace_s: float = 2.0
    dead_after_s: float = 3.0
    evict_after_s: float = 600.0
    on_loss: str = "go_on"
    recover: str = "drop"
    start_s: float = 60.0
    heartbeat_s: float | None = None
    recovery_s: float | None = None
    outlier_ratio: float | None = 100.0
    copy_every: int | None = None
    stragglers: str = "call_in"
    frozen: str = "compare"
    inner: str = "compare"

    def __post_init__(self) -> None:
        check_whole("policy.min_replicas", self.min_replicas, 1, hint="use 1 to let a lone survivor go on")
        if self.start_replicas is not None:
            check_whole("policy.start_replicas", self.start_replicas, 1, hint="use null for those that come in start_s")
        for name in ("start_s", "grace_s", "dead_after_s", "evict_after_s", *_DERIVED):
            if getattr(self, name) is not None or name not in _DERIVED:
                check_number(f"policy.{name}", getattr(self, name), "(0, inf)", of="seconds")
        if self.dead_after_s < 3 * self.derived.heartbeat_s:
            raise UserError(
                f"policy.dead_after_s={self.dead_after_s:g} with heartbeat_s={self.heartbeat_s:g}; must be at least 3 "
                "heartbeats, or one late heartbeat declares a replica dead; use "
                f"dead_after_s={3 * self.derived.heartbeat_s:g} or a shorter heartbeat_s"
            )
        if self.evict_after_s < self.dead_after_s:
            raise UserError(
                f"policy.evict_after_s={self.evict_after_s:g}; must be at least dead_after_s={self.dead_after_s:g}"
            )
        if self.outlier_ratio is not None:
            check_number("policy.outlier_ratio", self.outlier_ratio, "[10, inf)", hint="use 100, or null for off")
        check_choice("policy.recover", self.recover, ("drop", "replay"))
        if self.copy_every is not None:
            check_whole("policy.copy_every", self.copy_every, 1, of="inner steps", hint="use null for one copy a round")
            if self.recover != "replay":
                raise UserError(
                    f"policy.copy_every={self.copy_every} with recover={self.recover}; copies are made for replay: use "
                    "recover=replay, or copy_every=null"
                )
        check_choice("policy.on_loss", self.on_loss, ("go_on", "fail"))
        if self.on_loss == "fail" and self.recover == "replay":
            raise UserError(
                "policy.on_loss=fail with recover=replay; a lost replica ends the job, and nothing of it is replayed; "
                "use recover=drop, or on_loss=go_on"
            )
        check_choice("policy.stragglers", self.stragglers, ("call_in", "wait"))
        check_choice("policy.frozen", self.frozen, ("compare", "ignore"))
        check_choice("policy.inner", self.inner, ("compare", "ignore"))

    @cached_property
    def derived(self) -> Derived:
        """The derived times, as set or as derived."""
        return Derived(
            heartbeat_s=self.heartbeat_s or min(self.dead_after_s / 6, 0.5),
            recovery_s=self.recovery_s or 10 * self.dead_after_s,
        )

    def values(self) -> dict[str, int | float | str | None]:
        """All settings by name, in the form in which the protocol carries and compares them, with derived times."""
        return asdict(self) | asdict(self.derived)
