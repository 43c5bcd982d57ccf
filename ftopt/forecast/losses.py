"""How much higher a method's loss is than with gradients exchanged at every step: published figures, and our own.

Nobody can know the loss of a job before it has run. These are figures from others' runs and ours; the nearest one is
shown with its source. Values in between are interpolated in the logarithm of ``H`` (for the nearest size); values
beyond are extrapolated, and the source says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftopt.methods import Method

LEAST_PUBLISHED = 20e6
"""Number of parameters from which the papers' figures are used; below, our own, from a model of 131,000."""

PUBLISHED: Mapping[float, Mapping[int, float]] = {
    35e6: {30: 100 * (3.53 / 3.51 - 1), 100: 100 * (3.56 / 3.51 - 1)},
    100e6: {30: 100 * (3.21 / 3.19 - 1), 100: 100 * (3.22 / 3.19 - 1)},
    200e6: {30: 100 * (2.98 / 2.97 - 1), 100: 100 * (3.00 / 2.97 - 1)},
    300e6: {30: 100 * (2.81 / 2.80 - 1), 100: 100 * (2.83 / 2.80 - 1)},
    500e6: {30: 100 * (2.67 / 2.67 - 1), 100: 100 * (2.69 / 2.67 - 1)},
    1e9: {30: 100 * (2.48 / 2.49 - 1), 100: 100 * (2.50 / 2.49 - 1)},
    4e9: {100: 100 * (2.26 / 2.25 - 1)},
}
"""Parameters -> H -> % of loss above data-parallel: Streaming DiLoCo with overlap and FP4, 2 replicas, C4 (arXiv
2501.18512, table 5). DiLoCo with H 30 is within 0.01 of it at each size."""
_PER_FOLD = 100 * math.log(1.029) / math.log(16.0) / math.log(20)
"""% of loss for each factor e of H beyond 100: perplexity 2.9 % higher at H 1,000 than at 50 (arXiv 2311.08105)."""
_PUBLISHED_DELAY, _MOST_DELAY = 0.02, 10
"""% per step of delay: below 0.2 % up to 10 (arXiv 2501.18512, section 3.3.2)."""

MEASURED: Mapping[str, Mapping[int, float]] = {
    "local_sgd": {1: 0.0, 10: 10.0, 50: 15.2},
    "diloco": {1: 0.0, 10: 9.3, 50: 14.2, 100: 16.5},
    "streaming_diloco": {1: 0.0, 10: 9.3, 50: 13.7, 100: 16.5},
    "decoupled_diloco": {1: 0.0, 50: 13.4},
}
"""Method -> H -> % of loss above SyncSGD after 600 steps, 131,000 parameters, 4 replicas (``docs/choosing.md``);
decoupled_diloco's figures are less what its delay of 5 costs streaming_diloco."""
_MEASURED_PARAMETERS, _MEASURED_STEPS = 131_000, 600
_FAR = 2
"""Factor above a measured size beyond which a figure is said to be extrapolated."""
_MEASURED_DELAY = 0.46
_MEASURED_CODEC = {"fp32": 0.0, "bf16": 0.0, "int8": 0.0, "fp4": 0.2}


@dataclass(frozen=True)
class Penalty:
    """A loss, as % above that of exchanging gradients at every step.

    Args:
        percent: the estimate; None: there is no figure.
        source: where the estimate is from.
        smaller: the runs that it is from, if the job is far larger or longer.
    """

    percent: float | None
    source: str
    smaller: str = ""


def penalty(
    method: Method, codec: str, parameters: int, *, late_steps: int = 0, inner_steps: int = _MEASURED_STEPS
) -> Penalty:
    """The nearest figures for a method, at equal tokens.

    Args:
        method: with its period, delay and so on.
        codec: its short form, such as ``fp32``.
        parameters: number of parameters of the model.
        late_steps: inner steps by which results are later than the method's delay. Default 0.
        inner_steps: inner steps of the job. Default 600, as in our own runs.
    """
    gradients = method.gradients
    if gradients is not None and gradients is method:
        if codec == "fp32":
            return Penalty(0.0, "none by definition: gradients are averaged before each step")
        return Penalty(None, f"no figure for gradients with {codec}")
    every, delay = method.sync_every, method.overlap.delay + late_steps
    if method.name not in MEASURED or gradients is not None:
        return Penalty(None, f"no figure for {method.name}")
    if method.timing.pacing is not None and method.timing.pacing.round_steps is not None:
        return Penalty(None, f"no figure for {method.name} with pacing.round_steps")
    if codec not in _MEASURED_CODEC:
        return Penalty(None, f"no figure for {codec} at this length")
    if method.trigger is not None:
        return Penalty(None, f"no figure for {method.name} with a trigger")
    if parameters < LEAST_PUBLISHED:
        return _measured(method.name, every, delay, codec, {"parameters": parameters, "steps": inner_steps})
    return _published(method.name, every, delay, parameters)


def _measured(name: str, every: int, delay: int, codec: str, job: Mapping[str, int]) -> Penalty:
    percent = _at(MEASURED[name], every) + _MEASURED_DELAY * delay + _MEASURED_CODEC[codec]
    known = {"parameters": _MEASURED_PARAMETERS, "steps": _MEASURED_STEPS}
    far = [f"{size:,} {what}" for what, size in job.items() if size > _FAR * known[what]]
    beyond = _beyond(every, delay, longest=max(MEASURED[name]), most_delay=5, more=far)
    runs = ", ".join(f"{size:,} {what}" for what, size in known.items())
    return Penalty(
        percent,
        f"measured with ftopt: {runs}, 4 replicas (docs/choosing.md){beyond}; it shrinks with longer runs and larger "
        "models",
        runs if far else "",
    )


def _published(name: str, every: int, delay: int, parameters: int) -> Penalty:
    if name not in ("diloco", "streaming_diloco"):
        return Penalty(None, f"no figure for {name} at this size")
    size = min(PUBLISHED, key=lambda x: abs(math.log(x / parameters)))
    known = PUBLISHED[size]
    percent = max(0.0, _at(known, min(max(every, min(known)), 100)))
    percent += _PER_FOLD * math.log(max(1.0, every / 100)) + _PUBLISHED_DELAY * delay
    far = [f"{parameters:,} parameters"] if parameters > _FAR * max(PUBLISHED) else []
    beyond = _beyond(every, delay, longest=100, most_delay=_MOST_DELAY, more=far)
    return Penalty(
        percent,
        f"arXiv 2501.18512, table 5: {_short(size)} parameters, 2 replicas{beyond}; with more replicas at the same "
        "tokens it is more (table 6)",
        f"{_short(size)} parameters" if far else "",
    )


def _beyond(every: int, delay: int, *, longest: int, most_delay: int, more: Sequence[str]) -> str:
    over = [*([f"H {every}"] * (every > longest)), *([f"delay {delay}"] * (delay > most_delay)), *more]
    return f", extrapolated to {' and '.join(over)}" if over else ""


def _at(known: Mapping[int, float], every: int) -> float:
    """Interpolates between neighbours in the logarithm of H; beyond the last value, extrapolates the last line."""
    periods = sorted(known)
    if len(periods) == 1 or every <= periods[0]:
        return known[periods[0]]
    for low, high in itertools.pairwise(periods):
        if every <= high or high == periods[-1]:
            share = math.log(every / low) / math.log(high / low)
            return known[low] + share * (known[high] - known[low])
    raise AssertionError


def _short(size: float) -> str:
    return f"{size / 1e9:g}B" if size >= 1e9 else f"{size / 1e6:g}M"
