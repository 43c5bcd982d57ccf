"""Which outer settings suit a run of known length: one place for defaults, warnings, logs, reports and ``ftopt plan``.

With the outer rate ``eta``, the outer momentum ``mu`` and ``H`` inner steps between two outer steps:

    gain   = eta / (1 - mu)       what a steady outer gradient is multiplied by in the end
    memory = H / (1 - mu)         inner steps that the momentum remembers

Two rules, for an inner rate that suits synchronous training: the gain is from 1 to 2 in a run of fewer than `SHORT`
inner steps, and the memory is at most `MEMORY_SHARE` of the run. In 600 steps (``python -m benchmarks grid``,
``docs/choosing.md``) a gain of 7 cost 2 to 16 % of the loss, a gain of 0.7 cost 4 %; the best settings remember up to a
sixth of the run. Public runs of 16,000 steps and more bear a gain of 7, and none bears a memory of a third.
"""

from __future__ import annotations

from ftopt.methods.method import Method
from ftopt.methods.outer_optimizers import SGD

AUTO = SGD(lr=1.0, momentum=0.25, nesterov=True)
"""``outer="auto"``: the best of the grid at each period, or within 1.7 % of it, with AdamW and with Muon inside."""
TRIAL, SHORT = 100, 10_000
GAINS, MEMORY_SHARE = (1.0, 2.0), 1 / 6
_CLOSE = 1e-6


def outer_figures(method: Method) -> dict[str, float]:
    """``lr``, ``momentum``, ``gain``, and with a fixed period ``memory``; empty unless the outer optimizer is `SGD`."""
    outer, period = getattr(method, "outer", None), method.timing.period
    if not isinstance(outer, SGD):
        return {}
    rest = 1 - outer.momentum
    memory = {"memory": period / rest} if period is not None else {}
    return {"lr": outer.lr, "momentum": outer.momentum, "gain": outer.lr / rest, **memory}


def outer_line(method: Method) -> str:
    """The outer optimizer in a line of a log; "" if its figures are not known."""
    if not (x := outer_figures(method)):
        return ""
    memory = f", memory {x['memory']:,.0f} inner steps" if "memory" in x else ""
    return f"outer optimizer: sgd, lr={x['lr']:g}, momentum={x['momentum']:g}; gain {x['gain']:.3g}{memory}"


def keeps_memory(method: Method, inner_steps: int) -> bool:
    """Whether the outer momentum remembers at most `MEMORY_SHARE` of a run of ``inner_steps``."""
    return outer_figures(method).get("memory", 0.0) <= MEMORY_SHARE * inner_steps + _CLOSE


def outer_problems(method: Method, inner_steps: int) -> list[str]:
    """The rules that a run of ``inner_steps`` breaks: each with what, why, and what to use instead. None for a run of
    fewer than `TRIAL` steps, whose loss nobody looks at."""
    if not (x := outer_figures(method)) or inner_steps < TRIAL:
        return []
    found, what = [], f"outer has lr={x['lr']:g}, momentum={x['momentum']:g}"
    (least, most), gain = GAINS, x["gain"]
    if inner_steps < SHORT and not least - _CLOSE <= gain <= most + _CLOSE:
        cost = "outer steps overshoot" if gain > most else "part of the replicas' progress is lost"
        found.append(
            f"{what}, which multiplies a steady outer gradient by lr / (1 - momentum) = {gain:.3g}: in a run of "
            f"{inner_steps:,} inner steps {cost}; use outer=auto, or a factor from {least:g} to {most:g}"
        )
    if not keeps_memory(method, inner_steps):
        period = int(MEMORY_SHARE * inner_steps * (1 - x["momentum"]) + _CLOSE)
        other = "" if x["momentum"] <= AUTO.momentum else "outer=auto, or "
        found.append(
            f"{what}, which with sync_every={method.sync_every} remembers sync_every / (1 - momentum) = "
            f"{x['memory']:,.0f} inner steps, more than a sixth of the run's {inner_steps:,}: outer steps are too few "
            f"for it; use {other}sync_every={max(1, period)} or less"
        )
    return found
