"""What the methods have in common whose rounds can be paced: one fragment of parameters, and nothing else exchanged."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from ftopt.errors import UserError
from ftopt.methods.method import Method
from ftopt.methods.pacing import BySpeed
from ftopt.methods.timing import Timing
from ftopt.methods.triggers import LOCAL


@dataclass(frozen=True, kw_only=True)
class Paced(Method):
    """A method whose rounds may be shared out by speed.

    Args:
        sync_every: ``H``. With a ``pacing`` without ``round_steps``: of each replica on average. None with
            ``round_steps``.
        pacing: how the inner steps of a round are shared out: ``BySpeed(round_steps=200)``. None (default): every
            replica takes ``sync_every``.
    """

    sync_every: int | None = field(default=None, metadata=LOCAL)
    pacing: BySpeed | None = None

    def _check_period(self) -> None:
        pacing, every = self.pacing, self.sync_every
        if pacing is not None and not isinstance(pacing, BySpeed):
            raise UserError(f"pacing={pacing!r}; must be None or ftopt.BySpeed(round_steps=200)")
        if pacing is None or (every is not None and pacing.round_steps is None):
            if every is None:
                raise UserError(
                    "sync_every is missing; use a whole number of inner steps, or pacing=ftopt.BySpeed(round_steps=200)"
                )
            super()._check_period()
        elif pacing.round_steps is None:
            raise UserError(
                "pacing without round_steps needs sync_every; use round_steps, the inner steps of a round over all "
                "replicas (200 for 50 on each of 4), or sync_every, those of each replica on average"
            )
        elif every not in (None, next(f.default for f in fields(self) if f.name == "sync_every")):
            raise UserError(
                f"sync_every={every!r} with pacing.round_steps={pacing.round_steps}, which shares the steps of a round "
                "out by speed; give one of the two (sync_every=None)"
            )

    @property
    def timing(self) -> Timing:
        """With the pacing."""
        return replace(super().timing, pacing=self.pacing)
